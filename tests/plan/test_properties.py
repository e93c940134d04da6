"""What must hold of every plan, whatever the model, the layout and the rates; and that every technique has a plan."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rush.errors import RecipeError
from rush.kernels import fp16_linear
from rush.parallel import AXES
from rush.plan.effects import WORK
from rush.plan.memory import memory_of
from rush.plan.planning import plan, unmet
from rush.plan.spec import Spec, check_divides, spec_of
from rush.plan.target import target_of
from rush.plan.time import time_of
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.techniques import registry

ROOT = Path(__file__).parents[2]
COMPILED = '"amp_bf16", "flash_attention", "fused_adamw", {name = "compile", scope = "block"}'
WAYS = (
    "",
    '"tf32"',
    '"pure_bf16", "chunked_loss"',
    COMPILED,
    f'{COMPILED}, "checkpoint_full"',
    f'{COMPILED}, "fused_loss"',
)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """A model, techniques, a batch and a layout that divides both."""
    model = draw(st.sampled_from(["gpt2-124m", "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b"]))
    base = "gpt2-124m" if model.startswith("gpt2") else "llama-3.1-8b"
    way = draw(st.sampled_from(WAYS))
    recipe = load_recipe(
        base, [f"model.name={model}", f"techniques=[{way}]", "batch.micro=1", "batch.sequence=1024"]
    )
    spec = spec_of(recipe)
    most = {"tp": math.gcd(spec.shape.num_kv_heads, 8), "pp": 4, "cp": 8, "fsdp": 64, "ddp": 8}
    sizes = {
        axis: draw(
            st.sampled_from([n for n in (1, 2, 4, 8, 16, 64) if n <= most[axis] and most[axis] % n == 0])
        )
        for axis in AXES
    }
    passes = draw(st.sampled_from([1, 2, 8]))
    return replace(
        spec, micro=draw(st.sampled_from([1, 2, 8])), layout=sizes, passes=max(passes, sizes["pp"])
    )


def grown(spec: Spec, axis: str) -> Spec:
    return replace(spec, layout={**spec.layout, axis: 2 * spec.size(axis)})


@settings(max_examples=25, deadline=None)
@given(specs(), st.sampled_from(["fsdp", "tp", "cp"]))
def test_memory_falls_with_the_number_of_shards(spec: Spec, axis: str) -> None:
    """From two on: the step from one to two brings buffers of its own."""
    spec = replace(spec, layout={**spec.layout, axis: max(2, spec.size(axis))})
    try:
        check_divides(grown(spec, axis))
    except RecipeError:
        return
    assert memory_of(grown(spec, axis)).total <= memory_of(spec).total * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(specs(), st.sampled_from(["h200-sxm", "a100-80-pcie", "4090", "cpu"]), st.integers(1, 4))
def test_no_part_is_negative_and_time_falls_as_rates_grow(spec: Spec, machine: str, servers: int) -> None:
    target = target_of(machine, 8, servers)
    spec = replace(spec, device=target.kind)
    memory, slow = memory_of(spec), time_of(spec, target)
    for value in (
        *memory.parts.values(),
        *memory.activations.values(),
        *slow.parts.values(),
        memory.host_bytes,
    ):
        assert value >= 0
        assert math.isfinite(value)
    assert memory.tensors <= memory.reserved <= memory.total
    faster = (
        replace(target, matmul={dtype: 2 * rate for dtype, rate in target.matmul.items()}),
        replace(target, bytes_per_s=2 * target.bytes_per_s),
        replace(target, link_bytes_per_s=2 * target.link_bytes_per_s),
        replace(target, network_bytes_per_s=2 * target.network_bytes_per_s),
    )
    for other in faster:
        assert time_of(spec, other).step <= slow.step * (1 + 1e-9)
    twice = replace(spec, passes=2 * spec.passes)
    assert time_of(twice, target).step > slow.step


@settings(max_examples=20, deadline=None)
@given(specs(), st.sampled_from(["tp", "cp", "pp"]), st.integers(1, 300))
def test_a_layout_divides_or_is_refused_with_those_that_do(spec: Spec, axis: str, size: int) -> None:
    shape = spec.shape
    fits = {
        "tp": shape.num_kv_heads % size == 0 and shape.intermediate % size == 0,
        "cp": spec.sequence % size == 0,
        "pp": size <= shape.num_layers,
    }[axis]
    other = replace(spec, layout={**dict.fromkeys(AXES, 1), axis: size})
    if fits:
        check_divides(other)
        return
    with pytest.raises(RecipeError, match=rf"layout\.{axis} is {size}.*allowed: "):
        check_divides(other)


BASES = ("gpt2-124m", "llama-3.2-1b", "sft", "dpo")


ON_CPU = ("cpu_attention", "fp16_matmul")


def with_technique(base: str, name: str) -> Recipe:
    """The recipe with the technique, and without what cannot stand beside it."""
    technique = registry()[name]
    kept = [
        {"name": other, **knobs}
        for other, knobs in load_recipe(base).technique_uses()
        if other != name and other not in technique.conflicts
    ]
    shapes = ", shapes = 4" if name == "bucket" else ""  # compiled code wants few
    entry = "{" + f'name = "{name}"{shapes}' + "}"
    listed = ", ".join(
        "{" + ", ".join(f"{key} = {_toml(value)}" for key, value in one.items()) + "}" for one in kept
    )
    layout = [f"layout.{name}=2"] if name in AXES else []
    return load_recipe(
        base, [f"techniques=[{', '.join(filter(None, (listed, entry)))}]", "batch.micro=4", *layout]
    )


def _toml(value: object) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )


def _spec(recipe: Recipe, device: str = "cuda") -> Spec | None:
    try:
        return spec_of(recipe, device)
    except RecipeError:  # sizes that do not divide, or preferences on an axis that cuts them
        return None


def test_every_technique_is_planned_wherever_it_can_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp16_linear, "is_built", lambda: True)
    gpus, arm = target_of("h200-sxm", 2), replace(target_of("cpu", 1), features=("neon", "fp16"))
    planned: dict[str, list[str]] = {name: [] for name in registry()}
    refused: list[str] = []
    for name in registry():
        target = arm if name in ON_CPU else gpus
        for base in BASES:
            recipe = with_technique(base, name)
            if any(problem.startswith(f"{name}:") for problem in unmet(recipe, target)):
                continue
            spec = _spec(recipe, target.kind)
            if spec is None:
                refused.append(name)
                continue
            found = plan(spec, target, limits=False)
            for value in (
                *found.memory.parts.values(),
                *found.memory.activations.values(),
                *found.time.parts.values(),
            ):
                assert value >= 0, (name, base)
                assert math.isfinite(value), (name, base)
            planned[name].append(base)
    assert [name for name, bases in planned.items() if not bases] == []
    assert set(refused) <= set(AXES)
    everywhere = [name for name, bases in planned.items() if len(bases) == len(BASES)]
    assert len(everywhere) > len(planned) / 2, planned


def test_techniques_declare_known_work_terms_and_the_planner_names_no_technique() -> None:
    for name, technique in registry().items():
        assert {effect.term for effect in technique.work} <= set(WORK), name
    # The axes of a layout are the planner's own; tf32 is a dtype as well.
    named = {name for name in registry() if name not in (*AXES, "tf32")}
    for path in (ROOT / "rush" / "plan").glob("*.py"):
        text = path.read_text()
        assert [name for name in sorted(named) if f'"{name}"' in text] == [], path.name


def test_pairs_are_two_rows_and_a_live_reference_is_a_second_model() -> None:
    lm = spec_of(load_recipe("llama-3.2-1b", ["batch.micro=4", "batch.sequence=1024", "techniques=[]"]))
    words = ["model.name=llama-3.2-1b", "techniques=[]", "batch.micro=2", "batch.total_tokens=262144"]
    cached, live = (
        spec_of(load_recipe("dpo", [*words, f"objective.reference={one}"])) for one in ("cached", "live")
    )
    assert (cached.micro, cached.sequence) == (lm.micro, lm.sequence)
    assert memory_of(cached).activations == memory_of(lm).activations
    assert memory_of(live).tensors - memory_of(cached).tensors == pytest.approx(
        memory_of(lm).parts["parameters"]
    )
    target = target_of("h200-sxm")
    ratio = time_of(live, target).step / time_of(cached, target).step
    assert 1.25 < ratio < 1.34, "a third more arithmetic"
    assert plan(cached, target).largest_micro == plan(replace(cached, rows=1.0), target).largest_micro // 2
    free = spec_of(load_recipe("dpo", [*words, "objective.reference=live", "objective.loss=simpo"]))
    assert not free.reference


@pytest.mark.slow
def test_a_search_on_eight_devices_takes_less_than_ten_seconds_without_a_gpu() -> None:
    """Of processor time, start of Python and torch included: how long it takes depends on who else is computing."""
    words = ["plan", "llama-3.1-8b", "--machine", "a100-80-sxm", "--devices", "8", "--search", "--json"]
    before = os.times()
    done = subprocess.run([sys.executable, "-m", "rush", *words], cwd=ROOT, capture_output=True, check=True)
    after = os.times()
    assert b'"best"' in done.stdout
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 10
