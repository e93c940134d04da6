"""What the planner says of every rung of the climbs on an A100, and on the H200 that measured them: a record, by arithmetic."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rush.plan import plan, spec_of, target_of
from rush.plan.planning import unmet
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from scripts.guide.book import source

RECORD = "docs/guide/records/plan.json"
LADDERS = {
    "llama": "results/llama-3.2-1b-h200/ladder.json",
    "gpt2": "results/gpt2-124m-ladder-h200/ladder.json",
    "host": "results/llama-3.2-1b-host-h200/ladder.json",
}
MACHINES = {"a100": "a100-80-sxm", "h200": "h200-sxm"}


def planned() -> dict[str, Any]:
    """By machine and ladder, each rung's speed, memory and whether it fits."""
    record: dict[str, Any] = {"format": 1, "machines": {}}
    with tempfile.TemporaryDirectory() as folder:
        recipes = {
            (ladder, rung["name"]): _recipe(rung["recipe"], Path(folder) / "recipe.toml")
            for ladder, file in LADDERS.items()
            for rung in source(file)["rungs"]
            if rung["status"] == "ok"
        }
    for machine, key in MACHINES.items():
        target = target_of(key)
        rungs: dict[str, dict[str, Any]] = {ladder: {} for ladder in LADDERS}
        for (ladder, name), recipe in recipes.items():
            found = plan(spec_of(recipe), target, limits=False, problems=unmet(recipe, target))
            rungs[ladder][name] = {
                "runs": found.fits and not found.problems,
                "fits": found.fits,
                "problems": list(found.problems),
                "tokens_per_s": round(found.tokens_per_s, 1),
                "memory_bytes": round(found.life.total),
                "time_error": found.expected_error["time"],
                "time_ms": {part: round(1e3 * s, 3) for part, s in found.time.parts.items()},
            }
        record["machines"][machine] = {
            "key": key,
            "how": target.how,
            "memory_bytes": target.memory_bytes,
            "rungs": rungs,
        }
    return record


def _recipe(text: str, file: Path) -> Recipe:
    file.write_text(text, "utf-8")
    return load_recipe(str(file))
