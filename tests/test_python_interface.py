"""The Python interface: the example notebook runs, results show themselves, bad input has the command line's message."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rush
from rush.errors import RecipeError
from tests.fresh_cache import fresh_cache
from tests.small_recipe import write_small_recipe

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "notebook" / "rush.ipynb"
RUN_CELLS = """
import ast, json, sys
names = {}
for source in json.load(open(sys.argv[1])):
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    show = getattr(value, "_repr_html_", None)
    print(json.dumps([type(value).__name__, show() if show else repr(value)]), file=sys.stderr)
"""


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_example_notebook_runs_and_its_results_show_themselves(tmp_path: Path) -> None:
    # On little text, and with one process for each rung.
    small = {'"tiny"': json.dumps(str(write_small_recipe(tmp_path))), "processes = 2": "processes = 1"}
    sources = cells()
    for old, new in small.items():
        assert any(old in source for source in sources)
        sources = [source.replace(old, new) for source in sources]
    (tmp_path / "cells.json").write_text(json.dumps(sources))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RUSH_CACHE": str(fresh_cache(tmp_path / "cache"))}
    done = subprocess.run(
        [sys.executable, "-c", RUN_CELLS, "cells.json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shown = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('["')]
    html = {kind: text for kind, text in shown if "<" in text}
    assert "<svg" in html["TrainingRun"]
    assert "<svg" in html["LadderResult"]
    assert "<table" in html["PlannedRecipe"]
    assert "fused_adamw" in done.stdout


def test_the_notebook_uses_every_function_of_the_interface_but_the_search() -> None:
    used = {
        node.attr
        for source in cells()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rush"
    }
    assert used == {"load_recipe", "plan_recipe", "train", "generate", "load_model", "run_ladder"}
    assert used | {"tune_recipe"} <= set(rush.__all__)


def test_a_recipe_may_be_a_name_a_file_or_a_recipe(tmp_path: Path) -> None:
    file = write_small_recipe(tmp_path, steps=2)
    runs = [
        rush.train(one, "schedule.warmup=1", out=tmp_path / f"run-{number}")
        for number, one in enumerate((file, str(file), rush.load_recipe(str(file))))
    ]
    losses = [[row["loss"] for row in run.rows] for run in runs]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1] == losses[2]
    with pytest.raises(RecipeError, match=r"holds a run|already"):
        rush.train(file, out=tmp_path / "run-0")


def test_generated_text_is_the_same_streamed_and_whole(tmp_path: Path) -> None:
    run = rush.train(write_small_recipe(tmp_path, steps=2), "schedule.warmup=1", out=tmp_path / "run")
    pieces: list[str] = []
    streamed = rush.generate(run.folder, "def ", max_tokens=8, show=pieces.append)
    whole = rush.generate(run.folder, "def ", max_tokens=8)
    assert streamed == whole
    assert "".join(pieces) == str(whole)
    assert str(whole) == "def " + whole.text


def test_bad_input_is_refused_with_the_message_of_the_command_line() -> None:
    with pytest.raises(RecipeError, match="allowed: cumulative"):
        rush.run_ladder("tiny", view="sideways")
    with pytest.raises(RecipeError, match="--budget is 'soon'"):
        rush.tune_recipe("tiny", budget="soon")
    with pytest.raises(RecipeError, match="train needs a recipe"):
        rush.train()
