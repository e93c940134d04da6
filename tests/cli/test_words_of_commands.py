"""`--data`, the list of ladders, completion, and tables at 80 columns."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rush.cli import app
from rush.cli.ladder import ladder_table
from rush.cli.options import complete_key, complete_ladder, with_data
from rush.errors import RecipeError
from rush.lab.ladder.climb import LadderProgress
from rush.ready import LADDERS, RECIPES
from rush.recipe_io import load_recipe

ROOT = Path(__file__).resolve().parents[2]


def test_data_stands_for_two_overrides() -> None:
    words = with_data(["batch.micro=4"], ["a b/*.jsonl", "c.txt"])
    recipe = load_recipe("tiny", words)
    assert (recipe.data.source, recipe.data.files) == ("files", ["a b/*.jsonl", "c.txt"])
    assert recipe.micro == 4
    assert with_data(["batch.micro=4"], None) == ["batch.micro=4"]
    with pytest.raises(RecipeError, match=r"found 'data\.source=hub:a/b' beside it"):
        with_data(["data.source=hub:a/b"], ["a.txt"])


def test_a_ladder_without_a_name_is_the_list_of_them() -> None:
    listed = CliRunner().invoke(app, ["ladder", "--json"])
    assert [row["name"] for row in json.loads(listed.stdout)] == LADDERS.names()
    refused = CliRunner().invoke(app, ["ladder", "batch.micro=4"])
    assert isinstance(refused.exception, RecipeError)
    assert "needs a ladder's name before 'batch.micro=4'" in str(refused.exception)


def test_keys_and_ladders_are_completed() -> None:
    assert complete_key("batch.m") == ["batch.micro="]
    assert "techniques=" in complete_key("tech")
    assert complete_ladder("ti") == ["tiny"]


@pytest.mark.parametrize("command", [["recipes"], ["ladder"]], ids=" ".join)
def test_names_are_never_split_at_80_columns(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(app, command).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    first = {re.split(r"\s", line)[0] for line in lines}
    assert set((RECIPES if command == ["recipes"] else LADDERS).names()) <= first


def test_no_word_of_a_ladders_table_is_cut_at_80_columns() -> None:
    record = json.loads((ROOT / "results" / "ladder-tiny-x86" / "ladder.json").read_text())
    progress = LadderProgress(record, done=1, total=1, doing=None, seconds_left=None)
    console = Console(width=80, file=io.StringIO())
    console.print(ladder_table(progress))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    words = {word for rung in record["rungs"] for word in f"{rung['title']} {rung['verdict']}".split()}
    assert words <= set(shown.split())
