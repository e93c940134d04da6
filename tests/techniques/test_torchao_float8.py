"""The torchao rung: the library's layers compute in the blocks, and what would go past them is refused.

`torch._scaled_mm` computes on a CPU, too, so everything but its speed is tried here; recipes need a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rush.errors import MachineError, RecipeError
from rush.hardware import Device, probe
from rush.techniques import check, registry
from rush.techniques.api.contract import Observation
from rush.techniques.api.evidence import prove
from rush.techniques.precision import torchao_float8
from rush.training.build import Run
from tests.techniques.knob_values import accepted
from tests.techniques.tiny_runs import Trace, compare, make_run, recipe_of, trace

pytest.importorskip("torchao")
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
SMALL = ["model.shape.num_layers=1", "batch.micro=2", "batch.total_tokens=64"]
BLOCKS = ["{name='compile', scope='block'}"]
AMPERE = Device("A100", 80 * 2**30, capability=(8, 0))
HOPPER = replace(
    probe("cpu"), device="cuda", devices=(Device("H200", 140 * 2**30, capability=(9, 0)),), triton="3.6"
)


def tried(recipe: str, name: str = "llama-tiny", steps: int = 3) -> tuple[Run, Trace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchao_float8, "_has_units", lambda machine: True)
        patch.setattr(torchao_float8, "_is_compiled", lambda recipe: True)  # takes a minute
        run = make_run(f"{{name='torchao_float8', recipe='{recipe}'}}", name=name, overrides=SMALL)
    return run, trace(run, steps, watch=True)


@pytest.fixture(scope="module")
def tensorwise() -> tuple[Run, Trace]:
    return tried("tensorwise")


@pytest.fixture(scope="module")
def plain() -> Trace:
    return trace(make_run(overrides=SMALL), 3, watch=True)


def test_it_takes_effect_and_learns_what_plain_learns(tensorwise: tuple[Run, Trace], plain: Trace) -> None:
    run, ours = tensorwise
    assert ours.seen is not None
    proof = prove(run.uses, ours.seen)["torchao_float8"]
    assert proof.took_effect, proof.what
    verdict = compare(run, "float8", ours, plain)
    assert verdict.verdict == "equal", verdict.why
    assert ours.losses != plain.losses, "nothing was rounded"


def cpu_scales_rows() -> bool:
    """Whether this torch has fp8 matmuls with a scale for each row on a CPU; 2.11 has not."""
    a, b = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 16).to(torch.float8_e4m3fn).t()
    try:
        torch._scaled_mm(a, b, torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("recipe", torchao_float8.RECIPES)
def test_a_run_shows_its_recipe_and_no_other(recipe: str, tensorwise: tuple[Run, Trace]) -> None:
    if recipe != "tensorwise" and not cpu_scales_rows():
        pytest.skip("needs a torch with fp8 matmuls with a scale for each row on a CPU")
    run, ours = tensorwise if recipe == "tensorwise" else tried(recipe, "tiny", 1)
    assert ours.seen is not None
    assert prove(run.uses, ours.seen)["torchao_float8"].took_effect
    assert accepted(run.uses[0], ours.seen) == {"recipe": [recipe]}


def test_every_layer_of_the_blocks_is_the_librarys_with_our_weights_and_the_head_is_plain(
    tensorwise: tuple[Run, Trace],
) -> None:
    run, _ = tensorwise
    for role, layers in run.model.linears().items():
        for name, layer in layers:
            assert type(layer).__module__.startswith("torchao.") == (role != "head"), name
    reference = make_run(overrides=SMALL).model.state_dict()
    assert list(run.model.state_dict()) == list(reference)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_its_evidence_fails_without_the_library_or_where_one_width_was_not_in_fp8(
    tensorwise: tuple[Run, Trace], plain: Trace
) -> None:
    _, ours = tensorwise
    assert ours.seen is not None
    assert plain.seen is not None

    def holds(seen: Observation) -> bool:
        return registry()["torchao_float8"].evidence(seen, {"recipe": "tensorwise"}).took_effect

    assert holds(ours.seen)
    assert not holds(plain.seen)
    assert not holds(replace(ours.seen, calls={}))
    narrow = ours.seen.shape.num_kv_heads * ours.seen.shape.head_dim
    calls = ours.seen.calls[torchao_float8.MATMUL]
    others = {call: n for call, n in calls.items() if call.shapes[1][1] != narrow}
    assert len(others) < len(calls)
    assert not holds(replace(ours.seen, calls={**ours.seen.calls, torchao_float8.MATMUL: others}))


@pytest.mark.parametrize("other", ["fp8", "fused_projections", "int8_matmul", "lora"])
def test_what_goes_past_the_librarys_layers_is_refused(other: str) -> None:
    with pytest.raises(RecipeError, match="cannot be combined"):
        check(recipe_of("torchao_float8", "amp_bf16", "compile", other), HOPPER)


@pytest.mark.parametrize(
    ("machine", "beside", "changes", "message"),
    [
        (probe("cpu"), BLOCKS, [], "compute capability 8.9"),
        (replace(HOPPER, devices=(AMPERE,)), BLOCKS, [], "compute capability 8.9"),
        (HOPPER, [], [], "it needs compile"),
        (HOPPER, BLOCKS, ["model.shape.intermediate=100"], "multiple of 16"),
        (HOPPER, ["{name='compile', scope='model'}"], ["objective.kind=sft"], "objective.kind lm"),
    ],
)
def test_it_says_what_it_needs(machine: Any, beside: list[str], changes: list[str], message: str) -> None:
    with pytest.raises(MachineError, match=f"torchao_float8 cannot run here: .*{message}"):
        check(recipe_of("torchao_float8", "amp_bf16", *beside, overrides=changes), machine)


def test_it_runs_on_a_hopper_gpu_beside_compile_and_fused_loss() -> None:
    recipe = recipe_of("torchao_float8", "pure_bf16", "fused_loss", *BLOCKS)
    assert "torchao_float8" in [use.technique.name for use in check(recipe, HOPPER)]
