"""Half an effect is none: the evidence of `compile` asks for every block, and for no fallback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rush.lab.trial.timing import Timing, time_steps
from rush.techniques import Technique, Use, registry
from rush.techniques.api.contract import KnobRange, Observation
from rush.techniques.api.evidence import prove, prove_use
from rush.training.build import Run
from tests.techniques.tiny_runs import SHORT, make_loader, make_run, trace

TWO_BLOCKS = [*SHORT, "model.shape.num_layers=2"]
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # torch.compile looks at block inputs
)
BLOCKS = "{name='compile', scope='block'}"


def seen_of(run: Run) -> Observation:
    seen = trace(run, 1, watch=True).seen
    assert seen is not None
    return seen


def test_a_block_that_is_not_compiled_or_falls_back_to_eager_is_found_and_a_graph_break_too() -> None:
    run = make_run(BLOCKS, overrides=TWO_BLOCKS)
    seen, evidence, knobs = seen_of(run), registry()["compile"].evidence, run.uses[0].knobs
    whole = prove(run.uses, seen)["compile"]
    assert whole.took_effect, whole.what
    broken = replace(seen, compiled=replace(seen.compiled, graph_breaks=1))
    assert not evidence(broken, knobs).took_effect
    block: Any = run.model.blocks[1]
    compiled = block.__dict__["forward"]

    def eager(*given: Any, **named: Any) -> Any:
        return compiled._torchdynamo_orig_callable(*given, **named)

    # As far as one can read it is compiled; the profile shows that its graph was not called.
    eager._torchdynamo_orig_callable = None  # type: ignore[attr-defined]
    block.__dict__["forward"] = eager
    assert not evidence(seen_of(run), knobs).took_effect
    del block.__dict__["forward"]
    half = prove(run.uses, seen_of(run))["compile"]
    assert not half.took_effect
    assert "3 of 4 parts of the model" in half.what


@pytest.mark.parametrize(
    "mode", [pytest.param("default", marks=pytest.mark.slow), "max-autotune-no-cudagraphs"]
)
def test_the_compiler_is_called_with_the_options_of_the_mode(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against what reaches the compiler, which the evidence does not look at."""
    from torch._inductor import compile_fx, list_mode_options

    given: list[dict[str, Any]] = []
    plain: Callable[..., Any] = compile_fx.compile_fx

    def spy(*arguments: Any, **named: Any) -> Any:
        given.append(dict(named.get("config_patches") or {}))
        return plain(*arguments, **named)

    monkeypatch.setattr(compile_fx, "compile_fx", spy)
    trace(make_run(f"{{name='compile', mode='{mode}'}}", overrides=SHORT), 1)
    wanted = {} if mode == "default" else list_mode_options(mode)
    assert given
    for options in given:
        assert {key: options[key] for key in options if key in list_mode_options("max-autotune")} == wanted


def test_the_first_step_of_a_compiled_run_pays_for_the_compiler() -> None:
    run = make_run("compile", overrides=SHORT)
    with make_loader(run) as loader:
        found = time_steps(run, loader, Timing(windows=2, window_ms=0.0, warmup_max_steps=4))
    assert found["compile_s"] > 2 * max(found["samples_s"])
    assert found["compile_s"] < 120


def test_a_knob_that_nothing_shows_is_never_proved() -> None:
    technique: Technique = replace(registry()["gc_control"], knobs={"every": KnobRange((100, 20), "steps")})
    run = make_run("gc_control", overrides=SHORT)
    seen = seen_of(run)
    assert technique.evidence(seen, {"every": 100}).took_effect
    proof = prove_use(Use(technique, {"every": 100}), seen)
    assert not proof.took_effect
    assert "every = 100 not seen: nothing shows it" in proof.what


def test_the_arguments_of_operators_are_seen_as_they_were_called() -> None:
    run = make_run("{name='lora', rank=4, alpha=2}", overrides=SHORT)
    calls = seen_of(run).calls["rush::adapted_linears"]
    assert {scale for call in calls for scale in call.values[4]} == {0.5}
    assert {call.dtypes[0] for call in calls} == {"float32"}
    tokens = run.recipe.batch.micro, run.recipe.batch.sequence
    assert (*tokens, run.model.shape.hidden) in {call.shapes[0] for call in calls}
