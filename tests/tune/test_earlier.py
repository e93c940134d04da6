"""What changes gained on this machine before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rush.hardware import Machine
from rush.records.ladder import read_ladder
from rush.tune.earlier import RememberedGain, remember, remembered

LADDER = Path(__file__).parents[2] / "results" / "llama-3.2-1b-h200" / "ladder.json"
HERE, ELSEWHERE = "0" * 16, "1" * 16


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "cache"))


def test_gains_are_kept_for_their_machine_and_those_of_the_same_model_go_first(tmp_path: Path) -> None:
    remember(
        HERE,
        [
            RememberedGain("compile", "tiny", 1.5),
            RememberedGain("compile", "tiny", 1.7),
            RememberedGain("compile", "other", 3.0),
        ],
    )
    remember(HERE, [RememberedGain("flash", "other", 1.2), RememberedGain("fp8", "other", 0.9)])
    assert remembered(HERE, "tiny", tmp_path) == {"compile": 1.6, "flash": 1.2}
    assert remembered(ELSEWHERE, "tiny", tmp_path) == {}


def test_only_the_newest_gains_are_kept(tmp_path: Path) -> None:
    remember(HERE, [RememberedGain("compile", "tiny", 9.0)] * 50)
    remember(HERE, [RememberedGain("compile", "tiny", 1.0)] * 20)
    assert remembered(HERE, "tiny", tmp_path) == {"compile": 1.0}


def test_ladders_of_this_machine_beside_the_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "ladder-llama").mkdir()
    shutil.copy(LADDER, tmp_path / "ladder-llama" / "ladder.json")
    own = Machine.from_dict(read_ladder(LADDER)["machine"]).fingerprint()
    found = remembered(own, "llama-3.2-1b", tmp_path)
    assert found["fp8"] == pytest.approx(1.186, abs=1e-3)
    assert remembered(HERE, "llama-3.2-1b", tmp_path) == {}


def test_a_damaged_cache_is_not_known(tmp_path: Path) -> None:
    remember(HERE, [RememberedGain("compile", "tiny", 1.5)])
    next((tmp_path / "cache").iterdir()).write_text("{")
    assert remembered(HERE, "tiny", tmp_path) == {}
