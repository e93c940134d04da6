"""triton_attention in a model: documents, packed and apart; compiled; refused where it cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rush.errors import MachineError, RecipeError
from rush.hardware import probe
from rush.models import build_model
from rush.techniques import check
from rush.techniques.api.contract import Observation
from rush.techniques.api.evidence import prove
from rush.techniques.api.seams import set_attention_core
from rush.techniques.attention.triton_attention import TritonCore, evidence
from rush.training.build import Run
from tests.techniques.tiny_runs import Trace, compare, make_run, recipe_of, trace

pytestmark = pytest.mark.filterwarnings(
    "ignore:mkldnn_matmul failed:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
COMPILED = "{name='compile', scope='block'}"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    from rush.kernels.support import INTERPRETED

    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("kernels are compiled on this machine, and the CPU has only the interpreter")
    return str(request.param)


# One block of two query heads on one row: the interpreter takes its time for every program.
SMALL = (
    "model.shape.num_layers=1", "model.shape.num_heads=2", "model.shape.num_kv_heads=1", "model.shape.head_dim=64",
    "batch.micro=1", "batch.total_tokens=32",
)  # fmt: skip


def tried(
    *techniques: str, device: str, name: str = "llama-tiny", overrides: tuple[str, ...] = SMALL
) -> tuple[Run, Trace]:
    run = make_run(*techniques, name=name, overrides=overrides, machine=probe(device))
    return run, trace(run, 2, watch=True)


@pytest.mark.parametrize("name", [pytest.param("tiny", marks=pytest.mark.slow), "llama-tiny"])
def test_it_takes_effect_and_learns_the_same_in_both_families(name: str, device: str) -> None:
    """In fp32, where a small mistake shows; the second family shares key/value heads among query heads."""
    shape = (*SMALL, "model.shape.hidden=128", "model.shape.num_kv_heads=2") if name == "tiny" else SMALL
    run, ours = tried("triton_attention", device=device, name=name, overrides=shape)
    assert ours.seen is not None
    proof = prove(run.uses, ours.seen)["triton_attention"]
    assert proof.took_effect, proof.what
    plain = tried(device=device, name=name, overrides=shape)[1]
    verdict = compare(run, "float32", ours, plain)
    assert verdict.verdict == "equal", verdict.why


@pytest.mark.parametrize(
    ("amp", "dtype"),
    [
        ("amp_bf16", "bfloat16"),
        pytest.param("amp_fp16", "float16", marks=pytest.mark.slow),
        pytest.param("pure_bf16", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_it_takes_the_inputs_of_mixed_precision(amp: str, dtype: str, device: str) -> None:
    run, ours = tried("triton_attention", amp, device=device)
    assert ours.seen is not None
    assert all(proof.took_effect for proof in prove(run.uses, ours.seen).values()), prove(run.uses, ours.seen)
    verdict = compare(run, dtype, ours, tried(device=device)[1])
    assert verdict.verdict == "equal", verdict.why


@pytest.mark.parametrize(
    "others",
    [
        pytest.param((COMPILED,), marks=pytest.mark.slow),
        ("checkpoint_full",),
        pytest.param(("checkpoint_selective", COMPILED), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_works_with_compile_and_checkpointing(others: tuple[str, ...], device: str) -> None:
    torch._dynamo.reset()
    run, ours = tried("triton_attention", *others, device=device)
    assert ours.seen is not None
    assert ours.seen.compiled.graph_breaks == 0
    assert all(proof.took_effect for proof in prove(run.uses, ours.seen).values()), prove(run.uses, ours.seen)
    verdict = compare(run, "float32", ours, tried(device=device)[1])
    assert verdict.verdict == "equal", verdict.why


def test_a_packed_row_gives_what_its_documents_give_alone(device: str) -> None:
    recipe = recipe_of("triton_attention")
    model = build_model(recipe.shape())
    model.init_weights(0)
    model.to(device)
    tokens = torch.randint(0, 257, (1, 30), generator=torch.Generator().manual_seed(0)).to(device)
    lengths = [11, 1, 18]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].to(device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    plain = model(tokens, positions_bt=positions, documents_bt=documents)
    set_attention_core(model, TritonCore)
    packed = model(tokens, positions_bt=positions, documents_bt=documents)
    apart = torch.cat([model(piece) for piece in tokens.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(tokens, positions_bt=positions), packed, atol=1e-3)


def test_a_head_dim_it_is_not_made_for_is_refused() -> None:
    with pytest.raises(MachineError, match="supports head dims 16, 32, 64, 128, 256"):
        check(recipe_of("triton_attention", overrides=["model.shape.head_dim=24"]), probe("cpu"))


def test_without_triton_it_is_refused() -> None:
    with pytest.raises(MachineError, match="needs Triton"):
        check(recipe_of("triton_attention"), replace(probe("cpu"), triton=None))


@pytest.mark.parametrize("other", ["flash_attention", "cudnn_attention", "flex_attention"])
def test_two_cores_are_refused(other: str) -> None:
    with pytest.raises((RecipeError, MachineError), match=r"cannot be combined|cannot run here"):
        check(recipe_of("triton_attention", other), probe("cpu"))


def test_kernels_that_ran_with_those_of_another_core_are_no_evidence() -> None:
    """Half the layers through another kernel is not what was asked for."""

    def seen(*kernels: str, ops: tuple[str, ...] = ()) -> Observation:
        _, ours = plain_run()
        assert ours.seen is not None
        return replace(ours.seen, kernels=dict.fromkeys(kernels, 1.0), ops=dict.fromkeys(ops, 1))

    ours = ("flash_forward_tiles", "flash_dq_tiles", "flash_dkdv_tiles")
    assert evidence(seen(*ours), {}).took_effect
    assert not evidence(seen(*ours[:2]), {}).took_effect
    assert not evidence(seen(*ours, "void pytorch_flash::flash_fwd_kernel<...>"), {}).took_effect
    assert not evidence(seen(*ours, ops=("aten::_softmax",)), {}).took_effect


_plain: list[tuple[Run, Trace]] = []


def plain_run() -> tuple[Run, Trace]:
    if not _plain:
        run = make_run(overrides=("model.shape.num_layers=1",))
        _plain.append((run, trace(run, 1, watch=True)))
    return _plain[0]
