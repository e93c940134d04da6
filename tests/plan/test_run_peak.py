"""What a run takes besides its steps, by the plan and as torch's allocator counts it on a CPU."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from rush.checkpoint.state import pack_model, pack_optimizer
from rush.cli import app
from rush.data import Batch
from rush.hardware import probe
from rush.kernels import cpu, support
from rush.plan import plan, spec_of, target_of
from rush.plan.memory import memory_of, stages_of
from rush.plan.micro_batch import needed
from rush.plan.model_state import RankState
from rush.plan.run_peak import run_peak_of, sample_bytes, staged_bytes, validation_bytes
from rush.plan.spec import Spec, weights_of
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.sampling import generate
from rush.training.build import Run, build
from rush.training.sample import plain_model
from rush.training.step import train_step, validate
from tests.in_turn import in_turn


@pytest.fixture(autouse=True)
def uses_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a CPU, not Triton's interpreter, which holds copies."""
    if reason := cpu.cannot_run():
        pytest.skip(f"kernels for a CPU cannot run here: {reason}")
    monkeypatch.setattr(support, "INTERPRETED", False)


SMALL = ["batch.micro=4", "batch.sequence=128", "model.shape.num_layers=2", "batch.total_tokens=512"]
WIDE = "model.shape.vocab_size=16384"
FEW = ("model.shape.vocab_size=512", "batch.micro=1", "batch.sequence=64", "batch.total_tokens=64")
FAMILIES = ("tiny", "llama-tiny")
CHUNKED = '{name = "chunked_loss", chunk_tokens = 64}'


def recipe_of(model: str, *techniques: str, more: tuple[str, ...] = ()) -> Recipe:
    named = "[" + ", ".join(t if t.startswith("{") else f'"{t}"' for t in techniques) + "]"
    return load_recipe(model, [*SMALL, f"techniques={named}", *more])


def held_of(spec: Spec) -> RankState:
    return RankState(spec, stages_of(spec)[-1], weights_of(spec))


def stepped(recipe: Recipe) -> tuple[Run, Batch]:
    """A run whose optimizer has its state, and a batch of its shape."""
    run = build(recipe, probe("cpu"))
    tokens = torch.randint(0, run.model.shape.vocab_size, (recipe.micro, recipe.batch.sequence))
    batch = Batch(tokens, tokens.clone())
    train_step(run, 1, 1e-3, [batch])
    return run, batch


def most_allocated(do: Callable[[], object]) -> int:
    """Bytes that the CPU's allocator had given out at most, beyond those before."""
    for _ in range(2):
        do()  # what is made once and kept
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        do()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [event for event in events if event.name() == "[memory]"]
    now = most = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        now += change.nbytes()
        most = max(most, now)
    assert now == 0, "something was kept"
    return most


STACKS = [
    (),
    ("flash_attention",),
    (CHUNKED,),
    ("fused_loss",),
    ("pure_bf16",),
    ("pure_bf16", CHUNKED),
    ("flash_attention", "fused_loss"),
]
MORE_STACKS = [("pure_bf16", "flash_attention"), ("amp_bf16", "flash_attention")]
IN_BF16 = [("pure_bf16",), ("pure_bf16", CHUNKED)]
"""A CPU without bf16 units takes minutes for these with a wide vocabulary, and half of one with the recipe's."""
LOGITS = [(), (CHUNKED,), ("fused_loss",)]
"""Stacks that differ in what they make of the logits, which a wide vocabulary shows; attention does not."""
VALIDATIONS = [
    *in_turn(FAMILIES, [(stack, FEW if stack in IN_BF16 else ()) for stack in STACKS]),
    *in_turn(FAMILIES[::-1], [(stack, (WIDE,)) for stack in LOGITS]),
    *(
        pytest.param(family, stack, (WIDE,), marks=pytest.mark.slow)
        for family in FAMILIES
        for stack in STACKS
        if stack not in (*LOGITS, *IN_BF16)
    ),
    *(pytest.param("tiny", stack, (WIDE,), marks=pytest.mark.slow) for stack in IN_BF16),
    *(
        pytest.param(family, stack, more, marks=pytest.mark.slow)
        for family in FAMILIES
        for stack in MORE_STACKS
        for more in ((), (WIDE,))
    ),
]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(("model", "techniques", "more"), VALIDATIONS)
def test_the_memory_of_a_validation_is_predicted_within_2_per_cent(
    model: str, techniques: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Where the logits decide (a wide vocabulary) and where a block does."""
    recipe = recipe_of(model, *techniques, more=more)
    run, batch = stepped(recipe)
    measured = most_allocated(lambda: validate(run, [batch]))
    spec = spec_of(recipe, "cpu")
    assert validation_bytes(spec, held_of(spec)) == pytest.approx(measured, rel=0.02)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("model", "techniques"),
    [*in_turn(FAMILIES, [((),)]), pytest.param("llama-tiny", ("pure_bf16",), marks=pytest.mark.slow)],
)
def test_the_memory_of_a_sample_is_predicted_within_2_per_cent(
    model: str, techniques: tuple[str, ...]
) -> None:
    prompt = "word " * 20
    recipe = recipe_of(model, *techniques, more=(f'run.sample_prompt="{prompt}"', "run.sample_tokens=60"))
    run, _ = stepped(recipe)
    spec = spec_of(recipe, "cpu")
    tokens = torch.arange(spec.sampled[0])
    drawn = most_allocated(lambda: list(generate(plain_model(run.model), tokens, max_new_tokens=60)))
    assert sample_bytes(spec, held_of(spec)) == pytest.approx(drawn, rel=0.02)


@pytest.mark.parametrize("model", ["tiny", "llama-tiny"])
@pytest.mark.parametrize("techniques", [(), pytest.param(("pure_bf16",), marks=pytest.mark.slow), ("lora",)])
def test_the_host_copy_of_a_checkpoint_is_as_large_as_the_saved_state(
    model: str, techniques: tuple[str, ...]
) -> None:
    recipe = recipe_of(model, *techniques)
    run, _ = stepped(recipe)
    tensors = [*pack_model(run.model)[0].values(), *pack_optimizer(run.model, run.optimizer)[0].values()]
    assert staged_bytes(spec_of(recipe, "cpu")) == pytest.approx(sum(one.nbytes for one in tensors), rel=0.01)


def test_validation_runs_micro_batches_of_training_passes() -> None:
    """Not the micro batch that accumulation cuts: that might not fit."""
    whole, cut = (
        recipe_of("tiny", more=(WIDE,)),
        recipe_of("tiny", '{name = "accumulate", factor = 4}', more=(WIDE,)),
    )
    taken = []
    for recipe in (whole, cut):
        run, batch = stepped(recipe)
        taken.append(most_allocated(lambda run=run, batch=batch: validate(run, [batch])))
        spec = spec_of(recipe, "cpu")
        assert validation_bytes(spec, held_of(spec)) == pytest.approx(taken[-1], rel=0.02)
    assert taken[1] == pytest.approx(taken[0] / 4, rel=0.02)


def test_the_memory_pool_of_a_captured_graph_is_not_reused() -> None:
    plain = spec_of(load_recipe("gpt2-124m-fast"))
    graph = spec_of(load_recipe("gpt2-124m-fast", ["techniques+=cuda_graph"]))
    assert run_peak_of(plain).fullest == "step"
    found = run_peak_of(graph)
    assert found.fullest == "validation"
    assert found.total > memory_of(graph).total + validation_bytes(graph, held_of(graph))
    assert run_peak_of(plain).besides["validation"] < memory_of(plain).total


def test_a_run_fits_only_if_all_of_it_does() -> None:
    recipe = load_recipe("gpt2-124m-fast", ["techniques+=cuda_graph"])
    target, spec = target_of("h200-sxm"), spec_of(recipe)
    step, life = memory_of(spec).total, run_peak_of(spec).total
    between = plan(spec, type(target)(**{**vars(target), "memory_bytes": (step + life) / 2}), limits=False)
    assert step < between.target.memory_bytes < life
    assert not between.fits
    assert needed(recipe, "cuda") == pytest.approx(life, rel=0.05)
    assert needed(recipe, "cuda") > memory_of(spec).total - 2**30


def test_the_plan_lists_the_memory_of_each_phase_and_names_the_peak() -> None:
    words = ["plan", "gpt2-124m-fast", "--machine", "h200-sxm"]
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert set(told["phases_bytes"]) == {"step", "validation", "sample", "save"}
    assert told["phases_bytes"]["step"] == told["memory_bytes"]["total"]
    assert told["fullest_phase"] == "step"
    assert told["save_host_bytes"] > 6 * 124e6, "weights and moments in bf16"
    shown = CliRunner().invoke(app, words).stdout
    assert "between steps: validation" in shown
    assert "peak: validation" not in shown
    graph = CliRunner().invoke(app, [*words, "techniques+=cuda_graph"]).stdout
    assert "peak: validation" in graph
