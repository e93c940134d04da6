"""What a ladder leads to: the recipes of its fastest proven rung and of the one with the least memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rush.lab.ladder.ladder_file import load_ladder
from rush.lab.ladder.proven import FASTEST, SMALLEST, write_proven
from rush.recipe_io import load_recipe
from rush.report import headlines
from rush.report.ladder import read_ladder

RESULTS = Path(__file__).resolve().parents[2] / "results"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(RESULTS / "llama-3.2-1b-h200" / "ladder.json", tmp_path)
    return tmp_path


def changed_rungs(folder: Path, change: Any) -> None:
    record = json.loads((folder / "ladder.json").read_text())
    for rung in record["rungs"]:
        change(rung)
    (folder / "ladder.json").write_text(json.dumps(record))


def test_the_fastest_proven_rung_is_a_recipe_to_train(folder: Path) -> None:
    plan = load_ladder("llama-3.2-1b")
    proven = write_proven(plan, folder)
    best = headlines.credited(read_ladder(folder))
    assert best is not None
    assert proven[FASTEST].name == best.name
    recipe = load_recipe(str(folder / FASTEST))
    assert [name for name, _ in recipe.technique_uses()] == [use.split("(")[0] for use in best.techniques]
    assert recipe.micro == best.micro
    # Measured with one micro batch a step, trained with the tokens per step of the ladder's recipe.
    assert recipe.batch.total_tokens == load_recipe(plan.recipe).batch.total_tokens
    comment = (folder / FASTEST).read_text().splitlines()[0]
    assert best.title in comment
    assert headlines.formatting.ratio(best.total_gain.ratio if best.total_gain else None) in comment


def test_the_least_memory_is_a_rung_that_learns_the_same(folder: Path) -> None:
    rung = write_proven(load_ladder("llama-3.2-1b"), folder)[SMALLEST]
    sound = [r for r in read_ladder(folder).rungs if headlines.learns_the_same(r) and r.speed and r.usable]
    assert rung.peak_memory_bytes == min(r.peak_memory_bytes for r in sound if r.peak_memory_bytes)
    different = next(r for r in read_ladder(folder).rungs if r.name == rung.name)
    changed_rungs(folder, lambda r: r["name"] == rung.name and r["parity"].update(verdict="different"))
    assert write_proven(load_ladder("llama-3.2-1b"), folder)[SMALLEST].name != different.name


def test_a_ladder_without_a_proven_gain_leaves_no_recipe(folder: Path) -> None:
    plan = load_ladder("llama-3.2-1b")
    write_proven(plan, folder)
    assert (folder / FASTEST).is_file()

    def nothing_gained(rung: Any) -> None:
        for key in ("gain", "total_gain"):
            if rung.get(key):
                rung[key] = {**rung[key], "ratio": 1.0, "ci95": [0.99, 1.01]}
        if rung["verdict"] == "equal and faster":
            rung["verdict"] = "no gain"

    changed_rungs(folder, nothing_gained)
    assert FASTEST not in write_proven(plan, folder)
    assert not (folder / FASTEST).exists()
