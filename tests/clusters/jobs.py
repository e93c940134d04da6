"""A job for tests of what `rush launch` writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rush.clusters import Job
from rush.recipe_io import load_recipe


def job(**changes: Any) -> Job:
    recipe = load_recipe("tiny", ["layout.ddp=2", "layout.fsdp=8", "batch.micro=1"])
    words = ("tiny", "layout.ddp=2", "layout.fsdp=8", "batch.micro=1")
    return replace(Job("tiny", recipe, words, 2, 8, "/shared/runs/tiny"), **changes)


EVERYTHING: dict[str, Any] = {
    "name": "My 1st run!", "partition": "gpu", "account": "us", "container": "registry/rush:1", "cpus_per_node": 96,
    "memory_per_node": "900G", "environment": {"NCCL_DEBUG": "WARN", "SAID": "a 'quoted' $word"}, "namespace": "lab",
    "storage_class": "fast", "image": "registry/rush:1",
}  # fmt: skip
JOBS = {
    "plain": job(),
    "everything": job(**EVERYTHING),
    "a venv": job(venv="/shared/a venv", run_folder="$SCRATCH/runs/a run"),
    "ranks by srun": job(torchrun=False, cpus_per_node=96),
}
