"""A run folder as a page shows it: curves, samples, status, warnings.

A folder may be unfinished, damaged or untrusted: unreadable parts are omitted, with a note.
"""

from __future__ import annotations

import os
import shlex
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.errors import DataError, RushError
from rush.files import open_file, parse_json, read_file
from rush.ready import RECIPES
from rush.records.run_folder import RunFolder
from rush.records.run_series import RunSeries, read_series
from rush.records.run_status import Status, holder_is_alive, kind_of, status_of
from rush.report import formatting
from rush.report.lenient import Json, shown, table, text, whole

MOST_CURVE = 400
"""Points of a curve on a page: about as many as it is wide."""
MOST_SAMPLES = 60
MOST_NOTES = 200
LONGEST_SAMPLE = 20_000
SLOW_DATA = 0.1
"""Share of the time from which waiting for data is worth a note."""


@dataclass(frozen=True)
class SampleView:
    step: int
    prompt: str
    text: str | None
    why: str | None


@dataclass(frozen=True)
class RunView:
    """Everything a page needs of a run."""

    folder: Path
    recipe: Mapping[str, Json]
    recipe_text: str
    machine: Mapping[str, Json]
    series: RunSeries
    samples: tuple[SampleView, ...]
    num_samples: int
    notes: tuple[tuple[int, str], ...]
    """Notes of the run, each with its step."""
    status: Status
    failure: Mapping[str, Json]

    @property
    def name(self) -> str:
        return text(self.folder.resolve().name) or "run"

    @property
    def model(self) -> str:
        return text(table(self.recipe.get("model")).get("name")) or "a model"

    @property
    def objective(self) -> str:
        return text(table(self.recipe.get("objective")).get("kind")) or "lm"

    @property
    def steps(self) -> int | None:
        return whole(table(self.recipe.get("schedule")).get("steps"))

    @property
    def techniques(self) -> list[str]:
        found = self.recipe.get("techniques")
        rows = found if isinstance(found, list) else []
        return [shown(row.get("name") if isinstance(row, dict) else row) for row in rows]

    @property
    def val_loss(self) -> float | None:
        return self.series.validations[-1].loss if self.series.validations else None


def read_run(folder: Path, most: int = MOST_CURVE) -> RunView:
    """The run in a folder; a DataError where there is none, or none with a recorded step."""
    if kind_of(folder) != "run":
        raise DataError(f"there is no run in {folder}; give a folder that `rush train` wrote.")
    run = RunFolder(folder)
    series = read_series(run.metrics, most)
    if not series.num_rows:
        raise DataError(f"no step is recorded in {run.metrics} yet; there is nothing to draw.")
    recipe_text = _text(run.recipe)
    recipe = read_toml(recipe_text)
    samples = list(read_samples(run.samples))
    failure = table(_json(run.last_failure))
    steps = whole(table(recipe.get("schedule")).get("steps"))
    return RunView(
        folder,
        recipe,
        text(recipe_text) or "",
        table(_json(run.machine)),
        series,
        tuple(samples[-MOST_SAMPLES:]),
        len(samples),
        tuple(read_notes(run.notes))[-MOST_NOTES:],
        run_status(run, series, steps),
        failure,
    )


def run_status(run: RunFolder, series: RunSeries, steps: int | None) -> Status:
    """The current status of the run."""
    written, failed = _changed(run.metrics), _changed(run.last_failure)
    return status_of(
        done=steps is not None and series.step >= steps,
        alive=holder_is_alive(run.path),
        quiet_s=time.time() - written,
        step_s=series.seconds / max(1, series.num_rows),
        failed=failed > 0 and failed >= written,
    )


def _changed(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _text(path: Path) -> str:
    try:
        return read_file(path).decode(errors="replace")[: 1 << 20]
    except OSError:
        return ""


def read_toml(content: str) -> Mapping[str, Any]:
    """A recipe's tree; an empty one where the text is no TOML."""
    try:
        return tomllib.loads(content)
    except (ValueError, RecursionError):
        return {}


def _json(path: Path) -> Json:
    try:
        return parse_json(read_file(path))
    except (OSError, ValueError):
        return None


def read_samples(path: Path) -> Iterator[SampleView]:
    """The samples of a run, in order; lines that are none are left out."""
    try:
        with open_file(path) as file:
            for line in file:
                if line.endswith(b"\n") and (sample := sample_of(line)) is not None:
                    yield sample
    except OSError:
        return


def sample_of(line: bytes) -> SampleView | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    step = whole(row.get("step")) if isinstance(row, dict) else None
    if step is None:
        return None
    drawn = text(row.get("text"))
    return SampleView(
        step,
        (text(row.get("prompt")) or "")[:LONGEST_SAMPLE],
        drawn if drawn is None else drawn[:LONGEST_SAMPLE],
        text(row.get("why")),
    )


def read_notes(path: Path) -> Iterator[tuple[int, str]]:
    """The notes of a run, in order; lines that are none are left out."""
    try:
        content = read_file(path)
    except OSError:
        return
    for line in content.splitlines():
        try:
            row = parse_json(line)
        except ValueError:
            continue
        said = text(row.get("note")) if isinstance(row, dict) else None
        if said:
            yield whole(row.get("step")) or 0, said[:LONGEST_SAMPLE]


def headline(run: RunView) -> str:
    """What ran, where it ended, and its loss."""
    series = run.series
    of = f" of {formatting.count(run.steps)}" if run.steps else ""
    end = {
        "finished": "finished at step",
        "interrupted": "stopped at step",
        "failed": "failed after step",
        "running": "is running, at step",
        "stale": "has written nothing for a while, at step",
    }[run.status]
    losses = []
    if run.val_loss is not None:
        losses.append(f"validation loss {run.val_loss:.4f}")
    if (final := series.final_loss()) is not None:
        losses.append(f"training loss {final[0]:.4f}")
    return (
        f"{run.model} {end} {formatting.count(series.step)}{of}: {', '.join(losses) or 'no loss recorded'}."
    )


def warnings(run: RunView) -> list[str]:
    """Warnings about the curves."""
    series, notes = run.series, []
    if run.status == "interrupted":
        notes.append(
            "The run stopped before its last step. Resume it, in the folder that holds this one: "
            f"rush train --out {shlex.quote(run.name)} --resume"
        )
    if run.status == "failed":
        notes.append(_failed(run))
    if run.status == "stale":
        notes.append("The run's process is there or unknown, and nothing was written for a while.")
    if series.num_not_finite:
        notes.append(
            f"{formatting.plural(series.num_not_finite, 'step')} had a non-finite loss or gradient norm, the first at step "
            f"{series.first_not_finite}."
        )
    if series.num_skipped:
        notes.append(
            f"{formatting.plural(series.num_skipped, 'update')} skipped: the scaled gradients overflowed."
        )
    if series.num_broken:
        notes.append(f"{formatting.plural(series.num_broken, 'line')} of metrics.jsonl could not be read.")
    if series.seconds > 0 and series.data_seconds > SLOW_DATA * series.seconds:
        share = formatting.share(series.data_seconds / series.seconds)
        notes.append(f"Steps waited for data {share} of the time.")
    if (rise := _validation_rise(run)) is not None:
        notes.append(rise)
    cut = sum(sample.why is not None for sample in run.samples)
    if cut:
        notes.append(f"{formatting.plural(cut, 'sample')} cut or left out; the reason stands beside it.")
    return notes


def _failed(run: RunView) -> str:
    """One sentence about the failure, from `failure.json`."""
    error, step = text(run.failure.get("error")), whole(run.failure.get("step"))
    at = f" at step {formatting.count(step)}" if step is not None else ""
    if error == "Diverged":
        return (
            f"The run diverged{at}: its loss or gradient norm was not finite, and the weights were not updated. Lower "
            "optimizer.lr, lengthen schedule.warmup, or look at the samples that the message named."
        )
    if error == "Drifted":
        return f"The run ended{at}: its replicas held different weights. Look for a faulty device, and resume it."
    phase = text(run.failure.get("phase")) or "a step"
    where = phase + (f" {step}" if phase == "step" else f", step {step}") * (step is not None)
    found = run.failure.get("techniques")
    names = [word for one in (found if isinstance(found, list) else ()) if (word := text(one))]
    blamed = f"; on the stack: {', '.join(names)}" if names else ""
    log = RunFolder(run.folder).failures
    traceback = f"; {log.name} in its folder has the traceback" if os.path.isfile(log) else ""
    return f"The run failed ({where}{blamed}){traceback}."


def _validation_rise(run: RunView) -> str | None:
    found = run.series.validations
    best = min(found, key=lambda one: one.loss, default=None)
    if best is None or found[-1].loss <= best.loss * 1.02:
        return None
    return (
        f"The validation loss was best at step {best.step} ({best.loss:.4f}) and rose to {found[-1].loss:.4f}: the model may be "
        "overfitting."
    )


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A recipe by dotted keys, values as text."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = shown(value)
    return found


def ready_recipe(recipe: Mapping[str, Json]) -> str | None:
    """The ready recipe that a run's recipe came from: the one with the same `about`, which overrides leave as it is."""
    about = text(recipe.get("about"))
    if not about:
        return None
    for name in RECIPES.names():
        try:
            if RECIPES.read(RECIPES.find(name)).get("about") == about:
                return name
        except RushError:
            continue
    return None


def recipe_changes(
    recipe: Mapping[str, Json], ready: Mapping[str, Json] | None = None
) -> list[tuple[str, str, str]]:
    """Key, value in the ready recipe, value in the run, where they differ.

    `ready` is the ready recipe with its defaults written out. Without it only the keys that its file names are compared.
    """
    name = ready_recipe(recipe)
    if name is None:
        return []
    before = flat(RECIPES.read(RECIPES.find(name)) if ready is None else ready)
    after = flat(recipe)
    keys = before.keys() if ready is None else sorted(before.keys() | after.keys())
    rows = [(key, before.get(key, formatting.MISSING), after.get(key, formatting.MISSING)) for key in keys]
    return [row for row in rows if not same(row[1], row[2])]


def same(one: str, other: str) -> bool:
    """Whether two values of a recipe are the same: 2e-3 is 0.002."""
    if one == other:
        return True
    try:
        return float(one) == float(other)
    except ValueError:
        return False
