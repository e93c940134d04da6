"""A race in a folder: started or resumed, its record written after every leg.

DIR/race.json            contenders, legs, losses and step times of every run, findings
DIR/recipes/A.toml       the contenders' recipes as given, ready for `rush train`
DIR/runs/A-1337/         a run folder for every contender and seed

A contender that diverges or fails is out, with its reason; the others continue. A run that was killed from
outside ends the command; repeating the command retries its leg.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rush.data import read_manifest
from rush.data.conversations import read_document_manifest
from rush.errors import DataError, MachineError, RecipeError
from rush.files import timestamp, write_atomic
from rush.lab.progress import Progress
from rush.lab.race.contenders import Contender
from rush.lab.race.findings import findings_of
from rush.lab.race.legs import RaceBench, clean, open_race_bench, read_run
from rush.lab.race.race_plan import RacePlan
from rush.recipe import Recipe
from rush.recipe_io import differences, value_at, write_toml
from rush.records.lock import FolderLock
from rush.records.race import ENDED, FILE, FORMAT, RaceRecord, RaceRun, read_race, write_race
from rush.records.race_curves import points_of
from rush.techniques import check
from rush.training.corpus import open_corpus

Note = Callable[[str], None]


RaceProgress = Progress[RaceRecord]
Watch = Callable[[RaceProgress], None]


def race(
    plan: RacePlan,
    folder: Path,
    *,
    watch: Watch = lambda progress: None,
    note: Note = lambda text: None,
) -> RaceRecord:
    """Race into `folder`, or resume the race there. Returns its record."""
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder):
        earlier = _earlier(plan, folder)
        corpus = _same_corpus(plan, note)  # prepared before the clock runs
        with open_race_bench(plan, folder) as bench:
            _check_machine(bench, earlier)
            record = Race(bench, earlier, corpus, watch).go()
        clean(folder)
    return record


def _earlier(plan: RacePlan, folder: Path) -> RaceRecord | None:
    """The race in the folder, which must be the same; seeds may be added, and time."""
    if not (folder / FILE).exists():
        if (folder / "runs").exists():
            raise RecipeError(
                f"{folder} has runs but no {FILE}: it is no folder of a race; choose another --out."
            )
        return None
    there = read_race(folder)
    now = [one.recipe.digest for one in plan.contenders]
    before = [one["digest"] for one in there["contenders"]]
    for what, old, new in (
        ("the recipes", before, now),
        ("--tokens", there["tokens"], plan.tokens),
        ("--points", there["every_tokens"], plan.every_tokens),
        ("--legs", there["num_legs"], plan.num_legs),
        ("--loss", there.get("until_loss"), plan.until_loss),
    ):
        if old != new:
            shown = "" if what == "the recipes" else f" (there {old}, now {new})"
            raise RecipeError(f"{folder} holds another race: {what} differ{shown}; choose another --out.")
    if len(there["seeds"]) > len(plan.seeds):
        raise RecipeError(
            f"{folder} holds a race with {len(there['seeds'])} seeds, {len(plan.seeds)} asked for; seeds can be added, not taken away."
        )
    return there


def _same_corpus(plan: RacePlan, note: Note) -> dict[str, Any]:
    """The prepared corpus, which must be one for all."""
    found: dict[str, Any] = {}
    for one in plan.contenders:
        corpus = open_corpus(one.recipe, None, note if not found else lambda text: None)
        if found and corpus.digest != found["digest"]:
            raise DataError(
                f"A and {one.letter} cannot race: their corpora have other contents (digest {found['digest'][:12]} and "
                f"{corpus.digest[:12]}). Give both the same data."
            )
        read: Any = read_manifest if one.recipe.objective.kind == "lm" else read_document_manifest
        manifest = read(corpus.folder)
        found = {
            "digest": corpus.digest,
            "source": one.recipe.data.source,
            "training_tokens": manifest.tokens("train"),
            "held_out_tokens": manifest.tokens("validation"),
        }
    return found


def _check_machine(bench: RaceBench, earlier: RaceRecord | None) -> None:
    """Refuse a recipe that cannot run here before any leg, and a race that was begun elsewhere."""
    for one in bench.plan.contenders:
        try:
            check(one.recipe, bench.machine)
        except (RecipeError, MachineError) as error:
            raise type(error)(f"recipe {one.letter} of the race: {error}") from None
        if bench.machine.device == "cuda" and one.recipe.world > bench.machine.num_devices:
            raise MachineError(
                f"recipe {one.letter} of the race: its layout takes {one.recipe.world} ranks, each with a GPU of its own, and this machine "
                f"has {bench.machine.num_devices}; give it a layout of at most so many."
            )
    if earlier is not None and bench.machine.from_dict(earlier["machine"]) != bench.machine:
        raise MachineError(
            f"{bench.folder} holds a race that was begun on another machine, or with other versions; times of two machines cannot be "
            "compared. Choose another --out."
        )


class Race:
    """A race being run."""

    def __init__(
        self, bench: RaceBench, earlier: RaceRecord | None, corpus: dict[str, Any], watch: Watch
    ) -> None:
        self.bench, self.plan, self.corpus, self.watch = bench, bench.plan, corpus, watch
        if earlier is not None and earlier["corpus"]["digest"] != corpus["digest"]:
            raise DataError(
                f"{bench.folder} holds a race on another corpus (digest {earlier['corpus']['digest'][:12]}, now {corpus['digest'][:12]}): "
                "files or tokenizer changed. Restore them, or choose another --out."
            )
        self.started = earlier["started"] if earlier else timestamp()
        self.finished: str | None = None
        self.why_ended: str | None = None
        self.spent_s = earlier.get("spent_s", 0.0) if earlier else 0.0
        known = {(run["contender"], run["seed"]): run for run in earlier["runs"]} if earlier else {}
        self.runs = {
            (one.letter, seed): known.get((one.letter, seed)) or _new_run(one, seed)
            for one in self.plan.contenders
            for seed in self.plan.seeds
        }
        self.rounds: list[float] = []
        """How long each round of this process took."""

    def go(self) -> RaceRecord:
        folder = self.bench.folder / "recipes"
        folder.mkdir(exist_ok=True)
        for one in self.plan.contenders:
            write_atomic(folder / f"{one.letter}.toml", write_toml(one.recipe))
            for seed in self.plan.seeds:
                self._catch_up(one, seed)
        self._legs()
        if (
            self.why_ended is None
            and len({run["contender"] for run in self.runs.values() if run["status"] in ("ok", "reached")})
            < 2
        ):
            self.why_ended = "fewer than two contenders came to the end"
        self.finished = timestamp()
        return self._report(None)

    def _legs(self) -> None:
        number, began = -1, time.monotonic()
        for leg, one, seed in self.plan.order():
            if leg != number:
                if number >= 0 and self._round_made:
                    self.rounds.append(time.monotonic() - began)
                number, began, self._round_made = leg, time.monotonic(), False
                if not self._affordable():
                    self.why_ended = f"the time of {self.plan.budget_s:g} s was used up after {leg} of {self.plan.num_legs} legs"
                    return
            run, until = self.runs[one.letter, seed], self.plan.leg_ends(one)[leg]
            if run["status"] in ENDED or _last(run) >= until:
                continue
            self._report(f"{one.letter} {one.name}, seed {seed}, leg {leg + 1} of {self.plan.num_legs}")
            before = time.monotonic()
            self.bench.drive(one, seed, run, until, sum(len(run["legs"]) for run in self.runs.values()))
            self.spent_s += time.monotonic() - before
            self._round_made = True
            self._judge(one, run)
            self._report(None, _became(one, run))
            if run["status"] == "killed":
                raise MachineError(
                    f"the race stopped at {one.letter} ({one.name}), seed {seed}: {run['reason']}. What is measured is kept; run the same "
                    f"command again, with --out {self.bench.folder}."
                )

    _round_made = False

    def _affordable(self) -> bool:
        """Whether another round fits into the budget; the first one always does."""
        if self.plan.budget_s is None or not any(run["legs"] for run in self.runs.values()):
            return True
        return self.spent_s + max(self.rounds, default=0.0) <= self.plan.budget_s

    def _judge(self, one: Contender, run: RaceRun) -> None:
        """Whether a run is at its end."""
        if run["status"] != "running":
            return
        goal = self.plan.until_loss
        if goal is not None and any(point.loss <= goal for point in points_of(run)):
            run["status"] = "reached"
        elif _last(run) >= self.plan.leg_ends(one)[-1]:
            run["status"] = "ok"

    def _catch_up(self, one: Contender, seed: int) -> None:
        """Record what was trained before the last attempt was killed."""
        run, done = self.runs[one.letter, seed], self.bench.done(one, seed)
        if run["status"] in ENDED:
            return
        if done < _last(run):
            raise DataError(
                f"{self.bench.run_folder(one, seed).path} has no checkpoint of step {_last(run)}, at which its last leg ended; restore it, or "
                "choose another --out."
            )
        if done > _last(run):
            read_run(run, self.bench.run_folder(one, seed), done)
        run["status"], run["reason"] = ("running" if run["legs"] else "waiting"), None
        self._judge(one, run)

    def _report(self, doing: str | None, ended: str | None = None) -> RaceRecord:
        """Write the record and report progress."""
        record = self.record()
        write_race(self.bench.folder / FILE, record)
        order = self.plan.order()
        done = sum(
            self.runs[one.letter, seed]["status"] in ENDED
            or _last(self.runs[one.letter, seed]) >= self.plan.leg_ends(one)[leg]
            for leg, one, seed in order
        )
        legs = [leg.get("wall_s") for run in self.runs.values() for leg in run["legs"]]
        walls = [wall for wall in legs if wall is not None]
        left = sum(walls) / len(walls) * (len(order) - done) if walls else None
        self.watch(RaceProgress(record, doing, done, len(order), left, ended))
        return record

    def record(self) -> RaceRecord:
        """The record of everything measured so far."""
        plan = self.plan
        record: RaceRecord = {
            "format": FORMAT,
            "name": plan.name,
            "started": self.started,
            "finished": self.finished,
            "why_ended": self.why_ended,
            "machine": self.bench.machine.to_dict(),
            "contenders": [
                {
                    "letter": one.letter,
                    "name": one.name,
                    "recipe": write_toml(one.recipe),
                    "digest": one.recipe.digest,
                    "step_tokens": one.recipe.step_tokens,
                    "step_sizes": list(one.recipe.step_sizes),
                    "steps": plan.leg_ends(one)[-1],
                    "techniques": list(one.recipe.techniques),
                }
                for one in plan.contenders
            ],
            "seeds": list(plan.seeds),
            "tokens": plan.tokens,
            "every_tokens": plan.every_tokens,
            "num_legs": plan.num_legs,
            "until_loss": plan.until_loss,
            "budget_s": plan.budget_s,
            "spent_s": self.spent_s,
            "validate_sequences": plan.validate_sequences,
            "sequence": plan.contenders[0].recipe.batch.sequence,
            "corpus": self.corpus,
            "differences": recipe_differences([one.recipe for one in plan.contenders]),
            "runs": list(self.runs.values()),
            "depths": [],
            "findings": [],
        }
        record["depths"], record["findings"] = findings_of(record)
        return record


def recipe_differences(recipes: list[Recipe]) -> list[list[str]]:
    """Keys on which the recipes differ, each with every recipe's value."""
    keys = {key for other in recipes[1:] for key in differences(recipes[0], other)} - {"about"}
    rows = []
    for key in sorted(keys):
        values = [value_at(recipe.model_dump(), key) for recipe in recipes]
        rows.append([key, *("none" if value is None else str(value) for value in values)])
    return rows


def _new_run(one: Contender, seed: int) -> RaceRun:
    run: RaceRun = {
        "contender": one.letter,
        "seed": seed,
        "status": "waiting",
        "reason": None,
        "legs": [],
        "losses": [],
        "step_s": [],
        "validations": [],
    }
    if one.recipe.batch.schedule is not None:
        run["tokens"] = []
    return run


def _became(one: Contender, run: RaceRun) -> str:
    """The outcome of a leg, in one line."""
    said = f"{one.letter}, seed {run['seed']}: "
    if run["reason"] is not None:
        return f"{said}{run['status']}, {run['reason']}"
    points = points_of(run)
    loss = (
        f"validation loss {points[-1].loss:.4f} after {points[-1].tokens:,.0f} tokens"
        if points
        else "no validation yet"
    )
    return f"{said}{loss}" + (", which is what was asked for" if run["status"] == "reached" else "")


def _last(run: RaceRun) -> int:
    return run["legs"][-1]["last"] if run["legs"] else 0
