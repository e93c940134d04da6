"""A cleaning pipeline's TOML: what it may say, and the sentence where it says something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rush.data.clean import load_pipeline, parse_pipeline
from rush.data.clean.fields import Missing, items_at, plain_items, text_at, value_at
from rush.errors import DataError, RecipeError
from rush.ready import PIPELINES


def test_every_ready_pipeline_loads() -> None:
    assert "cooking" in PIPELINES.names()
    for name in PIPELINES.names():
        assert load_pipeline(name).stage


def test_stages_keep_their_order_and_get_names_of_their_own() -> None:
    stages = [
        {"kind": "words", "min": 1},
        {"kind": "regex", "must_match": "a", "name": "has an a"},
        {"kind": "words", "max": 9},
    ]
    pipeline = parse_pipeline({"stage": stages})
    assert pipeline.names() == ["words 1", "has an a", "words 2"]


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({}, r"has no \[\[stage\]\]"),
        ({"stage": []}, "nothing would be removed"),
        ({"stagee": [{"kind": "words", "min": 1}]}, "stagee is not a key here; did you mean 'stage'"),
        ({"stage": [{"kind": "words", "minn": 1}]}, r"stage 1 \(words\): minn is not a key here; did you mean 'min'"),
        ({"stage": [{"kind": "word", "min": 1}]}, "no stage of kind 'word'; did you mean 'words'"),
        ({"stage": [{"min": 1}]}, "stage 1: kind is missing"),
        ({"stage": [{"kind": "words"}]}, "neither min nor max is given"),
        ({"stage": [{"kind": "words", "min": 5, "max": 2}]}, "min is 5 and max is 2"),
        ({"stage": [{"kind": "words", "min": "5"}]}, "min is '5'; allowed: a valid integer"),
        ({"stage": [{"kind": "words", "min": -1}]}, "min is -1; allowed: greater than or equal to 0"),
        ({"stage": [{"kind": "tokens", "min": 5}]}, "tokenizer is missing"),
        ({"stage": [{"kind": "items", "min": 5}]}, "field is missing"),
        ({"stage": [{"kind": "regex", "must_match": "(a"}]}, r"'\(a', which is not a regular expression"),
        ({"stage": [{"kind": "regex"}]}, "neither must_match nor must_not_match"),
        ({"stage": [{"kind": "rare_items", "field": "x", "min_count": 1}]}, "min_count is 1; allowed: greater"),
        ({"stage": [{"kind": "language", "languages": []}]}, "languages is"),
        ({"on_missing": "ignore", "stage": [{"kind": "words", "min": 1}]}, "on_missing is 'ignore'; allowed: 'error'"),
        ({"stage": [{"kind": "words", "min": 1, "name": "a"}, {"kind": "words", "max": 1, "name": "a"}]}, "called 'a'"),
        ({"stage": ["words"]}, "stage 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence) as caught:
        parse_pipeline(tree)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_a_missing_file_or_invalid_toml_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[[stage\n")
    with pytest.raises(RecipeError, match="not valid TOML"):
        load_pipeline(str(broken))
    with pytest.raises(RecipeError, match="no pipeline file at"):
        load_pipeline(str(tmp_path / "absent.toml"))
    with pytest.raises(RecipeError, match="did you mean 'cooking'"):
        load_pipeline("coking")


ROW = {
    "title": "soup",
    "a.b": "dotted",
    "nothing": None,
    "recipe": {"ingredients": [{"name": " Salt ", "grams": 2}, {"name": "leek", "grams": 100}]},
    "steps": ["boil", "eat"],
    "listed": '["x", "y"]',
    "divided": "x; y ;;z",
    "nested": [["a"], ["b", ["c"]]],
}


def test_a_path_goes_through_objects_and_lists() -> None:
    assert value_at(ROW, "recipe.ingredients.name") == [" Salt ", "leek"]
    assert value_at(ROW, "a.b") == "dotted"
    assert text_at(ROW, "steps", "row") == "boil\neat"
    for path in ("absent", "nothing", "recipe.absent", "title.x"):
        with pytest.raises(Missing):
            value_at(ROW, path)


def test_items_come_from_lists_json_and_separated_text() -> None:
    assert items_at(ROW, "listed", "row", None) == ["x", "y"]
    assert items_at(ROW, "divided", "row", ";") == ["x", "y", "z"]
    assert plain_items(items_at(ROW, "nested", "row", None), "nested", "row", False) == ["a", "b", "c"]
    names = items_at(ROW, "recipe.ingredients.name", "row", None)
    assert plain_items(names, "n", "row", True) == ["salt", "leek"]
    with pytest.raises(DataError, match="set the separator"):
        items_at(ROW, "title", "row", None)
    with pytest.raises(DataError, match=r"recipe\.ingredients\.grams"):
        plain_items(items_at(ROW, "recipe.ingredients", "row", None), "recipe.ingredients", "row", False)
    with pytest.raises(DataError, match="holds a number, expected text"):
        text_at(ROW, "recipe.ingredients.grams", "row")
