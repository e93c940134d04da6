"""fp16_matmul beyond the walk over all techniques: the head, what it stands beside, what the planner makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rush.errors import MachineError
from rush.hardware import probe
from rush.hardware.measure import DTYPES, HALF_KERNEL
from rush.kernels import fp16_linear
from rush.plan import plan, spec_of, target_here
from rush.techniques import check
from rush.techniques.api.evidence import prove
from rush.techniques.api.rates import rates_to_measure
from rush.techniques.precision.fp16_matmul import Fp16Linear
from tests.techniques.tiny_runs import compare, make_run, recipe_of, trace

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
runs_here = pytest.mark.skipif(
    fp16_linear.cannot_run() is not None, reason=f"its kernel cannot run here: {fp16_linear.cannot_run()}"
)
SMALL = ["model.shape.num_layers=1", "batch.micro=2", "batch.total_tokens=64"]
BLOCKS = "fp16_matmul"
WHOLE = "{name='fp16_matmul', scope='blocks_and_head'}"
COMPILED = "{name='compile', scope='block'}"


@runs_here
@pytest.mark.parametrize(
    ("name", "techniques"),
    [
        ("tiny", (BLOCKS, "flash_attention", "fused_adamw")),
        ("tiny", (WHOLE, "vocab_pad", "checkpoint_full")),
        ("tiny", (WHOLE, "{name='chunked_loss', chunk_tokens=64}", "vocab_pad")),
        ("llama-tiny", (WHOLE, "fused_projections", "loader_workers", "gc_control")),
        ("llama-tiny", (BLOCKS, "checkpoint_selective")),
        pytest.param("tiny", (WHOLE, COMPILED), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_with_others_it_takes_effect_and_learns_what_plain_learns(
    name: str, techniques: tuple[str, ...]
) -> None:
    overrides = ["model.shape.num_layers=1"]  # 128 tokens, so that a chunk of the loss is not all of them
    run = make_run(*techniques, name=name, overrides=overrides)
    ours = trace(run, 4, watch=True)
    assert ours.seen is not None
    proofs = prove(run.uses, ours.seen)
    for technique in (WHOLE, "vocab_pad", "chunked_loss", "checkpoint_full", "fused_projections"):
        assert technique not in proofs or proofs[technique].took_effect, proofs[technique].what
    assert run.matmul_dtype() == "float16"
    reference = trace(make_run(name=name, overrides=overrides), 4)
    verdict = compare(run, "float16", ours, reference)
    assert verdict.verdict == "equal", verdict.why
    assert ours.losses != reference.losses, "nothing was rounded"


@runs_here
def test_every_matmul_of_its_scope_runs_in_the_kernel_and_no_other() -> None:
    for scope, others in (("blocks_and_head", 0), ("blocks", 3)):
        run = make_run(f"{{name='fp16_matmul', scope='{scope}'}}", name="tiny", overrides=SMALL)
        for role, layers in run.model.linears().items():
            assert all(isinstance(layer, Fp16Linear) == (role != "head") for _, layer in layers), role
        seen = trace(run, 1, watch=True).seen
        assert seen is not None
        made = seen.matmuls_by_op
        ours = sum(count for name, count in made.items() if name.startswith("rush::fp16_matmul"))
        layers = 4 + (others == 0)
        assert (ours, sum(made.values()) - ours) == (3 * layers, others)
        assert "float16" in seen.matmul_dtypes
        assert seen.breakdown_ms["matmul"] > 0


@runs_here
def test_adapters_work_with_it() -> None:
    run = make_run("fp16_matmul", "lora", name="tiny", overrides=SMALL)
    ours = trace(run, 2, watch=True)
    assert ours.seen is not None
    for technique, proof in prove(run.uses, ours.seen).items():
        assert proof.took_effect, f"{technique}: {proof.what}"


@runs_here
def test_weights_keep_their_names_and_values_and_stay_wide() -> None:
    plain = make_run(name="tiny", overrides=SMALL).model.state_dict()
    run = make_run("fp16_matmul", name="tiny", overrides=SMALL)
    state = run.model.state_dict()
    assert list(state) == list(plain)
    assert all(torch.equal(state[key], plain[key]) for key in plain)
    trace(run, 1)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_what_it_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = probe("cpu")
    other = replace(cpu, cpu=replace(cpu.cpu, features=("avx2", "avx512")))
    with pytest.raises(MachineError, match=r"technique fp16_matmul cannot run here: .*ARM CPU with fp16"):
        check(recipe_of("fp16_matmul"), other)
    arm = replace(cpu, cpu=replace(cpu.cpu, features=("neon", "fp16")))
    monkeypatch.setattr(fp16_linear, "cannot_build", lambda: None)
    with pytest.raises(MachineError, match="remove fused_loss and liger, or set scope to blocks"):
        check(recipe_of(WHOLE, "fused_loss"), arm)


def test_the_planner_takes_the_kernels_rate_for_blocks_and_head() -> None:
    machine = probe("cpu")
    rates = {"matmul": {"float32": 70e9, HALF_KERNEL: 140e9}, "copy_bytes_per_s": 20e9, "launch_s": 1e-5}
    target = target_here(machine, rates)

    def matmul(*techniques: str) -> float:
        spec = spec_of(recipe_of(*techniques, name="tiny"), target.kind)
        return plan(spec, target, limits=False).time.parts["matmul"]

    # The fitted share of the rate that fp32 products reach is 1.05.
    assert matmul(WHOLE) == pytest.approx(matmul() * 70 * 1.05 / 140)
    assert matmul(WHOLE) < matmul(BLOCKS) < matmul()


def test_a_rate_that_was_not_measured_is_reported() -> None:
    rates = {"matmul": {"float32": 70e9}, "copy_bytes_per_s": 20e9, "launch_s": 1e-5}
    target = target_here(probe("cpu"), rates)
    asked = plan(spec_of(recipe_of(BLOCKS, name="tiny"), "cpu"), target, limits=False)
    assert any(f"the rate of {HALF_KERNEL} matmuls is not known" in source for source in asked.sources)
    assert not any(
        "matmuls is not known" in source
        for source in plan(spec_of(recipe_of(name="tiny"), "cpu"), target).sources
    )


def test_a_look_at_the_machine_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp16_linear, "cannot_run", lambda: None)
    monkeypatch.setattr(fp16_linear, "is_built", lambda: False)
    monkeypatch.setattr(fp16_linear, "load", lambda: pytest.fail("it was built"))
    assert rates_to_measure(probe("cpu"), build=False) == DTYPES
    monkeypatch.setattr(fp16_linear, "load", lambda: Path("built"))
    assert rates_to_measure(probe("cpu"), build=True) == (*DTYPES, HALF_KERNEL)
    assert rates_to_measure(replace(probe("cpu"), device="cuda"), build=True) == DTYPES
