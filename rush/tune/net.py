"""The last stage of `rush tune --to-loss`: a race between the winner and the unchanged recipe.

A search ranks by tokens per second, which is gross. If the winner rounds more, or learns less per step, it
reaches the same loss later than its speed suggests: the race measures by how much. It runs after the search,
outside its budget, and can be resumed like any race.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rush.errors import RecipeError
from rush.lab.race.pair import pair_plan, race_pair
from rush.recipe_io import changed, load_recipe
from rush.records.tune import TuneRecord, write_tune
from rush.tune.record import Request

RACE = "race"
UNCHANGED = "the unchanged recipe"


def check_race(request: Request, tokens: int) -> None:
    """Refuse an impossible race before the search begins."""
    if request.goal.objective == "longest-sequence":
        raise RecipeError(
            "--to-loss races recipes of one sequence length; leave it out with --objective longest-sequence."
        )
    if request.recipe.auto:
        raise RecipeError(
            "--to-loss needs a number for batch.micro, not auto; give one, or race afterwards with `rush race`."
        )
    pair_plan((UNCHANGED, request.recipe), ("the winner", request.recipe), tokens)


def race_winner(
    request: Request,
    record: TuneRecord,
    folder: Path,
    tokens: int,
    *,
    techniques: Sequence[Path],
    note: Callable[[str], None],
) -> TuneRecord:
    """The record with the winner's net; without a race where nothing won."""
    winner = record["winner"]
    if winner is None or winner["as_it_stood"]:
        note("Nothing to race: the unchanged recipe won.")
        return record
    first = changed(request.recipe, {"batch.total_tokens": request.recipe.step_tokens})
    plan = pair_plan(
        (UNCHANGED, first),
        ("the winner", load_recipe(str(folder / "recipe.toml"))),
        tokens,
        techniques=[str(file) for file in techniques],
    )
    winner["net"] = race_pair(plan, folder / RACE, note=note)
    write_tune(folder / "tune.json", record)
    return record
