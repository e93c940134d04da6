"""`rush launch --slurm` submitted to a real Slurm: two nodes of three train, lose a node, are preempted, and end with the same bits."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.loopback_slurm import Cluster, loopback_slurm, missing
from tests.training.small_runs import (
    checkpoint_files,
    environment,
    rows,
    rush_alone,
    small_recipe,
    write_corpus,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(900),
]
STEPS = 900


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with loopback_slurm(tmp_path_factory.mktemp("cluster") / "slurm") as running:
        yield running


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    path = folder / "small.toml"
    text = small_recipe(
        write_corpus(folder / "corpus"),
        schedule={"steps": STEPS, "warmup": 2},
        layout={"ddp": 2},
        run={"deterministic": True, "save_every": 50, "validate_every": 300, "sample_every": 0, "tensorboard": False},
    )  # fmt: skip
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    out = folder / "run"
    done = rush_alone("train", recipe, "--nproc", "2", "--out", out, cache=folder / "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def write_script(recipe: Path, folder: Path, *options: str) -> Path:
    """The batch script as a user gets it."""
    target = folder / "job.sbatch"
    done = rush_alone(
        "launch", recipe, "--slurm", "--nodes", "2", "--gpus-per-node", "1", "--cpus", "1", "--partition", "low",
        "--venv", sys.prefix, "--run", folder / "run", "--time", "01:00:00", "--max-restarts", "0", "--out", target,
        "--env", "OMP_NUM_THREADS=1", "--env", "GLOO_SOCKET_IFNAME=lo", *options, cache=folder / "cache",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return target


class Submitted:
    """A job of the cluster, and the run that it makes."""

    def __init__(self, cluster: Cluster, script: Path) -> None:
        self.cluster, self.folder = cluster, script.parent
        self.run = self.folder / "run"
        given = {name: environment(self.folder / "cache")[name] for name in ("RUSH_CACHE", "PYTHONPATH")}
        self.number = cluster.submit(script, cwd=self.folder, **given)

    @property
    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    @property
    def said(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.number}.log"))

    def reach(self, step: int) -> None:
        def there() -> bool:
            assert self.state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), self.state + self.said
            return len(rows(self.run)) >= step

        self.cluster.wait(f"step {step} of job {self.number}, whose log is\n{self.said}", there, 240)

    def restarted(self, times: int) -> None:
        """Wait until Slurm has queued it again so often; then do not wait out the two minutes before it may begin. (At once is
        too soon: a node takes no job with the credential of the second in which it was revoked.)"""
        asked = self.cluster.job
        self.cluster.wait(
            f"restart {times}",
            lambda: (
                asked(self.number)["Restarts"] == str(times)
                and asked(self.number)["JobState"] != "COMPLETING"
            ),
        )
        self.cluster.ask("scontrol", "update", f"jobid={self.number}", "starttime=now+5")

    def nodes(self) -> set[str]:
        self.cluster.wait("a running job", lambda: self.state == "RUNNING", 60)
        shown = self.cluster.ask("scontrol", "show", "hostnames", self.cluster.job(self.number)["NodeList"])
        return set(shown.split())

    def finish(self) -> None:
        self.cluster.wait(
            f"the end of job {self.number}",
            lambda: self.state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY"),
            400,
        )
        ended = self.cluster.job(self.number)
        assert ended["JobState"] == "COMPLETED", (ended["JobState"], ended["Reason"], self.said)


def assert_same_bits(run: Path, undisturbed: Path) -> None:
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    assert rows(run) == rows(undisturbed)
    last = f"checkpoints/step-{STEPS:06d}/"
    ours, theirs = checkpoint_files(run), checkpoint_files(undisturbed)
    assert {name for name in theirs if name.startswith(last)}
    for name in (name for name in theirs if name.startswith(last)):
        assert ours[name] == theirs[name], name


def test_a_drained_node_a_preemption_and_a_lost_node_change_no_bit(
    cluster: Cluster, recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = Submitted(cluster, write_script(recipe, tmp_path))
    job.reach(30)
    first = job.nodes()
    assert len(first) == 2

    # Draining takes no node from a job that runs there; it keeps the next one away.
    drained = sorted(first)[1]
    cluster.ask("scontrol", "update", f"nodename={drained}", "state=drain", "reason=test")
    at = len(rows(job.run))
    job.reach(at + 20)
    assert job.nodes() == first
    assert job.cluster.job(job.number)["Restarts"] == "0"

    # A job of a higher tier needs a node of ours: Slurm stops this one and queues it again.
    taken = sorted(first)[0]
    other = cluster.submit("-p", "high", "-w", taken, "-c", "2", "--output=/dev/null", "--wrap", "sleep 2")
    job.restarted(1)
    cluster.wait("the other job's end", lambda: cluster.job(other)["JobState"] == "COMPLETED")
    stopped_at = len(rows(job.run))
    assert at + 20 <= stopped_at < STEPS
    assert (job.run / "checkpoints" / f"step-{stopped_at:06d}").is_dir(), "the ranks ended with a checkpoint"
    assert job.nodes() == {"n1", "n2", "n3"} - {drained}
    cluster.ask("scontrol", "update", f"nodename={drained}", "state=resume")

    # A node that fails takes its rank and the batch script with it, without a checkpoint; Slurm misses it and queues the job again.
    job.reach(stopped_at + 20)
    lost = cluster.job(job.number)["BatchHost"]
    cluster.lose(lost)
    job.restarted(2)
    assert job.nodes() == {"n1", "n2", "n3"} - {lost}
    job.finish()
    assert f"Resuming from step-{stopped_at:06d}" in job.said
    assert len(re.findall(r"Resuming from step-\d+", job.said)) == 2
    assert_same_bits(job.run, undisturbed)


@pytest.mark.parametrize("start", ["--torchrun", "--no-torchrun"])
def test_a_job_near_its_time_limit_saves_a_checkpoint_and_is_queued_again(
    start: str, cluster: Cluster, recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = Submitted(cluster, write_script(recipe, tmp_path, start))
    job.reach(30)
    cluster.ask("scancel", "--batch", "--signal=USR1", job.number)  # what --signal=B:USR1@300 sends
    job.restarted(1)
    stopped_at = len(rows(job.run))
    assert (job.run / "checkpoints" / f"step-{stopped_at:06d}").is_dir()
    assert "stopping after the current step" in job.said
    job.finish()
    assert f"Resuming from step-{stopped_at:06d}" in job.said
    assert_same_bits(job.run, undisturbed)
