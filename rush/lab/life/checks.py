"""The checks after each part of a life: metrics, checkpoints, standard error, and tolerances.

A run validates through its techniques, `rush evaluate` through the plain model: they agree up to the rounding of the run's
matmuls, a mean over many labels to a quarter of it. Results of the same code are equal bit for bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from rush.recipe import Recipe
from rush.records.checkpoint_manifest import CheckpointDamaged
from rush.records.checkpoint_store import verify
from rush.records.metrics import MetricsRow, SampleRow, SaveRow, StepRow, read_rows
from rush.records.run_folder import RunFolder
from rush.techniques.api.rounding import rounding

T = TypeVar("T", bound=StepRow)
LOSSES: tuple[Literal["loss"], Literal["val_loss"]] = ("loss", "val_loss")
GRAD_NORM: Literal["grad_norm"] = "grad_norm"
CLOCK = {"tokens_per_s", "trained_per_s", "step_s", "data_s", "memory_bytes", "mfu", "ceiling_fraction"}
"""Metrics that differ between two identical runs."""
COMPLAINTS = re.compile(
    r"^.*(?:Warning\b|WARNING|Traceback|Exception ignored|^\[?[WEF]\d{3,4} |Fatal|core dumped).*$",
    re.MULTILINE,
)
"""Unexplained output: Python warnings, torch's loggers in Python and C++, tracebacks and aborts."""


class Broken(Exception):
    """A failed check, with the exit code and the message of the command that failed, the phase of the run it is about, and whether
    the command was killed because it ran past its time limit."""

    def __init__(
        self,
        problem: str,
        code: int | None = None,
        phase: str | None = None,
        *,
        late: bool = False,
        message: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.code, self.phase, self.late, self.message = code, phase, late, message


def check_whole(run: RunFolder, recipe: Recipe) -> None:
    """No row missing, duplicate or non-finite; every validation, sample and checkpoint in its place; no partial files."""
    rows, total = rows_of(run.metrics, MetricsRow), recipe.steps
    if [row["step"] for row in rows] != list(range(1, total + 1)):
        raise Broken(f"metrics.jsonl has the steps {[row['step'] for row in rows]} of {total}")
    for name in (*LOSSES, GRAD_NORM):
        for row in rows:
            value = row.get(name, 0.0)
            if not (row.get("skipped") and name == GRAD_NORM) and (value is None or not math.isfinite(value)):
                raise Broken(f"{name} is {value} at step {row['step']}")
    settings, samples = recipe.run, rows_of(run.samples, SampleRow)
    for what, phase, every, found in (
        ("validations", "validation", settings.validate_every, [r["step"] for r in rows if "val_loss" in r]),
        ("samples", "sample", settings.sample_every, [row["step"] for row in samples]),
        ("checkpoints", "save", settings.save_every, run.checkpoints.steps()),
    ):
        due = [step for step in range(1, total + 1) if step == total or (every and step % every == 0)]
        if found != due:
            raise Broken(f"{what} after the steps {found}, due after {due}", phase=phase)
    saves = [
        row["step"] for row in read_rows(run.saves, SaveRow)
    ]  # a kill may come between a checkpoint and its row
    if saves[-1:] != [total] or saves != sorted({*saves} & {*run.checkpoints.steps()}):
        raise Broken(
            f"saves.jsonl has the steps {saves}, and there are checkpoints of {run.checkpoints.steps()}"
        )
    if silent := [row["step"] for row in samples if not row["text"]]:
        raise Broken(f"the sample after step {silent[0]} is empty")
    if litter := [path.name for path in run.checkpoints.folder.iterdir() if path.name.startswith(".")]:
        raise Broken(f"left among the checkpoints: {', '.join(sorted(litter))}")
    for step in run.checkpoints.steps():
        check_sealed(run, step)


def check_sealed(run: RunFolder, step: int) -> None:
    try:
        verify(run.checkpoints.path(step))
    except CheckpointDamaged as error:
        raise Broken(str(error)) from None


def check_repeated(before: Iterable[MetricsRow], rows: list[MetricsRow], *, to_the_bit: bool) -> None:
    """The resumed run writes the rows of the killed run again."""
    for old in before:
        new = rows[old["step"] - 1]
        if to_the_bit and old != new:
            raise Broken(f"before the kill: {dict(old)}; after the resume: {new}")
        if unlike := [key for key in ("lr", "tokens", "labels") if old.get(key) != new.get(key)]:
            raise Broken(
                f"{unlike[0]} of step {old['step']} was {old.get(unlike[0])}, after the resume {new.get(unlike[0])}"
            )
        # Where reductions are not deterministic, a resumed run is close, not equal.
        if not close(new["loss"], old["loss"], 2**-6):
            raise Broken(f"the loss of step {old['step']} was {old['loss']}, after the resume {new['loss']}")


def check_same_runs(one: RunFolder, other: RunFolder) -> None:
    """Two runs of one recipe are equal bit for bit: metrics, samples, and the files of every checkpoint."""
    for name in ("metrics", "samples"):
        found, expected = (rows_of(getattr(folder, name), StepRow) for folder in (one, other))
        for mine, theirs in zip(found, expected, strict=True):
            if mine != theirs:
                raise Broken(f"{name} of the resumed run: {mine}; of the undisturbed one: {theirs}")
    files, others = _checkpoint_files(one), _checkpoint_files(other)
    if files.keys() != others.keys():
        raise Broken(f"checkpoints of the resumed run: {sorted(files)}; of the other: {sorted(others)}")
    if unequal := [name for name, path in files.items() if path.read_bytes() != others[name].read_bytes()]:
        raise Broken(f"after a resume these files differ: {', '.join(sorted(unequal))}")


def check_validation(judged: Mapping[str, Any], last: Mapping[str, Any], recipe: Recipe) -> None:
    """`rush evaluate` agrees with the run's last validation."""
    pairs = [("val_loss", judged["held_out"]["loss"])]
    if recipe.objective.kind == "dpo":  # its loss is about preferences, evaluation's about the chosen answers
        pairs = [(f"val_{name}", judged["wins"][name]) for name in ("logp_chosen", "logp_rejected")]
    for name, found in pairs:
        if not close(found, last[name], rounding(recipe) / 4):
            raise Broken(
                f"rush evaluate finds {found} where the run's last validation has {name} = {last[name]}"
            )


def check_stderr(text: str) -> None:
    """No unexplained warnings."""
    if found := COMPLAINTS.search(text):
        raise Broken(f"an unexplained warning: {found.group(0).strip()[:300]}")


def close(one: float, other: float, relative: float) -> bool:
    return math.isfinite(one) and abs(one - other) <= relative * abs(other)


def rows_of(path: Path, kind: type[T]) -> list[T]:
    """The rows without the metrics of speed and memory."""
    rows = list(read_rows(path, kind))
    for key in CLOCK:
        for row in rows:
            cast(dict[str, Any], row).pop(key, None)
    return rows


def _checkpoint_files(run: RunFolder) -> dict[str, Path]:
    return {str(path.relative_to(run.path)): path for path in run.checkpoints.folder.glob("step-*/*")}


def last_error(text: str) -> tuple[str, str | None]:
    """The last line with an error, since advice may follow; else the last line. If rush itself wrote it, also its message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(?:error|[\w.]+(?:Error|Exception|Interrupt)):", line)]
    line = (errors or lines or ["no output"])[-1][:1000]
    own, _, message = line.partition("error: ")
    return line, None if own else message
