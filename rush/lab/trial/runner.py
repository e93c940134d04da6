"""The bench: runs trials one after another and keeps what they came to.

Every finished trial is a file, named after everything its outcome depends on: the recipe, the machine, how
it was timed, the version of this code. A ladder that was interrupted finds them and repeats nothing; one
that is started again on another machine, or with other settings, finds none and measures anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rush.errors import MachineError
from rush.files import write_json_atomic
from rush.hardware import Machine
from rush.lab.ladder.ladder_file import LadderPlan, MeasureConfig
from rush.lab.life.usable import live, quick
from rush.lab.parity.trace import parity_recipe
from rush.lab.trial.starter import COMMANDS, Starter
from rush.lab.trial.trial import Outcome, execute
from rush.recipe import Recipe
from rush.recipe_io import write_toml
from rush.records.life import LifeRecord
from rush.version import __version__

TIMING = ("windows", "window_ms", "warmup_max_steps", "warmup_max_s", "timed_max_s")


@dataclass
class Bench:
    plan: LadderPlan
    folder: Path
    starter: Starter
    machine: Machine
    ceilings: dict[str, Any] | None
    peaks: dict[str, float] | None
    extra_techniques: tuple[str, ...] = ()
    """Python files that define further techniques."""
    seconds: list[float] = field(default_factory=list)
    """How long the trials made by this bench took."""

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def known(self, recipe: Recipe, kind: str) -> Outcome | None:
        """The outcome of a trial that was made earlier."""
        path = self._path(recipe, kind)
        return Outcome.from_dict(json.loads(path.read_text())) if path.exists() else None

    def run(
        self,
        recipe: Recipe,
        kind: str,
        *,
        first: bool = False,
        timed: bool = True,
        traced: bool = True,
        twin: bool | None = None,
        limit_s: float = math.inf,
        keep_late: bool = True,
        slowest: float = 0.0,
    ) -> Outcome:
        """The outcome of a trial, made now or earlier. The `first` of a rung is also watched and, unless told otherwise, traced.

        What others are held against needs its `twin`, too: a plain recipe, if nothing else is said. `keep_late`: whether it is
        a result that a trial did not end within its limit; with more time it may. One that makes fewer tokens a second than
        `slowest` is not timed to the end; that is a result, too.
        """
        if (known := self.known(recipe, kind)) is not None:
            return known
        wanted, parity = self.parity_recipe(recipe), []
        if first and traced and self.trace(wanted) is None:
            for rounded in (False, True)[: 2 if (not recipe.techniques if twin is None else twin) else 1]:
                file = str(self.gradients(wanted, rounded).resolve())
                parity.append({"recipe": write_toml(wanted), "gradients": file, "rounded": rounded})
        spec = {
            "kind": "measure",
            "recipe": write_toml(recipe),
            "machine": self.machine.to_dict(),
            "timing": {**self.plan.measure.model_dump(include=set(TIMING)), "slowest": slowest}
            if timed
            else None,
            "profile": first,
            "parity": parity,
            "extra_techniques": list(self.extra_techniques),
        }
        path = self._path(recipe, kind)
        limit = min(self.plan.measure.limit_s, limit_s)
        outcome = execute(self.starter, spec, self.work / path.stem, limit, self._compiled(recipe))
        self.seconds.append(outcome.wall_s)
        if not (keep_late or outcome.found.get("complete")) and outcome.wall_s >= limit:
            return outcome
        for name, rounded in (("trace", False), ("twin", True)):
            if name in outcome.found:
                write_json_atomic(self._trace_path(wanted, rounded), outcome.found[name])
        path.parent.mkdir(exist_ok=True)
        write_json_atomic(path, outcome.to_dict())
        return outcome

    def life(
        self, recipe: Recipe, limit_s: float = math.inf, compiled_for: Recipe | None = None
    ) -> LifeRecord:
        """The short life of a recipe that was measured, lived now or earlier; one of which nothing is known is tried again.

        Trials may have been made of a variant with another number of micro batches: compilers find what they made for it.
        """
        path = self._life_path(recipe)
        if path.exists():
            known: LifeRecord = json.loads(path.read_text())
            return known
        short = quick(recipe)
        life = live(
            self.starter,
            short,
            self.work / path.stem,
            device=self.machine.device,
            compiled=self._compiled(compiled_for or recipe),
            techniques=self.extra_techniques,
            limit_s=min(self.plan.measure.limit_s, limit_s),
        )
        layers = [each.shape().num_layers for each in (short, recipe)]
        life["layers"] = layers if layers[0] < layers[1] else None
        if life["verdict"] != "not known":
            path.parent.mkdir(exist_ok=True)
            write_json_atomic(path, life)
        return life

    def lived(self, recipe: Recipe) -> bool:
        """Whether the life of a recipe is known."""
        return self._life_path(recipe).exists()

    def parity_recipe(self, recipe: Recipe) -> Recipe:
        settings = self.plan.parity
        return parity_recipe(recipe, self.plan.base, settings.steps, settings.changes)

    def trace(self, wanted: Recipe, rounded: bool = False) -> dict[str, Any] | None:
        """The parity trace of a parity recipe, or of its twin from rounded weights, if it was made."""
        path = self._trace_path(wanted, rounded)
        if not (path.exists() and self.gradients(wanted, rounded).exists()):
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def gradients(self, wanted: Recipe, rounded: bool = False) -> Path:
        return self.folder / "parity" / f"{self._digest(wanted)}{'-twin' if rounded else ''}.safetensors"

    def clean(self) -> None:
        """Remove what only unfinished trials and compilers need."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _trace_path(self, wanted: Recipe, rounded: bool = False) -> Path:
        return self.gradients(wanted, rounded).with_suffix(".json")

    def _path(self, recipe: Recipe, kind: str) -> Path:
        return self.folder / "trials" / f"{self._digest(recipe)}-{kind}.json"

    def _life_path(self, recipe: Recipe) -> Path:
        return self.folder / "trials" / f"{self._digest_of(quick(recipe))}-life.json"

    def _compiled(self, recipe: Recipe) -> Path:
        """What compilers made of a recipe."""
        return (self.work / f"compiled-{recipe.digest[:16]}").resolve()

    def _digest(self, recipe: Recipe) -> str:
        measure = self.plan.measure.model_dump(include={*TIMING, "limit_s"})
        return self._digest_of(recipe, measure=measure, parity=self.plan.parity.model_dump())

    def _digest_of(self, recipe: Recipe, **how: Any) -> str:
        extra = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in self.extra_techniques]
        told: dict[str, Any] = {
            "recipe": recipe.content(),
            "machine": self.machine.fingerprint(),
            "version": __version__,
            "extra": extra,
            **how,
        }
        told["recipe"].pop("about")  # words for people
        # The order in which techniques are named means nothing.
        told["recipe"]["techniques"] = sorted(map(json.dumps, told["recipe"]["techniques"]))
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def open_bench(
    plan: LadderPlan, folder: Path, extra_techniques: Sequence[Path] = (), *, every_dtype: bool = False
) -> Iterator[Bench]:
    """Learn what the machine is and how fast, in a process of its own: the ladder never touches the device. A CPU multiplies
    some dtypes hundreds of times slower than others: `every_dtype` says to ask for all, to know before a trial."""
    spec = {"kind": "prepare", "device": plan.base.run.device, "every_dtype": every_dtype}
    # Lives end as a user's runs do, but for taking the interpreter apart, which would take longer than all their steps.
    starter = Starter(COMMANDS, dismantle=False)
    try:
        outcome = execute(starter, spec, folder / "work" / "prepare", MeasureConfig().limit_s)
        if outcome.status != "ok":
            raise MachineError(f"the machine could not be probed: {outcome.reason}")
        found = outcome.found
        machine = Machine.from_dict(found["machine"])
        extra = tuple(str(path.resolve()) for path in extra_techniques)
        yield Bench(plan, folder, starter, machine, found["ceilings"], found["peaks"], extra)
    finally:
        starter.close()
