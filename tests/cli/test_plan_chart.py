"""`rush plan --chart`: what it writes and prints, at 80 columns, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rush.cli import app
from rush.errors import RecipeError
from rush.records.plan_chart import PLAN_CHART


def test_a_chart_is_a_record_a_page_a_picture_and_a_table_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["plan", "--chart", "links", "llama-3.2-1b", "--devices", "2", "--out", str(tmp_path / "x")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80
    assert any("llama-3.2-1b: own: ZeRO-3" in line and "±25 %" in line for line in lines)
    assert {path.name for path in (tmp_path / "x").iterdir()} == {
        "plan-chart.json",
        "report.html",
        "picture.svg",
    }
    record = PLAN_CHART.read(tmp_path / "x")
    assert record["command"] == "rush plan llama-3.2-1b --chart links --devices 2"


def test_json_is_the_record(tmp_path: Path) -> None:
    words = ["plan", "--chart", "memory", "--devices", "2", "--out", str(tmp_path), "--json"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert json.loads(found.output) == json.loads((tmp_path / "plan-chart.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chart", "spedup"], "did you mean 'speedup'"),
        (["--chart", "zero", "--search"], "--chart cannot be combined with --search"),
        (["--chart", "all", "--devices", "4"], "draws every chart with its defaults"),
        (["llama-3.2-1b", "--against", "a800-80-sxm"], "--against needs --chart cards"),
        (["--chart", "memory", "--nodes", "2"], "does not take --nodes"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_written(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["plan", *words])
    assert found.exit_code != 0
    shown = found.output + str(found.exception or "")
    assert message in shown.replace("\n", " ")
    assert isinstance(found.exception, RecipeError | SystemExit)
    assert not list(tmp_path.iterdir())
