"""The curves of runs as panels, over steps, tokens or time: one run with its raw values, or several on top of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rush.records.run_series import Bucket, RunSeries, Validated, smoothed
from rush.report.panels import Curve, Curves, Dot, Unit

Place = Bucket | Validated
MOST_MARKS = 60


@dataclass(frozen=True)
class Axis:
    """What the x axis of every panel of a page counts."""

    name: str
    title: str
    place: Callable[[Place], float]


@dataclass(frozen=True)
class Figure:
    """A figure of the metrics; its axis begins at zero."""

    key: str
    title: str
    y_title: str
    unit: Unit


FIGURES = (
    Figure("tokens_per_s", "Speed", "tokens per second", ""),
    Figure("trained_per_s", "Trained tokens", "trained tokens per second", ""),
    Figure("mfu", "MFU", "of the datasheet peak", "%"),
    Figure("ceiling_fraction", "Of the measured ceiling", "of the measured matmul rate", "%"),
    Figure("memory_bytes", "Memory", "in use after a step", "B"),
    Figure("lr", "Learning rate", "learning rate", ""),
    Figure("grad_norm", "Gradient norm", "global gradient norm", ""),
    Figure("accuracy", "Preference accuracy", "pairs in which the chosen answer wins", "%"),
    Figure("padding", "Padding", "of the tokens", "%"),
    Figure("epoch", "Passes over the data", "passes", ""),
)


def axes(runs: Sequence[RunSeries]) -> list[Axis]:
    """Steps, tokens, and time in the unit that suits the longest run."""
    longest = max((run.seconds for run in runs), default=0.0)
    size, unit = next(
        (one for one in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")) if longest >= 2 * one[0]),
        (1.0, "seconds"),
    )
    return [
        Axis("steps", "step", lambda one: float(one.step)),
        Axis("tokens", "tokens", lambda one: one.tokens),
        Axis("time", f"{unit} of training", lambda one: one.seconds / size),
    ]


def loss_panel(run: RunSeries, axis: Axis) -> Curves | None:
    """Raw loss faint, smoothed over it, validations as marks."""
    raw = raw_dots(run, "loss", axis)
    lines = []
    if raw:
        lines.append(Curve("training, every step", raw, 1, "faint"))
        lines.append(Curve("training, smoothed", smooth_dots(run, axis), 1, "line"))
    if run.validations:
        lines.append(validation_curve("validation", 2, run, axis))
    return _panel("Loss", axis, "loss", "", lines, from_zero=False) if lines else None


def figure_panel(run: RunSeries, figure: Figure, axis: Axis) -> Curves | None:
    """One figure of the metrics; None where no row has it."""
    dots = raw_dots(run, figure.key, axis)
    if not dots:
        return None
    line = Curve("", dots, 1, "line")
    return _panel(figure.title, axis, figure.y_title, figure.unit, [line])


def overlay(runs: Sequence[tuple[str, int, RunSeries]], axis: Axis) -> Curves | None:
    """The smoothed training losses of several runs (name, color, curves)."""
    lines = [
        Curve(name, dots, color, "line") for name, color, run in runs if (dots := smooth_dots(run, axis))
    ]
    return _panel("Training loss, smoothed", axis, "loss", "", lines, from_zero=False) if lines else None


def validation_overlay(runs: Sequence[tuple[str, int, RunSeries]], axis: Axis) -> Curves | None:
    lines = [validation_curve(name, color, run, axis) for name, color, run in runs if run.validations]
    return _panel("Validation loss", axis, "validation loss", "", lines, from_zero=False) if lines else None


def figure_overlay(runs: Sequence[tuple[str, int, RunSeries]], figure: Figure, axis: Axis) -> Curves | None:
    lines = [
        Curve(name, [Dot(axis.place(one), one.figures[figure.key].mean) for one in has], color, "line")
        for name, color, run in runs
        if (has := [one for one in run.buckets if figure.key in one.figures])
    ]
    return _panel(figure.title, axis, figure.y_title, figure.unit, lines) if lines else None


def _panel(
    title: str, axis: Axis, y_title: str, unit: Unit, lines: Sequence[Curve], from_zero: bool = True
) -> Curves:
    lowest = min(dot.y for line in lines for dot in line.dots)
    return Curves(
        title, axis.title, y_title, "", unit, lines, x_log=False, y_log=False, y_from_zero=from_zero and lowest >= 0
    )  # fmt: skip


def raw_dots(run: RunSeries, key: str, axis: Axis) -> list[Dot]:
    """Every value, or of a thinned curve the smallest and the largest of each bucket."""
    dots = []
    for bucket in run.buckets:
        if (spread := bucket.figures.get(key)) is not None:
            x = axis.place(bucket)
            dots += (
                [Dot(x, spread.low)]
                if spread.low == spread.high
                else [Dot(x, spread.low), Dot(x, spread.high)]
            )
    return dots


def smooth_dots(run: RunSeries, axis: Axis) -> list[Dot]:
    has = [bucket for bucket in run.buckets if "loss" in bucket.figures]
    means = smoothed([bucket.figures["loss"].mean for bucket in has])
    return [Dot(axis.place(bucket), value) for bucket, value in zip(has, means, strict=True)]


def validation_curve(name: str, color: int, run: RunSeries, axis: Axis) -> Curve:
    """A mark for each validation, as long as they are few enough to be told apart."""
    dots = [Dot(axis.place(one), one.loss) for one in run.validations]
    return Curve(name, dots, color, "measured" if len(dots) <= MOST_MARKS else "line")
