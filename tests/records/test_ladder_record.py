from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rush.errors import DataError
from rush.records.ladder import check_ladder, read_ladder, write_ladder

RUNG: dict[str, Any] = {
    "name": "base",
    "techniques": [],
    "recipe": "",
    "status": "ok",
    "verdict": "baseline",
    "evidence": [],
    "tokens_per_s": {"median": 2.0, "ci95": [1.0, 3.0], "samples": [1.0, 2.0, 3.0]},
    "parity": {"verdict": "equal"},
}
RECORD: dict[str, Any] = {
    "format": 1,
    "name": "tiny",
    "view": "cumulative",
    "started": "2026-01-01T00:00:00+00:00",
    "machine": {},
    "base": {},
    "rungs": [RUNG],
}


def test_a_record_written_is_a_record_read(tmp_path: Path) -> None:
    write_ladder(tmp_path / "ladder.json", RECORD)  # type: ignore[arg-type]
    assert read_ladder(tmp_path) == RECORD


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("status", "fine"),
        ("verdict", "great"),
        ("techniques", None),
        ("tokens_per_s", None),
        ("tokens_per_s", {"median": 9.0, "ci95": [1.0, 3.0], "samples": [1.0]}),
        ("tokens_per_s", {"median": 2.0, "ci95": [1.0], "samples": [1.0]}),
        ("tokens_per_s", {"median": 2.0, "ci95": [1.0, 3.0], "samples": []}),
        ("tokens_per_s", {"median": 2.0, "ci95": [1.0, 3.0], "samples": [-1.0]}),
        ("parity", {"verdict": "perhaps"}),
    ],
)
def test_a_damaged_rung_is_refused_and_named(key: str, value: Any) -> None:
    tree = copy.deepcopy(RECORD)
    tree["rungs"][0][key] = value
    with pytest.raises(DataError, match=r"rungs\[0\]"):
        check_ladder(tree, "x.json")


def test_a_life_in_a_rung_is_checked() -> None:
    tree = copy.deepcopy(RECORD)
    tree["rungs"][0]["life"] = {"verdict": "ok", "problem": None, "parts": []}
    check_ladder(tree, "x.json")
    for life in ({"verdict": "fine", "parts": []}, {"verdict": "broken", "parts": []}, {"verdict": "ok"}, 3):
        tree["rungs"][0]["life"] = life
        with pytest.raises(DataError, match=r"rungs\[0\].*life"):
            check_ladder(tree, "x.json")


@pytest.mark.parametrize(
    ("key", "value"), [("format", 2), ("view", "sideways"), ("rungs", {}), ("machine", 3)]
)
def test_a_damaged_record_is_refused(key: str, value: Any) -> None:
    with pytest.raises(DataError, match=key):
        check_ladder({**RECORD, key: value}, "x.json")


def test_a_missing_or_broken_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no ladder at"):
        read_ladder(tmp_path)
    (tmp_path / "ladder.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        read_ladder(tmp_path)


def test_a_number_that_is_none_is_never_written(tmp_path: Path) -> None:
    tree = copy.deepcopy(RECORD)
    tree["rungs"][0]["mfu"] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_ladder(tmp_path / "ladder.json", tree)  # type: ignore[arg-type]
    assert json.loads(json.dumps(RECORD)) == RECORD


def test_reading_a_ladder_needs_no_torch() -> None:
    code = "import sys, rush.records.ladder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
