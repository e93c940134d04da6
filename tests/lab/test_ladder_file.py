from __future__ import annotations

from pathlib import Path

import pytest

from rush.errors import RecipeError
from rush.lab.ladder_file import compose, load_plan
from rush.lab.names import ladder_names
from rush.techniques import registry


@pytest.mark.parametrize("name", ladder_names())
def test_every_ready_ladder_reads_and_every_rung_composes(name: str) -> None:
    plan = load_plan(name)
    assert plan.base.techniques == []
    kept = []
    for addition in plan.additions:
        recipe = compose(plan.base, [*kept, addition])
        assert {used for used, _ in recipe.technique_uses()} <= set(registry())
        if addition.keep:
            kept.append(addition)


def test_the_ready_ladders_are_there_and_tiny_has_eight_rungs() -> None:
    assert {"tiny", "gpt2-124m", "llama-3.2-1b", "llama-3.1-8b"} <= set(ladder_names())
    assert len(load_plan("tiny").additions) >= 8


def test_the_large_ladder_tries_every_technique() -> None:
    tried = {addition.technique_name for addition in load_plan("llama-3.2-1b").additions}
    assert set(registry()) - tried == set()


def test_overrides_reach_the_base_recipe_and_the_ladders_own_tables() -> None:
    plan = load_plan("tiny", ["batch.micro=4", "measure.processes=7", "parity.steps=2"])
    assert plan.base.batch.micro == 4
    assert plan.base.batch.total_tokens is None
    assert plan.measure.processes == 7
    assert plan.parity.steps == 2


def _ladder(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ladder.toml"
    path.write_text('recipe = "tiny"\n' + text)
    return str(path)


def test_a_rung_may_have_knobs_changes_a_title_and_replace_another(tmp_path: Path) -> None:
    rung = '{name = "pure_bf16", "batch.micro" = 8, title = "bf16", replaces = ["amp_bf16"], keep = false}'
    plan = load_plan(
        _ladder(tmp_path, f'rungs = ["amp_bf16", {rung}]\n[base]\n"batch.total_tokens" = "none"')
    )
    first, second = plan.additions
    assert (second.title, second.keep) == ("bf16", False)
    recipe = compose(plan.base, [first, second])
    assert recipe.techniques == ["pure_bf16"]
    assert recipe.batch.micro == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rungs = [3]", "a technique's name, or a table"),
        ('rungs = [{scope = "block"}]', "names no technique"),
        ('rungs = ["compile", "compile"]', "twice"),
        ("rungs = []\n[measur]\nwindows = 3", "measure"),
        ("rungs = []\n[measure]\nwindow = 3", "measure.windows"),
        ("rungs = []\n[measure]\nwindows = 0", "measure.windows is 0"),
        ("rungs = [\n", "not valid TOML"),
        ("about = 'x'", "list of rungs"),
    ],
)
def test_a_wrong_ladder_is_refused_with_a_reason(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words.replace(".", r"\.")):
        load_plan(_ladder(tmp_path, text))


def test_an_unknown_ladder_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean 'tiny'"):
        load_plan("tinny")
