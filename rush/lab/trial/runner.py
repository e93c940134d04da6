"""The bench: runs trials one after another and stores their outcomes.

Every finished trial is a file, named after everything its outcome depends on: the recipe, the machine, how it was timed, the
version of this code. An interrupted ladder repeats none of them; on another machine, or with other settings, all are new.
`TrialFolder` is shared with the bench for several ranks (`rush/lab/scaling/rank_runner.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rush.errors import MachineError
from rush.files import write_json_atomic
from rush.hardware import Machine
from rush.lab.ladder.ladder_file import LadderPlan, MeasureConfig
from rush.lab.life.usable import live, quick
from rush.lab.parity.trace import parity_recipe, without_speed
from rush.lab.trial.found import TraceFound, TrialFound
from rush.lab.trial.starter import COMMANDS, Starter
from rush.lab.trial.trial import Outcome, execute
from rush.recipe import Recipe
from rush.recipe_io import write_toml
from rush.records.life import LifeRecord
from rush.techniques.api.own_files import package_digests
from rush.version import __version__

CURVE, CURVE_S = "curve", 10.0
"""The reference on the batches of a timing, and the seconds it may take (and its perturbed run as many)."""
TIMING = ("windows", "window_ms", "warmup_max_steps", "warmup_max_s", "timed_max_s")


class TrialFolder:
    """A folder with a file for each finished trial."""

    folder: Path
    starter: Starter
    seconds: list[float]
    """Durations of the trials that this process ran."""

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def stored(self, path: Path) -> Outcome | None:
        """The outcome of a trial that finished earlier."""
        return Outcome.from_dict(json.loads(path.read_text())) if path.exists() else None

    def trial_path(self, inputs: Any, kind: str) -> Path:
        """The file of a trial, named after everything its outcome depends on."""
        return self.folder / "trials" / f"{digest_of(inputs)}-{kind}.json"

    def compiled(self, recipe: Recipe) -> Path:
        """The compiler's cache of a recipe."""
        return (self.work / f"compiled-{recipe.digest[:16]}").resolve()

    def execute(
        self,
        spec: Mapping[str, Any],
        path: Path,
        limit_s: float,
        recipe: Recipe | None = None,
        environment: Mapping[str, str] | None = None,
        keep: Callable[[Outcome], bool] = lambda outcome: True,
    ) -> Outcome:
        """Run a trial now, with the compiler's cache of `recipe`, and store its outcome."""
        compiled = self.compiled(recipe) if recipe is not None else None
        outcome = execute(self.starter, spec, self.work / path.stem, limit_s, compiled, environment)
        self.seconds.append(outcome.wall_s)
        if keep(outcome):
            path.parent.mkdir(exist_ok=True)
            write_json_atomic(path, outcome.to_dict())
        return outcome

    def clean(self) -> None:
        """Remove the files of unfinished trials and compilers."""
        shutil.rmtree(self.work, ignore_errors=True)


def _asks_for_more(found: TrialFound, steps: int, time_s: float) -> bool:
    """Whether a longer curve is wanted, and was not cut short by its time."""
    curve = found.get("curve")
    made = len(curve["losses"]) if curve else 0
    return (
        curve is not None and made < steps and found.get("seconds", {}).get(f"parity {CURVE}", 0.0) < time_s
    )


def digest_of(inputs: Any) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def canonical(tree: dict[str, Any]) -> dict[str, Any]:
    """A recipe's tree without the order of its techniques, which has no effect."""
    return {**tree, "techniques": sorted(map(json.dumps, tree["techniques"]))}


def file_digests(paths: Iterable[str]) -> list[str]:
    return [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths]


@dataclass
class Bench(TrialFolder):
    plan: LadderPlan
    folder: Path
    starter: Starter
    machine: Machine
    ceilings: dict[str, Any] | None
    peaks: dict[str, float] | None
    extra_techniques: tuple[str, ...] = ()
    """Python files that define more techniques."""
    seconds: list[float] = field(default_factory=list)
    curve_s: float = CURVE_S
    curve_steps: int | None = None
    """Steps that a curve has at least, however long they take; None: as many as a parity trace."""

    def known(self, recipe: Recipe, kind: str) -> Outcome | None:
        return self.stored(self._path(recipe, kind))

    def run(
        self,
        recipe: Recipe,
        kind: str,
        *,
        first: bool = False,
        timed: bool = True,
        traced: bool = True,
        perturbed: bool | None = None,
        limit_s: float = math.inf,
        keep_late: bool = True,
        slowest: float = 0.0,
    ) -> Outcome:
        """The outcome of a trial, run now or earlier. The `first` of a rung is also profiled and, if `traced`, traced for parity.

        A reference (by default a plain recipe) also needs its `perturbed` run. `keep_late`: whether running into the
        limit is a result. A trial with fewer tokens per second than `slowest` is ended early, which is a result.
        """
        if (known := self.known(recipe, kind)) is not None:
            return known
        wanted, parity = self.parity_recipe(recipe), []
        if first and traced and self.trace(wanted) is None:
            for rounded in (False, True)[
                : 2 if (not recipe.techniques if perturbed is None else perturbed) else 1
            ]:
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
            "audit": write_toml(without_speed(recipe)) if self._audits(first) else None,
            "extra_techniques": list(self.extra_techniques),
        }
        limit = min(self.plan.measure.limit_s, limit_s)

        def keep(outcome: Outcome) -> bool:
            done = keep_late or bool(outcome.found.get("complete")) or outcome.wall_s < limit
            traces = (outcome.found.get("trace"), outcome.found.get("twin"))
            for trace, rounded in zip(traces, (False, True), strict=True):
                if done and trace is not None:
                    write_json_atomic(self._trace_path(wanted, rounded), trace)
            return done

        return self.execute(spec, self._path(recipe, kind), limit, recipe, keep=keep)

    def life(
        self, recipe: Recipe, limit_s: float = math.inf, compiled_for: Recipe | None = None
    ) -> LifeRecord:
        """The short life of a measured recipe, now or earlier; one with an unknown verdict is repeated.

        `compiled_for`: the variant with another number of micro batches whose compiler cache is used.
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
            compiled=self.compiled(compiled_for or recipe),
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
        """Whether the life of a recipe is recorded."""
        return self._life_path(recipe).exists()

    @property
    def _plain_fits(self) -> bool:
        """Whether plain fp32 may be run at its full size. On a CPU, where too little memory ends the process, not where the ladder
        says that it is too large."""
        too_large = any(key.startswith(("model.", "batch.sequence")) for key in self.plan.parity.changes)
        return not (too_large and self.machine.device == "cpu")

    def _audits(self, first: bool) -> bool:
        """Whether plain fp32 is run after the timing: in the first process of a rung."""
        return first and self._plain_fits

    def curve(self, plain: Recipe, steps: int, limit_s: float = math.inf) -> Outcome | None:
        """The reference's steps on the batches of a timing (`curve` of what it found), and those of its perturbed run
        (`curve_twin`): as many as the timing had, if the time allows. None, or neither found, where plain fp32 cannot run here."""
        if not self._plain_fits:
            return None
        path = self.folder / "parity" / f"{self._digest(plain)}-{CURVE}.json"
        known = self.stored(path)
        if known is None or _asks_for_more(known.found, steps, self.curve_s):
            # Room for a rung that is faster, and so makes more steps.
            wanted = math.ceil(1.5 * steps)
            least = self.plan.parity.steps if self.curve_steps is None else self.curve_steps
            how = {"steps": wanted, "as_timed": True, "at_least": least, "budget_s": self.curve_s}
            file = str((self.work / f"{path.stem}.safetensors").resolve())
            spec = {
                "kind": "measure",
                "recipe": write_toml(plain),
                "machine": self.machine.to_dict(),
                "timing": None,
                "profile": False,
                "parity": [
                    {"as": name, "recipe": write_toml(plain), "gradients": file, "rounded": rounded, **how}
                    for name, rounded in ((CURVE, False), (f"{CURVE}_twin", True))
                ],
                "extra_techniques": list(self.extra_techniques),
            }
            limit = min(self.plan.measure.limit_s, limit_s)

            def keep(outcome: Outcome) -> bool:
                return limit_s == math.inf or outcome.status == "ok" or outcome.wall_s < limit

            known = self.execute(spec, path, limit, plain, keep=keep)
        return known

    def parity_recipe(self, recipe: Recipe) -> Recipe:
        settings = self.plan.parity
        return parity_recipe(recipe, self.plan.base, settings.steps, settings.changes)

    def trace(self, wanted: Recipe, rounded: bool = False) -> TraceFound | None:
        """The parity trace of a parity recipe, or of its perturbed run from `rounded` weights, if there is one."""
        path = self._trace_path(wanted, rounded)
        if not (path.exists() and self.gradients(wanted, rounded).exists()):
            return None
        found: TraceFound = json.loads(path.read_text())
        return found

    def gradients(self, wanted: Recipe, rounded: bool = False) -> Path:
        return self.folder / "parity" / f"{self._digest(wanted)}{'-twin' if rounded else ''}.safetensors"

    def gradients_fp32(self, wanted: Recipe) -> Path:
        """Those of a step without the techniques that round."""
        file = self.gradients(wanted)
        return file.with_name(f"{file.stem}-fp32{file.suffix}")

    def _trace_path(self, wanted: Recipe, rounded: bool = False) -> Path:
        return self.gradients(wanted, rounded).with_suffix(".json")

    def _path(self, recipe: Recipe, kind: str) -> Path:
        return self.folder / "trials" / f"{self._digest(recipe)}-{kind}.json"

    def _life_path(self, recipe: Recipe) -> Path:
        return self.folder / "trials" / f"{self._digest_of(quick(recipe))}-life.json"

    def _digest(self, recipe: Recipe) -> str:
        measure = self.plan.measure.model_dump(include={*TIMING, "limit_s"})
        return self._digest_of(recipe, measure=measure, parity=self.plan.parity.model_dump())

    def _digest_of(self, recipe: Recipe, **how: Any) -> str:
        content = recipe.content()
        content.pop("about")
        inputs = {
            "recipe": canonical(content),
            "machine": self.machine.fingerprint(),
            "version": __version__,
            "extra": [*file_digests(self.extra_techniques), *package_digests(recipe)],
            **how,
        }
        return digest_of(inputs)


@contextmanager
def open_bench(
    plan: LadderPlan, folder: Path, extra_techniques: Sequence[Path] = (), *, every_dtype: bool = False
) -> Iterator[Bench]:
    """Probe the machine and measure its rates in a separate process: the ladder never touches the device. `every_dtype`: on a CPU
    measure all dtypes, some of which are hundreds of times slower than others."""
    spec = {"kind": "prepare", "device": plan.base.run.device, "every_dtype": every_dtype}
    # Lives exit as a user's runs do, without interpreter finalization, which takes longer than their steps.
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
