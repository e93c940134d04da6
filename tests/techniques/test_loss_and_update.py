"""fused_loss, fused_update and adam8bit by our own kernels, in whole runs: effect, learning, stacks, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rush.checkpoint import restore
from rush.errors import MachineError, RecipeError
from rush.hardware import probe
from rush.records.checkpoint_store import CheckpointStore
from rush.techniques import check, registry
from rush.techniques.api.contract import Use
from rush.techniques.api.evidence import prove, prove_use
from rush.techniques.optimizer.adam8bit import paged_bytes
from rush.training.build import Run
from rush.training.step import train_step, validate
from tests.techniques.tiny_runs import SHORT, compare, make_loader, make_run, one_batch, recipe_of, trace

pytestmark = pytest.mark.filterwarnings(
    "ignore:mkldnn_matmul failed:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
CHANCE = "{name='fused_update', stochastic_rounding=true, state='bfloat16'}"
EIGHT_BITS = "{name='adam8bit', backend='rush'}"
STOCHASTIC_8BIT = "{name='adam8bit', backend='rush', stochastic_rounding=true}"


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "techniques", "dtype"),
    [
        ("tiny", ["fused_loss", "fused_update"], "float32"),
        pytest.param(
            "llama-tiny",
            ["fused_loss", "checkpoint_full", "accumulate"],
            "float32",
            marks=pytest.mark.slow,
        ),
        pytest.param("tiny", ["fused_loss", "amp_bf16"], "bfloat16", marks=pytest.mark.slow),
        pytest.param(
            "llama-tiny", ["fused_loss", "amp_fp16", "fused_update"], "float16", marks=pytest.mark.slow
        ),
        pytest.param(
            "llama-tiny", ["pure_bf16", "fused_loss", "fused_update"], "bfloat16", marks=pytest.mark.slow
        ),
        ("tiny", ["pure_bf16", CHANCE], "bfloat16"),
        pytest.param("llama-tiny", ["bf16_master", "fused_loss"], "bfloat16", marks=pytest.mark.slow),
        ("llama-tiny", [EIGHT_BITS], "float32"),
        ("llama-tiny", ["pure_bf16", STOCHASTIC_8BIT], "bfloat16"),
    ],
    ids=str,
)
def test_stacks_take_effect_and_learn_what_plain_fp32_learns(
    name: str, techniques: list[str], dtype: str
) -> None:
    run, plain = (make_run(*names, name=name, overrides=SHORT) for names in (techniques, []))
    ours, theirs = trace(run, 2, watch=True), trace(plain, 2)
    assert ours.seen is not None
    proofs = prove(run.uses, ours.seen)
    assert all(proof.took_effect for proof in proofs.values()), proofs
    verdict = compare(run, dtype, ours, theirs)
    assert verdict.verdict == "equal", verdict.why


def test_a_compiled_model_has_the_loss_inside_its_one_graph() -> None:
    run = make_run("fused_loss", "compile", overrides=SHORT)
    ours = trace(run, 2, watch=True)
    assert ours.seen is not None
    assert ours.seen.compiled.graph_breaks == 0
    assert all(proof.took_effect for proof in prove(run.uses, ours.seen).values())
    verdict = compare(run, "float32", ours, trace(make_run(overrides=SHORT), 2))
    assert verdict.verdict == "equal", verdict.why


def test_validation_sees_the_same_loss() -> None:
    run, plain = make_run("fused_loss", overrides=SHORT), make_run(overrides=SHORT)
    batches = one_batch(run)
    assert validate(run, batches) == pytest.approx(validate(plain, batches), rel=1e-6)


@pytest.mark.parametrize(
    "techniques",
    [
        ["fused_update"],
        pytest.param(["pure_bf16", CHANCE], marks=pytest.mark.slow),
        pytest.param([EIGHT_BITS], marks=pytest.mark.slow),
        ["pure_bf16", STOCHASTIC_8BIT],
    ],
    ids=str,
)
def test_a_resumed_run_ends_at_the_same_bits(techniques: list[str], tmp_path: Path) -> None:
    def run_on(run: Run, first: int, last: int) -> list[float]:
        with make_loader(run) as loader:
            batches = [list(loader.next_step()) for _ in range(last)]
        return [train_step(run, step, 1e-2, batches[step - 1]).loss for step in range(first, last + 1)]

    whole = make_run(*techniques, overrides=SHORT)
    run_on(whole, 1, 2)
    path = restore.save(CheckpointStore(tmp_path), 2, whole.model, whole.optimizer, {})
    expected = run_on(whole, 3, 4)
    resumed = make_run(*techniques, overrides=SHORT)
    run_on(resumed, 1, 1)  # a state of its own, which the checkpoint must replace
    restore.load(path, resumed.model, resumed.optimizer)
    assert run_on(resumed, 3, 4) == expected
    theirs = weights(whole)
    assert all(torch.equal(p, theirs[name]) for name, p in resumed.model.named_parameters())


@pytest.mark.slow
def test_updates_that_bf16_rounds_away_accumulate_with_stochastic_rounding() -> None:
    """As with an fp32 master copy, which test_effects.py shows; to nearest none of them moves."""
    name = "blocks.0.attention_norm.weight"  # ones: bf16 has no number between 1 and 1.0078
    run = make_run("pure_bf16", CHANCE, overrides=[*SHORT, "optimizer.weight_decay=0"])
    batches = one_batch(run)
    for step in range(1, 9):
        train_step(run, step, 1e-3, batches)
    moved = run.model.get_parameter(name).detach().double() - 1
    assert int((moved != 0).sum()) > 5
    assert (
        float(moved.abs().mean()) < 8 * 1e-3 * 2
    )  # by whole notches, but no farther than the updates add up to


def test_the_evidence_distinguishes_stochastic_rounding_from_round_to_nearest() -> None:
    technique = registry()["fused_update"]
    seen = trace(make_run("pure_bf16", CHANCE, overrides=SHORT), 1, watch=True).seen
    assert seen is not None
    asked = {"stochastic_rounding": True, "state": "bfloat16"}
    assert technique.evidence(seen, asked).took_effect
    assert not technique.evidence(seen, {**asked, "stochastic_rounding": False}).took_effect
    assert not technique.evidence(seen, {**asked, "state": "float32"}).took_effect


def test_the_evidence_distinguishes_our_8_bit_kernel_from_a_librarys() -> None:
    technique = registry()["adam8bit"]
    seen = trace(make_run(EIGHT_BITS, overrides=SHORT), 1, watch=True).seen
    assert seen is not None
    asked = {"backend": "rush", "stochastic_rounding": False, "paged": False}
    assert prove_use(Use(technique, asked), seen).took_effect
    assert not prove_use(Use(technique, {**asked, "paged": True}), seen).took_effect, (
        "nothing is in unified memory"
    )
    assert not prove_use(Use(technique, {**asked, "backend": "torchao"}), seen).took_effect
    assert not prove_use(Use(technique, {**asked, "stochastic_rounding": True}), seen).took_effect


@pytest.mark.parametrize(
    "techniques",
    [
        ["{name='fused_update', stochastic_rounding=true}"],
        ["{name='fused_update', state='bfloat16'}", "amp_bf16"],
        [STOCHASTIC_8BIT],
        ["pure_bf16", "{name='adam8bit', stochastic_rounding=true}"],
    ],
    ids=str,
)
def test_stochastic_rounding_is_refused_where_nothing_is_bf16(techniques: list[str]) -> None:
    with pytest.raises(
        MachineError,
        match=r"stochastic rounding and bf16 moments are for bf16 weights|stochastic rounding is for bf16 weights",
    ):
        check(recipe_of(*techniques), probe("cpu"))


def test_what_cannot_stand_together_is_refused() -> None:
    for pair in (
        ("fused_loss", "chunked_loss"),
        ("fused_loss", "vocab_pad"),
        ("fused_update", "bf16_master"),
    ):
        with pytest.raises(RecipeError, match="cannot be combined"):
            check(recipe_of(*pair), probe("cpu"))


def test_moments_count_as_paged_only_where_the_library_marked_them() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.AdamW([weight])
    moments: Any = torch.zeros(4, 4, dtype=torch.uint8)
    optimizer.state[weight] = {"step": 1, "state1": moments}
    assert paged_bytes(optimizer) == 0
    moments.is_paged = True
    assert paged_bytes(optimizer) == 16


def test_paged_moments_are_refused_without_a_gpu_and_with_another_backend() -> None:
    with pytest.raises(MachineError, match="backend bitsandbytes it needs a CUDA GPU"):
        check(recipe_of("{name='adam8bit', backend='bitsandbytes', paged=true}"), probe("cpu"))
    with pytest.raises(MachineError, match="paged moments need backend bitsandbytes"):
        check(recipe_of("{name='adam8bit', backend='torchao', paged=true}"), probe("cpu"))
