"""The legs of a race: each a real `rush train`, forked from a process that has only imported, resumed from the last leg's
checkpoint.

The measurements are in the run folders, written by training: a leg is done when there is a checkpoint at its last step. A
killed leg left no checkpoint; its rows are truncated when it runs again. If a race was killed between the end of a leg and its
entry in `race.json`, it finds the checkpoint and adds the entry: no step is measured twice, and none is lost.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.errors import Diverged, MachineError, RankLost
from rush.files import shareable, timestamp, write_atomic
from rush.hardware import Machine
from rush.hardware.conditions import load_per_core
from rush.lab.life.checks import last_error
from rush.lab.life.life import rank_environments
from rush.lab.race.contenders import Contender
from rush.lab.race.race_plan import RacePlan
from rush.lab.trial.starter import COMMANDS, Starter, Streams
from rush.lab.trial.trial import compiler_caches, execute
from rush.recipe_io import write_toml
from rush.records.metrics import MetricsRow, read_rows
from rush.records.race import RaceLeg, RaceRun
from rush.records.run_folder import RunFolder

LIMIT_S = 14 * 86400.0
"""Time limit of a leg; the run's own timeouts find hangs."""
PROBE_S = 900.0


@dataclass
class RaceBench:
    """A folder with a run for every contender and seed."""

    plan: RacePlan
    folder: Path
    starter: Starter
    machine: Machine

    def run_folder(self, one: Contender, seed: int) -> RunFolder:
        return RunFolder(self.folder / "runs" / f"{one.letter}-{seed}")

    def done(self, one: Contender, seed: int) -> int:
        """The step of the last checkpoint of a run."""
        steps = self.run_folder(one, seed).checkpoints.steps()
        return steps[-1] if steps else 0

    def drive(self, one: Contender, seed: int, run: RaceRun, until: int, place: int) -> None:
        """Train a run to the step `until`, and record the outcome."""
        files, work = self.run_folder(one, seed), self.folder / "work"
        recipe = self.plan.raced(one, seed)
        path = work / "recipes" / f"{one.letter}-{seed}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, write_toml(recipe))
        streams = Streams(*(work / name for name in ("stdin", "stdout", "stderr")))
        streams.stdin.write_text("")
        words = ["train", str(path), "--out", str(files.path), "--resume", "--until", str(until), "--json"]
        words += [word for file in self.plan.techniques for word in ("--technique", file)]
        compiled = compiler_caches((work / f"compiled-{one.letter}").resolve())
        surroundings = [{**compiled, **ranks} for ranks in rank_environments(recipe.world)]
        started, began = timestamp(), time.monotonic()
        codes = self.starter.rush(words, streams, surroundings, LIMIT_S)
        wall_s, load = time.monotonic() - began, load_per_core(self.machine)
        if self.done(one, seed) >= until:
            note = RaceLeg(first=0, last=0, place=place, started=started, wall_s=wall_s, load=load)
            read_run(run, files, until, note)
            return
        run["status"], run["reason"] = _ending(codes, _stderr(streams))


def read_run(run: RaceRun, files: RunFolder, until: int, note: Mapping[str, Any] | None = None) -> None:
    """Bring the record of a run up to the checkpoint at step `until`, as one more leg."""
    done = run["legs"][-1]["last"] if run["legs"] else 0
    rows = [row for row in read_rows(files.metrics, MetricsRow) if done < row["step"] <= until]
    if [row["step"] for row in rows] != list(range(done + 1, until + 1)):
        raise MachineError(
            f"{files.metrics} does not hold the steps {done + 1} to {until} that its checkpoint was saved after; "
            "race again, with another --out."
        )
    for row in rows:
        loss = row.get("loss")
        run["losses"].append(_rounded(loss) if loss is not None and math.isfinite(loss) else None)
        run["step_s"].append(_rounded(row["step_s"]))
        if "tokens" in run:
            run["tokens"].append(row["tokens"] - sum(run["tokens"]))
        if (held_out := row.get("val_loss")) is not None and math.isfinite(held_out):
            run["validations"].append({"step": row["step"], "tokens": row["tokens"], "loss": held_out})
    unknown = RaceLeg(first=0, last=0, place=None, started=None, wall_s=None, load=None)
    leg: RaceLeg = {**(unknown if note is None else note), "first": done + 1, "last": until}  # type: ignore[typeddict-item]
    run["legs"].append(leg)
    run["status"], run["reason"] = "running", None


def _rounded(value: float) -> float:
    """Round to six significant digits, the precision of a loss or a time."""
    return float(f"{value:.6g}")


def _ending(codes: list[int] | None, stderr: str) -> tuple[str, str]:
    """The status of a run whose leg did not reach its end, and the reason."""
    if codes is None:
        return "killed", "its leg was not done after two weeks"
    line, message = last_error(stderr)
    said = shareable(message or line)
    if Diverged.exit_code in codes:
        return "diverged", said
    if all(
        code < 0 or code in (130, RankLost.exit_code) for code in codes if code
    ):  # other ranks miss a killed one
        names = {-code: signal.Signals(-code).name for code in codes if code < 0}
        return "killed", f"its process was killed from outside ({', '.join(names.values()) or 'interrupted'})"
    return "failed", said


def _stderr(streams: Streams) -> str:
    files = sorted(streams.stderr.parent.glob(f"{streams.stderr.name}*"))
    return "".join(file.read_text(errors="replace") for file in files)


@contextmanager
def open_race_bench(plan: RacePlan, folder: Path) -> Iterator[RaceBench]:
    """Probe the machine in a separate process: the race itself never touches the device."""
    starter = Starter(COMMANDS, dismantle=False)
    try:
        spec = {"kind": "look", "device": plan.contenders[0].recipe.run.device}
        outcome = execute(starter, spec, folder / "work" / "look", PROBE_S)
        if outcome.status != "ok":
            raise MachineError(f"the machine could not be probed: {outcome.reason}")
        yield RaceBench(plan, folder, starter, Machine.from_dict(outcome.found["machine"]))
    finally:
        starter.close()


def clean(folder: Path) -> None:
    """Remove the compiler's caches and streams of a finished race; the runs with their checkpoints stay."""
    shutil.rmtree(folder / "work", ignore_errors=True)
    for path in (folder / "runs").glob("*"):
        if not os.listdir(path):
            path.rmdir()
