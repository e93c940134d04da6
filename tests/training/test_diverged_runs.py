"""A diverged run leaves failure.json as every other failure does: pages and lives read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rush.errors import Diverged
from rush.records.run_folder import RunFolder
from rush.training.failures import Phase, RunStatus, reporting_failures


def test_a_diverged_run_says_in_its_folder_where_it_ended(tmp_path: Path) -> None:
    status = RunStatus(RunFolder(tmp_path))
    status.enter(Phase.STEP, 7)
    with pytest.raises(Diverged, match="the loss is nan"), reporting_failures(status):
        raise Diverged("step 7: the loss is nan.")
    assert json.loads((tmp_path / "failure.json").read_text()) == {
        "error": "Diverged",
        "phase": "step",
        "step": 7,
        "techniques": [],
        "disk_full": False,
        "message": "step 7: the loss is nan.",
    }
