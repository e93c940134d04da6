"""The contenders of a race as comparable runs: the mean over their seeds, with gross and net from the race.

Gross and net are ratios to the first contender of the same race, whose legs alternated with theirs on one machine; no ratio across
races has an interval. A contender's time is its training time, without what the first steps of a leg took for warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rush.records.race import RaceContender, RaceRecord, RaceRun, read_race
from rush.records.race_curves import training_seconds
from rush.records.run_folder import RunFolder
from rush.records.run_series import RunSeries
from rush.records.run_status import Status
from rush.report.race_words import verdict_of
from rush.report.run_view import RunView, read_toml

OUT = ("diverged", "failed")


@dataclass(frozen=True)
class RacedRecipe(RunView):
    """A contender of a race: the mean over its seeds, as far as all of them came."""

    contender: str
    title: str
    seeds: int
    finding: Mapping[str, Any] | None
    """Against another contender of its race; None for that one."""

    @property
    def name(self) -> str:
        return f"{super().name}/{self.contender} {self.title}"

    @property
    def verdict(self) -> str:
        return verdict_of(self.finding) if self.finding else ""

    def in_race(self) -> dict[str, Any]:
        """Its findings in the race, as `--json` prints them."""
        found = {key: (self.finding or {}).get(key) for key in ("against", "gross", "net", "more_tokens")}
        return {"contender": self.contender, "seeds": self.seeds, **found, "verdict": self.verdict or None}


def raced_recipes(folder: Path) -> list[RacedRecipe]:
    """Every contender of the race in a folder that has made a step."""
    record = read_race(folder)
    findings = {one["contender"]: one for one in record["findings"]}
    found = []
    for one in record["contenders"]:
        runs = [run for run in record["runs"] if run["contender"] == one["letter"]]
        learned = [run for run in runs if run["status"] not in OUT and run["step_s"]]
        made = learned or [run for run in runs if run["step_s"]]
        if not made:
            continue
        found.append(
            RacedRecipe(
                folder=folder,
                recipe=_as_raced(record, one),
                recipe_text=one["recipe"],
                machine=record["machine"],
                series=mean_series(made, one["step_tokens"], RunFolder(folder).metrics),
                samples=(),
                num_samples=0,
                notes=(),
                status=_status(runs),
                failure={},
                contender=one["letter"],
                title=one["name"],
                seeds=len(made),
                finding=findings.get(one["letter"]),
            )
        )
    return found


def _status(runs: Sequence[RaceRun]) -> Status:
    if any(run["status"] in OUT for run in runs):
        return "failed"
    return "finished" if all(run["status"] in ("ok", "reached") for run in runs) else "interrupted"


def _as_raced(record: RaceRecord, one: RaceContender) -> Mapping[str, Any]:
    """The contender's recipe with the race's overrides: its length, its seeds, its validations."""
    tree = {
        key: dict(part) if isinstance(part, dict) else part for key, part in read_toml(one["recipe"]).items()
    }
    for section, values in (
        ("schedule", {"steps": one["steps"]}),
        ("run", {"seed": list(record["seeds"]), "validate_sequences": record["validate_sequences"]}),
    ):
        if isinstance(part := tree.setdefault(section, {}), dict):
            part |= values
            part.pop("epochs", None)
    return tree


def mean_series(runs: Sequence[RaceRun], step_tokens: int, path: Path) -> RunSeries:
    """The curves of a contender: the means over its runs, of every step that all of them have made."""
    series = RunSeries(path)
    seconds = [training_seconds(run) for run in runs]
    held_out = [{one["step"]: one["loss"] for one in run["validations"]} for run in runs]
    before, tokens = 0.0, 0
    sizes = runs[0].get("tokens") or [step_tokens] * len(runs[0]["step_s"])
    for place in range(min(len(one) for one in seconds)):
        losses = [loss for run in runs if (loss := run["losses"][place]) is not None]
        validated = [one[place + 1] for one in held_out if place + 1 in one]
        now = fmean(one[place] for one in seconds)
        tokens += sizes[place]
        row = {"step": place + 1, "tokens": tokens, "step_s": now - before, "labels": sizes[place]}
        if now > before:
            row["tokens_per_s"] = sizes[place] / (now - before)
        if len(losses) == len(runs):
            row["loss"] = fmean(losses)
        if len(validated) == len(runs):
            row["val_loss"] = fmean(validated)
        series.put(row)
        before = now
    return series
