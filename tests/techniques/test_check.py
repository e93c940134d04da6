"""Checking a recipe's techniques: names, knobs, conflicts and requirements, before anything is built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rush.errors import MachineError, RecipeError
from rush.hardware import probe
from rush.recipe_io import load_recipe
from rush.techniques import Stage, Use, check, in_order, registry
from rush.training.build import build


def names(*overrides: str) -> list[str]:
    return [use.technique.name for use in check(load_recipe("tiny", list(overrides)), probe("cpu"))]


def test_techniques_act_in_the_order_of_the_stages_however_they_are_listed() -> None:
    assert names("techniques=['fused_adamw', 'compile', 'amp_bf16']") == [
        "amp_bf16",
        "compile",
        "fused_adamw",
    ]
    assert list(Stage) == sorted(Stage)


def test_within_a_stage_techniques_follow_those_named_in_after() -> None:
    def use(name: str, *after: str) -> Use:
        return Use(replace(registry()["tf32"], name=name, after=after), {})

    chain = [use("a", "b"), use("b", "c"), use("c"), use("d", "absent")]
    assert [use.technique.name for use in in_order(chain)] == ["c", "d", "b", "a"]
    with pytest.raises(AssertionError, match="cycle: a → b → a"):
        in_order([use("a", "b"), use("b", "a")])


def test_every_file_in_the_folder_that_defines_a_technique_is_found() -> None:
    assert {"tf32", "amp_bf16", "pure_bf16", "flash_attention", "fused_adamw", "compile"} <= set(registry())


@pytest.mark.parametrize(
    ("override", "kind", "said"),
    [
        ("techniques=['flash_atention']", RecipeError, "did you mean 'flash_attention'"),
        ("techniques=[{name='compile', mod='x'}]", RecipeError, "has no knob 'mod'; did you mean 'mode'"),
        (
            "techniques=[{name='compile', mode='fastest'}]",
            RecipeError,
            "mode is 'fastest'; allowed: 'default'",
        ),
        ("techniques=[{name='fused_adamw', x=1}]", RecipeError, "has no knob 'x'; it has none"),
        ("techniques=['amp_bf16', 'pure_bf16']", RecipeError, "cannot be combined"),
        ("techniques=['tf32']", MachineError, "tf32 cannot run here: it needs a CUDA GPU"),
        ("layout.tp=3", RecipeError, "which does not divide the heads"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(override: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        names(override)


def test_conflicts_are_mutual() -> None:
    for name, technique in registry().items():
        for other in technique.conflicts:
            assert name in registry()[other].conflicts, (name, other)


def test_no_techniques_is_the_plain_fp32_eager_baseline() -> None:
    run = build(load_recipe("tiny"), probe("cpu"))
    assert run.autocast_dtype is None
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert {type(block.attention.core).__name__ for block in run.model.blocks} == {"PlainAttention"}
    assert run.optimizer.defaults["foreach"] is False
    assert not run.optimizer.defaults["fused"]


def test_process_wide_settings_do_not_leak_out_of_a_step() -> None:
    run = build(load_recipe("tiny", ["run.deterministic=true"]), probe("cpu"))
    with run.in_step():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
