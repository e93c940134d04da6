"""Net in addition to gross: a race of two recipes for a ladder's rung or a search's winner.

A ladder and a search time steps, which is gross. A model may learn slightly less per step with a STATISTICAL technique, and
only a race measures how much: if one was requested, or exists already, its net ratio is recorded with the gain. It takes the
time of six runs (three seeds each), so it only runs on request.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from rush.errors import DataError, RecipeError
from rush.lab.race.contenders import Contender
from rush.lab.race.race_plan import RacePlan, plan_race
from rush.lab.race.racing import race
from rush.recipe import Knob, Recipe
from rush.recipe_io import parse
from rush.records.ladder import LadderRecord, RungRecord
from rush.records.models import ModelRecord
from rush.records.race import FILE, NetRecord, RaceRecord, read_race
from rush.report.race import write_race_report
from rush.report.race_words import verdict_of
from rush.techniques import Parity, registry

SEEDS = 3
RACES = "races"
"""The folder of a ladder's races, one for each rung."""


def pair_plan(
    first: tuple[str, Recipe],
    second: tuple[str, Recipe],
    tokens: int,
    *,
    seeds: int = SEEDS,
    techniques: Sequence[str] = (),
) -> RacePlan:
    """The race of two recipes by name, checked."""
    contenders = [Contender(letter, *one) for letter, one in zip("AB", (first, second), strict=True)]
    return plan_race(contenders, tokens=tokens, seeds=seeds, name=second[0], techniques=techniques)


def race_pair(plan: RacePlan, folder: Path, *, note: Callable[[str], None]) -> NetRecord | None:
    """Race two recipes, or resume their race, with a note of every leg; the second one's net. None where they could not be compared."""
    first, second = (one.name for one in plan.contenders)
    note(
        f"Racing A ({first}) and B ({second}), {len(plan.seeds)} seeds of {plan.tokens:,} tokens each, in {folder}."
    )
    record = race(plan, folder, watch=lambda progress: note(progress.ended) if progress.ended else None)
    write_race_report(folder, folder / "report.html")
    return net_of(record, folder)


def net_of(record: RaceRecord, folder: Path) -> NetRecord | None:
    """The findings of a finished race of two, for the record of a rung or winner."""
    if not record["findings"] or record.get("finished") is None:
        return None
    found = record["findings"][0]
    return {
        "verdict": verdict_of(found),
        "against": record["contenders"][0]["name"],
        "tokens": record["tokens"],
        "seeds": len(record["seeds"]),
        "gross": found["gross"],
        "net": found["net"],
        "more_tokens": found["more_tokens"],
        "gap": found["gaps"][-1] if found["gaps"] else None,
        "race": folder.name,
    }


def judged_by_curve(rung: RungRecord) -> bool:
    """Whether a rung was timed, and promises no more than the same loss curve."""
    parity = rung.get("parity")
    return rung["status"] == "ok" and parity is not None and parity.get("class") == "STATISTICAL"


def race_rungs(
    record: LadderRecord,
    folder: Path,
    tokens: int | None,
    *,
    techniques: Sequence[str] = (),
    note: Callable[[str], None],
) -> LadderRecord:
    """The ladder's record with the net of every STATISTICAL rung against the rung that its gain is over: raced now over `tokens`, or
    without them only where a race of these recipes is there."""
    rungs = {rung["name"]: rung for rung in record["rungs"]}
    for rung in record["rungs"]:
        gain = rung.get("gain")
        over = rungs.get(str(gain.get("over"))) if gain else None
        if over is None or not judged_by_curve(rung):
            continue
        place = folder / RACES / rung["name"]
        if tokens is not None:
            both = [(one["name"], parse(tomllib.loads(one["recipe"]))) for one in (over, rung)]
            plan = pair_plan(both[0], both[1], tokens, techniques=techniques)
            net = race_pair(plan, place, note=note)
        else:
            net = _known(place, [over, rung])
        if net is not None:
            rung["net"] = net
    return record


def race_models(
    record: ModelRecord,
    folder: Path,
    tokens: int | None,
    *,
    techniques: Sequence[str] = (),
    note: Callable[[str], None],
) -> ModelRecord:
    """The bench's record with the net of every recipe of ours that is judged by its loss curve, against the same recipe without its
    STATISTICAL techniques: a baseline of another library cannot race, and what those techniques cost is the difference."""
    for workload in record["workloads"]:
        for ours in workload.get("ours", ()):
            rung = ours["rung"]
            if not judged_by_curve(rung):
                continue
            second = parse(tomllib.loads(rung["recipe"]))
            first, without = without_statistical(second)
            place = folder / RACES / f"{workload['name']}-{rung['name']}"
            if tokens is None:
                net = _known_digests(place, [first.digest, second.digest])
            else:
                try:
                    one = (f"{rung['name']} {without}", first)
                    plan = pair_plan(one, (rung["name"], second), tokens, techniques=techniques)
                except RecipeError as error:
                    note(f"{rung['name']} does not race with itself {without}: {error}")
                    continue
                net = race_pair(plan, place, note=note)
            if net is not None:
                rung["net"] = net
    return record


def without_statistical(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe without its techniques of class STATISTICAL, and what that is called."""
    known = registry()
    kept: list[tuple[str | dict[str, Knob], str]] = []
    gone: list[tuple[str | dict[str, Knob], str]] = []
    for entry, (name, _) in zip(recipe.techniques, recipe.technique_uses(), strict=True):
        (gone if name in known and known[name].parity is Parity.STATISTICAL else kept).append((entry, name))
    first = recipe.model_copy(update={"techniques": [entry for entry, _ in kept]})
    return first, f"without {', '.join(name for _, name in gone) or 'nothing'}"


def _known(place: Path, rungs: Sequence[RungRecord]) -> NetRecord | None:
    """The net of an earlier race of the same recipes."""
    return _known_digests(place, [rung.get("digest") for rung in rungs])


def _known_digests(place: Path, digests: Sequence[str | None]) -> NetRecord | None:
    if not (place / FILE).is_file():
        return None
    try:
        there = read_race(place)
    except DataError:
        return None  # a damaged race is no reason to lose a ladder
    same = [one["digest"] for one in there["contenders"]] == list(digests)
    return net_of(there, place) if same else None
