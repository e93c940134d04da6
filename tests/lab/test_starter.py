from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rush.lab.trial.starter import Starter, run_plainly

Run = Callable[[Path, Path, Path, dict[str, str], float], int | None]


@pytest.fixture(scope="module", params=["forked", pytest.param("plain", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    starter = Starter()
    yield starter.run if request.param == "forked" else run_plainly
    starter.close()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    return tmp_path / "spec.json", tmp_path / "result.json", tmp_path / "log.txt"


def _technique(folder: Path, code: str) -> dict[str, object]:
    """A spec whose first act is to run this code in the trial's process."""
    path = folder / "extra.py"
    path.write_text(code)
    return {"kind": "measure", "extra_techniques": [str(path)]}


def test_a_trial_that_fails_reports_its_exit_code_and_its_last_line(
    run: Run, files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    spec, result, log = files
    code = "import os, sys\nprint(os.environ['SAID'], 'torch' in sys.modules)\nraise ValueError('planted')\n"
    spec.write_text(json.dumps(_technique(tmp_path, code)))
    for said in ("first", "second"):  # one after another, each in a process of its own
        assert run(spec, result, log, {"SAID": said}, 120.0) == 1
        words = log.read_text()
        assert f"{said} True" in words
        assert "ValueError: planted" in words
    assert "SAID" not in os.environ


def test_what_a_trial_leaves_behind_does_not_reach_the_next(
    run: Run, files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    spec, result, log = files
    code = "import sys\nassert not hasattr(sys, 'left'), 'left over'\nsys.left = 1\nsys.exit(7)\n"
    spec.write_text(json.dumps(_technique(tmp_path, code)))
    assert [run(spec, result, log, {}, 120.0) for _ in range(2)] == [7, 7]


@pytest.mark.slow
def test_a_trial_past_its_limit_is_ended_with_all_it_started(
    run: Run, files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    spec, result, log = files
    code = "import subprocess, time\nprint(subprocess.Popen(['sleep', '986']).pid, flush=True)\ntime.sleep(600)\n"
    spec.write_text(json.dumps(_technique(tmp_path, code)))
    assert run(spec, result, log, {}, 20.0 if run is run_plainly else 4.0) is None  # without its imports
    pid = int(log.read_text().split()[0])
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
