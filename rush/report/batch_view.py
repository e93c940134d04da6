"""A ladder over batch sizes, with and without memory-saving techniques: does checkpointing pay off through a larger batch?

Checkpointing costs arithmetic and frees memory. At the same batch it loses. Under a memory limit it may win, because runs
without it are limited to a smaller batch. So every rung that differs from the others only in its micro batch and in
memory-saving techniques is a point here: tokens per second and peak memory over batch size, with the limit as a line, and a
cross for each OOM. A doubling counts as a gain only by the lab's rule (`rush/records/gains.py`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from rush.records.gains import judge
from rush.report import formatting
from rush.report.ladder import LadderView, RungView, careful_ratio
from rush.report.panels import Curve, Curves, Dot, Level, Mark, Panel

SAVERS = ("checkpoint_selective", "checkpoint_full", "offload_activations")
"""Techniques that save memory and cost time."""
PLAIN = "no checkpointing"
ENOUGH = 3
"""Different batches that make a curve."""


@dataclass(frozen=True)
class BatchView:
    """The rungs of a curve by what saves memory, each by its micro batch, and the limit."""

    series: dict[str, tuple[RungView, ...]]
    limit_bytes: float | None
    whole: bool = True
    """Whether peaks are compared with the limit: on a CPU a peak is the process's, but the limit applies to the step's
    increase."""


def batch_view(ladder: LadderView) -> BatchView | None:
    """The largest family of rungs that differ only so; None where there is no curve, or nothing that saves memory in it."""
    families: dict[tuple[object, ...], list[RungView]] = {}
    for rung in ladder.able:
        if rung.micro is not None:
            rest = tuple(sorted(name for name in rung.techniques if name not in SAVERS))
            families.setdefault((rest, rung.sequence), []).append(rung)
    rungs = max(families.values(), key=lambda found: len({rung.micro for rung in found}), default=[])
    series: dict[str, dict[int, RungView]] = {}
    for rung in rungs:
        with_ = " + ".join(name for name in rung.techniques if name in SAVERS) or PLAIN
        assert rung.micro is not None
        series.setdefault(with_, {})[rung.micro] = rung
    if len({rung.micro for rung in rungs}) < ENOUGH or len(series) < 2 or PLAIN not in series:
        return None
    if not any(rung.speed for rung in rungs):
        return None
    ordered = {name: tuple(own[micro] for micro in sorted(own)) for name, own in series.items()}
    return BatchView(ordered, _limit(ladder), ladder.machine.get("device") != "cpu")


def _limit(ladder: LadderView) -> float | None:
    """`run.memory_limit_gb` of the ladder's base, in bytes."""
    try:
        found = tomllib.loads(ladder.base_recipe or "").get("run", {}).get("memory_limit_gb")
    except (tomllib.TOMLDecodeError, AttributeError):
        return None
    return float(found) * 1e9 if isinstance(found, int | float) and not isinstance(found, bool) else None


def batch_panels(view: BatchView) -> list[Panel]:
    """Speed and peak memory over the batch."""
    speed, memory = [], []
    lost = [
        (name, rung) for name, own in view.series.items() for rung in own if rung.status == "out_of_memory"
    ]
    for color, (name, own) in enumerate(view.series.items(), 1):
        ran = [rung for rung in own if rung.speed]
        if ran:
            speed.append(Curve(name, [_speed(rung) for rung in ran], color))
        held = [rung for rung in ran if rung.peak_memory_bytes]
        if held:
            memory.append(Curve(name, [_memory(rung) for rung in held], color))
    if lost:
        speed.append(Curve("out of memory", [_cross(name, rung, 0.0) for name, rung in lost], 2, "crosses"))
    levels = (
        [Level(view.limit_bytes, f"limit, {view.limit_bytes / 1e9:g} GB")]
        if view.limit_bytes and view.whole
        else []
    )
    if lost and levels and memory:
        assert view.limit_bytes is not None
        crosses = [_cross(name, rung, view.limit_bytes) for name, rung in lost]
        memory.append(Curve("out of memory", crosses, 2, "crosses"))
    marks = [
        Mark(float(stop), f"{name}: twice the batch is no proven gain")
        for name, own in view.series.items()
        if (stop := stops_paying(own)) is not None
    ]
    x = "rows in a micro batch"
    found: list[Panel] = [Curves("Tokens per second over the batch", x, "tokens/s", "", "", speed, y_log=False, marks=marks)]  # fmt: skip
    if memory:
        found.append(Curves("Peak memory over the batch", x, "peak memory", "", "B", memory, y_log=False, levels=levels))  # fmt: skip
    return found


def _speed(rung: RungView) -> Dot:
    assert rung.speed is not None
    assert rung.micro is not None
    return Dot(float(rung.micro), rung.speed.median, rung.speed.low, rung.speed.high, note=rung.verdict)


def _memory(rung: RungView) -> Dot:
    assert rung.micro is not None
    assert rung.peak_memory_bytes is not None
    return Dot(float(rung.micro), rung.peak_memory_bytes)


def _cross(name: str, rung: RungView, y: float) -> Dot:
    assert rung.micro is not None
    return Dot(float(rung.micro), y, note=f"{name}: out of memory")


def doublings(own: Sequence[RungView]) -> list[tuple[int, float, float, float]]:
    """For each batch whose double was measured too: the batch, and what the double gains with its interval."""
    speed = {rung.micro: rung.speed for rung in own if rung.speed and rung.micro is not None}
    found = []
    for micro, before in sorted(speed.items()):
        if after := speed.get(2 * micro):
            ratio, low, high = careful_ratio(after, before)
            if low is not None and high is not None:
                found.append((micro, ratio, low, high))
    return found


def stops_paying(own: Sequence[RungView]) -> int | None:
    """The first batch whose double is not faster beyond noise; None where each is, or none was measured."""
    return next((micro for micro, _, low, high in doublings(own) if judge(low, high) != "faster"), None)


def batch_words(view: BatchView) -> list[str]:
    """The conclusions of the curve: the best of each, whether saving memory pays off, and where larger batches stop paying off."""
    found = []
    best = {name: rung for name, own in view.series.items() if (rung := _best(own)) is not None}
    limit = f"Under {view.limit_bytes / 1e9:g} GB" if view.limit_bytes else "On this machine"
    plain = best.get(PLAIN)
    if plain is None:
        found.append(f"{limit} nothing ran without checkpointing.")
    else:
        assert plain.speed is not None
        found.append(
            f"{limit} the fastest batch without checkpointing is {formatting.plural(plain.micro or 0, 'row')}: "
            f"{formatting.speed(plain.speed.median)}."
        )
    for name, rung in best.items():
        assert rung.speed is not None
        if name == PLAIN or plain is None or plain.speed is None:
            continue
        ratio, low, high = careful_ratio(rung.speed, plain.speed)
        judged = "cannot tell" if low is None or high is None else judge(low, high)
        said = {
            "faster": "it pays by the batch it allows",
            "slower": "it does not pay",
            "no gain": "it gains nothing",
            "cannot tell": "this measurement cannot tell whether it pays",
        }[judged]
        interval = [low, high] if low is not None and high is not None else None
        found.append(
            f"{name} with {formatting.plural(rung.micro or 0, 'row')}: {formatting.ratio_between(ratio, interval)} of that, {said}."
        )
    for name, own in view.series.items():
        if lost := [rung.micro for rung in own if rung.status == "out_of_memory" and rung.micro]:
            found.append(f"{name}: {formatting.plural(min(lost), 'row')} ran out of memory.")
        if (stop := stops_paying(own)) is not None:
            after = next(one for one in doublings(own) if one[0] == stop)
            found.append(
                f"{name}: from {stop} to {formatting.plural(2 * stop, 'row')} the gain is no longer beyond noise, "
                f"{formatting.ratio_between(after[1], after[2:])}."
            )
    return found


def _best(own: Sequence[RungView]) -> RungView | None:
    """The fastest that ran and learns the same."""
    ran = [rung for rung in own if rung.speed and "different" not in rung.verdict]
    return max(ran, key=lambda rung: rung.speed.median if rung.speed else 0.0, default=None)
