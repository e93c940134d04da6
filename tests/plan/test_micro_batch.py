"""`batch.micro = "auto"` by arithmetic: what can be chosen, what is, and who refuses to choose."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rush.cli import app
from rush.errors import MachineError, RecipeError
from rush.hardware import probe
from rush.plan.micro_batch import best, candidates, needed, with_chosen_micro
from rush.plan.spec import spec_of
from rush.plan.target import target_of
from rush.plan.time import time_of
from rush.recipe import Recipe
from rush.recipe_io import changed, load_recipe
from rush.techniques import check

FAST = 'techniques=["amp_bf16", "flash_attention", "fused_adamw", {name = "compile", scope = "block"}]'


def auto(name: str, *overrides: str) -> Recipe:
    return load_recipe(name, ["batch.micro=auto", *overrides], auto=True)


def micros(recipe: Recipe) -> list[int]:
    return [one.micro for one in candidates(recipe, lambda one: check(one, probe("cpu")))]


def test_every_micro_batch_that_divides_the_step_is_possible_if_its_techniques_agree() -> None:
    assert micros(auto("tiny", "batch.total_tokens=1536")) == [1, 2, 3, 4, 6, 12]
    assert micros(auto("tiny", "batch.total_tokens=1536", "techniques+=accumulate")) == [2, 4, 6, 12]
    assert micros(auto("tiny", "batch.total_tokens=1536", "layout.ddp=4")) == [1, 3]
    assert micros(auto("sft-tiny", 'techniques=["bucket"]')) == [2, 4, 8]
    # a pipeline of two ranks takes two micro batches or more
    assert micros(auto("llama-tiny", "layout.pp=2")) == [1, 2, 4, 8]
    with pytest.raises(MachineError, match="multiple of its factor"):
        micros(auto("tiny", "batch.total_tokens=128", 'techniques=["accumulate"]'))


def test_the_step_stays_as_large_as_it_was_and_must_be_known() -> None:
    assert auto("gpt2-124m").step_tokens == load_recipe("gpt2-124m").step_tokens
    small = load_recipe("tiny", ["batch.micro=4"])
    tree = small.model_dump(exclude_none=True)
    del tree["batch"]["total_tokens"]
    from rush.recipe_io import parse

    with pytest.raises(RecipeError, match=r"batch\.total_tokens must set the tokens per step"):
        parse({**tree, "batch": {**tree["batch"], "micro": "auto"}}, auto=True)
    with pytest.raises(RecipeError, match=r"2,050, which is not a multiple.*nearest allowed: 2,048"):
        auto("tiny", "batch.total_tokens=2050")


def test_a_recipe_without_a_total_keeps_the_step_it_had(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        'model = {name = "tiny"}\nbatch = {micro = 6, sequence = 64}\noptimizer = {lr = 1e-3}\nschedule = {steps = 3}\n'
    )
    assert auto(str(path)).step_tokens == 6 * 64
    assert auto(str(path), "layout.ddp=2", "batch.sequence=32").step_tokens == 6 * 32 * 2


@pytest.mark.parametrize("value", ["automatic", "-1", "0", "true", '["auto"]', "8.0"])
def test_what_is_neither_a_number_nor_auto_is_refused_in_one_sentence(value: str) -> None:
    with pytest.raises(RecipeError, match=r'allowed: a whole number .* or "auto"') as told:
        load_recipe("tiny", [f"batch.micro={value}"])
    assert str(told.value).count(".") - str(told.value).count("batch.micro") <= 2
    assert "more like it" not in str(told.value)


def test_who_measures_or_searches_wants_a_number() -> None:
    for words in (["ladder", "tiny", "batch.micro=auto"], ["overfit", "tiny", "batch.micro=auto"]):
        with pytest.raises(RecipeError, match="here it must be a number"):
            CliRunner().invoke(app, words, catch_exceptions=False)
    with pytest.raises(RecipeError, match="here it must be a number"):
        changed(load_recipe("tiny"), {"batch.micro": "auto"})


def test_the_largest_that_fits_is_chosen_and_the_smallest_where_none_does() -> None:
    target, possible = target_of("h200-sxm"), candidates(auto("llama-3.2-1b-fast"), spec_of)
    sizes = [needed(one, "cuda") for one in possible]
    assert sizes == sorted(sizes)
    for place, one in enumerate(possible):
        chosen = best(possible, target, sizes[place])
        assert needed(chosen, "cuda") <= sizes[place]
        assert chosen.micro >= one.micro / 2, "hardly slower is no reason for a fraction of the batch"
    assert best(possible, target, sizes[0] / 2) is possible[0]


def test_a_pipeline_is_not_given_one_huge_micro_batch() -> None:
    recipe = auto("llama-3.1-8b", FAST, "layout.pp=8", "batch.total_tokens=1048576", "batch.sequence=4096")
    target = replace(target_of("h200-sxm", 8), memory_bytes=1e15)
    chosen = with_chosen_micro(recipe, target)
    assert chosen.accumulation > 8, "all would wait for the only micro batch"
    by_time = {one.micro: time_of(spec_of(one), target).step for one in candidates(recipe, spec_of)}
    assert by_time[chosen.micro] <= 1.01 * min(by_time.values())


def test_the_plan_of_auto_prints_the_number_that_fits() -> None:
    words = ["plan", "llama-3.2-1b-fast", "batch.micro=auto", "--machine", "h100-sxm", "--json"]
    found = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).output)
    assert found["fits"]
    assert found["batch"]["step_tokens"] == load_recipe("llama-3.2-1b-fast").step_tokens
    micro = found["batch"]["micro"]
    twice = [*words[:2], f"batch.micro={2 * micro}", *words[3:]]
    assert not json.loads(CliRunner().invoke(app, twice, catch_exceptions=False).output)["fits"]
