"""What becomes of a job that is asked to stop, or of which one pod fails; the script runs, with stand-ins for Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rush.clusters.kubernetes import documents
from rush.clusters.slurm import script
from tests.clusters.jobs import job

SRUN = """#!/bin/bash
echo $$ > "$ASKED.srun"
trap 'exit $ENDS_WITH' TERM
kill -USR1 "$PPID"
for _ in $(seq 200); do sleep 0.05; done
"""
SCANCEL = """#!/bin/bash
[ "$*" = "--signal=TERM 7" ] && kill -TERM "$(cat "$ASKED.srun")"
sleep 0.3 # the step has ended when this returns
"""
SCONTROL = '#!/bin/bash\nif [ "$1" = show ]; then echo localhost; else echo "$@" >> "$ASKED"; fi\n'


def run_job(tmp_path: Path, ends_with: int) -> tuple[int, str]:
    """Its exit code, and what it asked of scontrol. Its ranks end with this code when they are asked to stop."""
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    surroundings = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "ASKED": str(tmp_path / "asked"), "ENDS_WITH": str(ends_with),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_CPUS_ON_NODE": "2",
    }  # fmt: skip
    text = script(job(run_folder=str(tmp_path / "run")))
    done = subprocess.run(
        ["bash", "-c", text], env=surroundings, capture_output=True, text=True, check=False, timeout=60
    )
    asked = tmp_path / "asked"
    return done.returncode, asked.read_text().strip() if asked.exists() else ""


@pytest.mark.parametrize(("ends_with", "code", "asked"), [(75, 0, "requeue 7"), (0, 0, "")])
def test_a_job_is_queued_again_only_if_its_ranks_were_cut_short(
    ends_with: int, code: int, asked: str, tmp_path: Path
) -> None:
    assert run_job(tmp_path, ends_with) == (code, asked)


def test_a_pod_that_fails_is_not_started_again_by_itself() -> None:
    """All pods are started again together: one alone would wait for ranks that are gone."""
    _, _, runtime, _ = documents(job(max_restarts=3))
    inside = runtime["spec"]["template"]["spec"]
    (node,) = inside["replicatedJobs"]
    assert inside["failurePolicy"]["maxRestarts"] == 3
    assert node["template"]["spec"]["backoffLimit"] == 0
    assert node["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"
