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
