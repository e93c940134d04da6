"""What findings under `results/` tell the planner of a search."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rush.plan.measured_cases import read_findings

RESULTS = Path(__file__).parents[2] / "results"


def copied(name: str, folder: Path, **changes: object) -> Path:
    """A search's record alone in a folder, with some of it written anew."""
    record = json.loads((RESULTS / name / "tune.json").read_text()) | changes
    (folder / name).mkdir(parents=True)
    (folder / name / "tune.json").write_text(json.dumps(record))
    return folder


def test_a_search_of_fine_tuning_is_read_by_the_tokens_that_were_processed(tmp_path: Path) -> None:
    """Its speeds are of tokens learned from, of which a step has fewer."""
    name = "tune-sft-lora-tiny-n1"
    record = json.loads((RESULTS / name / "tune.json").read_text())
    assert record["counted"] == "trained"
    start = next(row for row in record["candidates"] if row["state"] == "start")
    cases = read_findings(copied(name, tmp_path))
    found = next(case for case in cases if case.name == "as it stands")
    assert found.step_s == pytest.approx(record["settings"]["tokens"] / start["processed_per_s"])
    assert start["processed_per_s"] > 1.2 * start["tokens_per_s"]["median"]


def test_a_search_without_processed_tokens_is_no_measured_case_of_fine_tuning(tmp_path: Path) -> None:
    name = "tune-sft-lora-tiny-n1"
    rows = json.loads((RESULTS / name / "tune.json").read_text())["candidates"]
    for row in rows:
        row.pop("processed_per_s")
    assert read_findings(copied(name, tmp_path, candidates=rows)) == []


def test_pretraining_needs_no_such_figure(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / "tune-tiny-n1", tmp_path / "tune-tiny-n1")
    assert len(read_findings(tmp_path)) > 5


def test_of_one_recipe_in_two_searches_the_later_counts(tmp_path: Path) -> None:
    copied("tune-tiny-n1", tmp_path / "a", started="2020-01-01T00:00:00+00:00")
    copied("tune-tiny-n1", tmp_path / "z", started="2031-01-01T00:00:00+00:00")
    (tmp_path / "all").mkdir()
    for old, new in (("a", "z-later-by-name"), ("z", "a-later-by-time")):
        shutil.move(tmp_path / old / "tune-tiny-n1", tmp_path / "all" / new)
    assert {case.study for case in read_findings(tmp_path / "all")} == {"a-later-by-time"}
