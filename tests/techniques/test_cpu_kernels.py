"""cpu_attention, fused_mlp and fused_loss on a CPU by the kernels in C++, as users have them: not interpreted."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from rush.errors import MachineError, RushError
from rush.hardware import probe
from rush.kernels import cpu, support
from rush.techniques import check
from rush.techniques.api.evidence import prove
from tests.techniques.tiny_runs import compare, make_run, recipe_of, trace

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
OURS = ("cpu_attention", "fused_mlp", "fused_loss")
COMPILED = "{name='compile', scope='block'}"
SMALL = ["model.shape.num_layers=2"]


@pytest.fixture(autouse=True)
def _by_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := cpu.cannot_run():
        pytest.skip(f"kernels for a CPU cannot run here: {reason}")
    # Triton's own functions are interpreted if the variable was there when it was imported, which other tests in this process need.
    with suppress(ImportError):
        import_module("triton.language")
    monkeypatch.setattr(support, "INTERPRETED", False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("tiny", ()),
        pytest.param("tiny", ("fused_adamw", "gc_control", "loader_workers"), marks=pytest.mark.slow),
        pytest.param("tiny", ("checkpoint_full",), marks=pytest.mark.slow),
        ("tiny", (COMPILED,)),
        ("llama-tiny", ("fused_projections",)),
        ("llama-tiny", ("checkpoint_selective",)),
    ],
    ids=str,
)
def test_they_take_effect_and_learn_what_plain_learns(name: str, others: tuple[str, ...]) -> None:
    run = make_run(*OURS, *others, name=name, overrides=SMALL)
    ours = trace(run, 4, watch=True)
    assert ours.seen is not None
    assert "rush_cpu::attention_backward" in ours.seen.ops
    assert "rush_cpu::cross_entropy_forward" in ours.seen.ops
    proofs = prove(run.uses, ours.seen)
    for technique in OURS:
        assert proofs[technique].took_effect, proofs[technique].what
    judged = compare(run, "float32", ours, trace(make_run(name=name, overrides=SMALL), 4))
    assert judged.verdict == "equal", judged.why


def test_packed_documents_know_nothing_of_each_other() -> None:
    model = make_run("cpu_attention", "fused_loss", overrides=SMALL).model
    tokens_bt = torch.randint(0, model.shape.vocab_size, (1, 40), generator=torch.Generator().manual_seed(0))
    documents_bt = torch.tensor([[0] * 17 + [1] * 23])
    positions_bt = torch.cat((torch.arange(17), torch.arange(23)))[None]
    labels_bt = tokens_bt.masked_fill(documents_bt == 0, -100)
    alone = model(tokens_bt[:, 17:], tokens_bt[:, 17:])
    together = model(tokens_bt, labels_bt, positions_bt=positions_bt, documents_bt=documents_bt)
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-5)


def test_where_it_cannot_run_it_is_refused_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = probe("cpu")
    check(recipe_of(*OURS), here)
    with pytest.raises(RushError, match="supports head dims 16, 32, 64, 128, 256"):
        check(recipe_of("cpu_attention", overrides=["model.shape.head_dim=24"]), here)
    with pytest.raises(RushError, match="flash_attention"):
        check(recipe_of("cpu_attention", "flash_attention"), here)
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    for technique in OURS:
        with pytest.raises(MachineError, match=r"a C\+\+ compiler to build its kernels with"):
            check(recipe_of(technique), here)
    with pytest.raises(MachineError, match="on a GPU use flash_attention"):
        check(recipe_of("cpu_attention"), replace(here, device="cuda"))
