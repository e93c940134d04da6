"""`--data`, the list of ladders, completion, and tables at 80 columns."""

from __future__ import annotations

import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import click.testing
import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from rush.cli import app, command
from rush.cli.ladder_table import fitting_table, ladder_table
from rush.cli.options import complete_key, complete_ladder, with_data
from rush.cli.output import folded
from rush.cli.tune import tune_table
from rush.errors import RecipeError
from rush.lab.ladder.climb import LadderProgress
from rush.ready import LADDERS, RECIPES
from rush.recipe_io import load_recipe
from tests.report.made_up_run import write_run

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


def _printed(table: Table, height: int = 25, **options: Any) -> str:
    console = Console(width=80, height=height, file=io.StringIO(), **options)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _progress(record: Any, doing: str | None = None) -> LadderProgress:
    return LadderProgress(record, doing=doing, done=1, total=1, seconds_left=None)


def _read(name: str) -> Any:
    return json.loads((ROOT / "results" / name).read_text())


def _words(text: str) -> set[str]:
    """Names and words, without the signs that join a name and its knobs."""
    return set(re.findall(r"[\w.×'-]+", text))


@pytest.mark.parametrize("name", ["ladder-tiny-x86", "gpt2-124m-ladder-h200", "llama-3.2-1b-h200"])
def test_no_word_of_a_ladders_table_is_cut_at_80_columns(name: str) -> None:
    record = _read(f"{name}/ladder.json")
    shown = _printed(ladder_table(_progress(record)))
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    able = [rung for rung in record["rungs"] if rung["verdict"] != "unsupported"]
    assert _words(" ".join(f"{rung['title']} {rung['verdict']}" for rung in able)) <= _words(shown)


@pytest.mark.parametrize("height", [6, pytest.param(12, marks=pytest.mark.slow), 25])
@pytest.mark.parametrize(
    "doing", ["base", "a life of compile(scope=block)", "pure_bf16", "base again", "new one"]
)
def test_the_rung_being_measured_is_on_the_screen_however_low_it_is(doing: str, height: int) -> None:
    record = _read("gpt2-124m-ladder-h200/ladder.json")
    console = Console(width=80, height=height, file=io.StringIO())
    lines = _printed(fitting_table(_progress(record, doing), console), height).splitlines()
    name = doing.removeprefix("a life of ").removesuffix(" again")
    assert any(line.startswith(f"{name} ") for line in lines)
    assert len(lines) < height or height == 6
    assert len(_printed(fitting_table(_progress(record), console)).splitlines()) > 25


@pytest.mark.parametrize("name", ["tune-tiny-n1", "tune-gpt2-124m-h200"])
def test_no_name_of_a_searchs_table_is_cut_at_80_columns(name: str) -> None:
    record = _read(f"{name}/tune.json")
    shown = _printed(tune_table(record, None))
    assert max(map(len, shown.splitlines())) <= 80
    tried = [row["key"] for row in record["candidates"] if row["state"] in ("won", "lost", "ahead")]
    assert _words(" ".join(key for key in tried if not key.startswith("planned"))) <= _words(shown)


def test_verdicts_have_their_colors() -> None:
    colored = _printed(ladder_table(_progress(_read("ladder-tiny-x86/ladder.json"))), force_terminal=True, color_system="standard")  # fmt: skip
    assert "\x1b[32mequal and" in colored
    assert "\x1b[33mslower" in colored
    assert "\x1b[32mno gain" not in colored
    assert "\x1b[32mwon" in _printed(tune_table(_read("tune-tiny-n1/tune.json"), None), force_terminal=True, color_system="standard")  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "llama-3.1-8b", "--machine", "a100-80-sxm", "--devices", "2", "--search"],
        ["compare", "results/ladder-tiny-x86", "results/gpt2-124m-ladder-h200"],
    ],
    ids=["plan", "compare"],
)
def test_no_name_is_cut_by_the_edge_of_the_terminal(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = CliRunner().invoke(app, command).stdout
    prose = [
        line for line in narrow.splitlines() if not line.startswith("Next: ")
    ]  # a command stays in one line
    assert max(map(len, prose)) <= 80
    monkeypatch.setenv("COLUMNS", "400")
    wide = CliRunner().invoke(app, command).stdout
    assert _words(wide) <= _words(narrow)


def test_names_are_folded_between_their_parts_only() -> None:
    assert folded("chunked_loss(chunk_tokens=4096)", 20) == "chunked_loss(\nchunk_tokens=4096)"
    assert folded("compile(scope=block)", 20) == "compile(scope=block)"
    assert folded("our head and loss, in chunks", 20) == "our head and loss,\nin chunks"


def test_paragraphs_of_help_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of a paragraph ends early: the next line's first word would not have fitted."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = click.testing.CliRunner().invoke(command(), ["ladder", "--help"]).stdout  # type: ignore[arg-type]
    lines = [line.strip() for line in shown.splitlines()]
    begin = next(at for at, line in enumerate(lines) if line.startswith("Each rung is timed"))
    for line, after in itertools.pairwise(lines[begin : lines.index("", begin)]):
        assert len(line) + 1 + len(after.split()[0]) > 76


def _last(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(folder)
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, (ran.output, ran.exception)
    return ran.stdout.rstrip().splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "following"),
    [
        ("recipes", "Next: rush train tiny"),
        ("recipes show tiny batch.micro=4", "# Next: rush train tiny batch.micro=4"),
        ("ladder", "Next: rush ladder here"),
        ("explain", "Next: rush explain "),
        ("plan tiny --machine h100-sxm --devices 2 layout.ddp=2", "Next: rush plan tiny layout.ddp=2 --machine=h100-sxm --devices=2 --search"),
        ("plan llama-3.1-8b --machine 4090", "Next: rush plan llama-3.1-8b --machine=4090 --search"),
        ("plan --config model --machine h100-sxm", "Next: rush start model --data FILES --device h100-sxm"),
        ("plan --config strange --machine h100-sxm", "Next: rush plan --config strange "),
        ("report a", "Next: python3 -m webbrowser -t a/report.html"),
        ("compare a b", "Next: rush compare a b --out comparison.html"),
        ("compare a b --out c.html", "Next: rush watch a b"),
        ("data clean cooking rows.jsonl -o kept.jsonl", "Next: rush start MODEL --data kept.jsonl"),
    ],
)  # fmt: skip
def test_the_last_line_is_what_a_person_would_type_next(
    words: str, following: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, rows=30)
    for name, more in (("model", {}), ("strange", {"num_local_experts": 4, "num_experts_per_tok": 2})):
        (tmp_path / name).mkdir()
        config = {"model_type": "llama" if not more else "mixtral", "hidden_size": 64, "num_hidden_layers": 2,
                  "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 128, "max_position_embeddings": 2048, **more}  # fmt: skip
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "rows.jsonl").write_text('{"title": "a", "ingredients": ["salt"], "steps": ["stir it"]}\n')
    assert _last(words.split(), tmp_path, monkeypatch).startswith(following)
