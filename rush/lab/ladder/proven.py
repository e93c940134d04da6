"""The recipes that a ladder leads to: its fastest proven rung, and the one with the least memory.

A rung is measured with one micro batch per step. Its recipe trains with the tokens per step of the recipe
that the ladder varies, by gradient accumulation, if the rung's micro batches divide them. Everything else is
as measured.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from rush.files import write_atomic
from rush.lab.ladder.ladder_file import LadderPlan
from rush.recipe import Recipe
from rush.recipe_io import changed, parse, write_toml
from rush.report import formatting, headlines
from rush.report.ladder import LadderView, RungView, read_ladder

FASTEST, SMALLEST = "recipe.toml", "recipe-least-memory.toml"


def write_proven(plan: LadderPlan, folder: Path) -> dict[str, RungView]:
    """Write the recipes; returns the rung of each file. A file of an earlier climb that no longer holds is removed."""
    view = read_ladder(folder)
    proven = proven_rungs(view)
    for name in (FASTEST, SMALLEST):
        rung = proven.get(name)
        if rung is None:
            (folder / name).unlink(missing_ok=True)
        else:
            write_atomic(folder / name, _header(name, rung, view) + write_toml(_trained(plan, rung)))
    return proven


def proven_rungs(view: LadderView) -> dict[str, RungView]:
    """By file: the rung that the headline credits, and the usable one that learns the same in the least memory."""
    found: dict[str, RungView] = {}
    fastest = headlines.credited(view) or headlines.together(view)
    if fastest is not None:
        found[FASTEST] = fastest
    sound = [rung for rung in view.rungs if _sound(rung)]
    smallest = min(sound, key=lambda rung: rung.peak_memory_bytes or 0.0, default=None)
    if smallest is not None and smallest is not fastest and smallest.verdict != "baseline":
        found[SMALLEST] = smallest
    return found


def _sound(rung: RungView) -> bool:
    measured = rung.status == "ok" and rung.speed is not None and bool(rung.peak_memory_bytes)
    return measured and rung.usable and headlines.learns_the_same(rung) and rung.verdict != "no effect"


def _trained(plan: LadderPlan, rung: RungView) -> Recipe:
    """The rung's recipe with the tokens per step of the recipe that the ladder varies, where they can be accumulated."""
    assert rung.recipe is not None, rung.name
    recipe, tokens = parse(tomllib.loads(rung.recipe)), plan.step_tokens
    if tokens is None or recipe.batch.total_tokens is not None or tokens % recipe.step_tokens:
        return recipe
    return changed(recipe, {"batch.total_tokens": tokens})


def _header(name: str, rung: RungView, view: LadderView) -> str:
    what = (
        "The fastest proven rung"
        if name == FASTEST
        else "The rung with the least memory that learns the same"
    )
    assert rung.speed is not None
    figures = [formatting.speed(rung.speed.median), f"{formatting.size(rung.peak_memory_bytes)} at most"]
    if rung.total_gain is not None:
        figures.insert(1, f"{formatting.ratio(rung.total_gain.ratio)} of the first rung")
    return (
        f"# {what} of the ladder {view.name}, {rung.title}: {', '.join(figures)}\n"
        f"# on {headlines.machine_name(view.machine)}; parity with plain fp32: equal. The evidence is in ladder.json.\n"
    )
