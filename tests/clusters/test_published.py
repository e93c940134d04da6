"""Manifests and task files held against what their makers publish, in a throwaway environment with the makers' packages."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

from rush.clusters import manifest, task_file
from tests.clusters.jobs import JOBS, job
from tests.clusters.test_skypilot import TASKS, WHEEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CHECK = Path(__file__).with_name("published_schemas.py")
READ = """
import json, sys
import sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
autostop = resources.autostop_config
print(json.dumps({
    "name": task.name, "num_nodes": task.num_nodes, "accelerators": resources.accelerators, "spot": resources.use_spot,
    "recovery": resources.job_recovery["max_restarts_on_errors"], "down": bool(autostop and autostop.down),
    "volumes": task.volumes, "storage": sorted(task.storage_mounts), "files": task.file_mounts or {}, "run": task.run, "setup": task.setup,
}))
"""


def environment_with(folder: Path, *packages: str) -> Path:
    """Its Python. Without an index there is nothing to test with."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    words = [str(python), "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed here: {done.stderr[-300:]}")
    return python


def check(python: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    home = {"HOME": str(python.parent), "PATH": os.environ["PATH"]}
    return subprocess.run(
        [str(python), *map(str, words)], env=home, check=False, capture_output=True, text=True, timeout=120
    )


def test_manifests_have_the_keys_that_kubernetes_jobset_and_kubeflow_publish(tmp_path: Path) -> None:
    python = environment_with(tmp_path / "venv", "kubernetes-validate==1.37.0", "kubeflow-trainer-api==2.3.0")
    file = tmp_path / "run.yaml"
    for ours in JOBS.values():
        file.write_text(manifest(ours))
        done = check(python, CHECK, file)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [
            "PersistentVolumeClaim", "ConfigMap", "Job", "TrainJob", "TrainingRuntime", "JobSet",
        ]  # fmt: skip
    whole = manifest(job())
    for right, wrong in (
        ("torch: {}", "torch: {numProcPerNode: 8}"), ("backoffLimit", "backofLimit"), ("maxRestarts", "maxRestart"),
        ("emptyDir", "emptyDirs"), ("runtimeRef", "runtime"), ("accessModes", "accessMode"),
    ):  # fmt: skip
        assert right in whole
        file.write_text(whole.replace(right, wrong, 1))
        assert check(python, CHECK, file).returncode != 0, wrong


def test_skypilot_reads_in_a_task_what_was_meant(tmp_path: Path) -> None:
    import json

    python = environment_with(tmp_path / "venv", "skypilot==0.14.1")
    script, file = tmp_path / "read.py", tmp_path / "run.sky.yaml"
    script.write_text(READ)
    for name, (ours, place) in TASKS.items():
        text = task_file(ours, place)
        for path in (WHEEL, "/here/cuda.txt", "/here/data"):  # SkyPilot wants to see what it is to copy
            there = tmp_path / path.lstrip("/")
            there.parent.mkdir(parents=True, exist_ok=True)
            there.touch()
            text = text.replace(path, str(there))
        file.write_text(text)
        done = check(python, script, file)
        assert done.returncode == 0, (name, done.stderr)
        read = json.loads(done.stdout)
        assert (read["name"], read["num_nodes"]) == (ours.label, ours.nodes)
        assert read["accelerators"] == {place.accelerator: ours.gpus_per_node}
        assert (read["spot"], read["recovery"]) == (place.spot, ours.max_restarts)
        assert read["down"] == (place.keeps_runs and place.autostop_minutes > 0)
        assert read["volumes"] == ({"/shared": place.volume} if place.volume else {})
        assert ("/shared" in read["storage"]) == (place.bucket is not None)
        assert (f"~/rush/{Path(WHEEL).name}" in read["files"]) == place.wheel
        assert "--resume" in read["run"]
        assert "cd ~/rush" in read["setup"]
    file.write_text(task_file(*TASKS["a volume"]).replace("num_nodes", "nodes", 1))
    assert check(python, script, file).returncode != 0, "a key that SkyPilot does not have"
