"""Timings as records keep them: the median, its interval and all samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rush.hardware.stopwatch import Work, time_calls
from rush.lab.statistics import median_interval


def stat(samples: Sequence[float]) -> dict[str, Any]:
    """The median of some timings with its 95 % interval, and the timings."""
    kept = [float(f"{value:.5g}") for value in samples]
    found = median_interval([kept])
    return {"median": found.median, "low": found.low, "high": found.high, "n": found.n, "samples": kept}


def timed(work: Work, device: str, **how: Any) -> dict[str, Any]:
    """Seconds of a call; `how` is as in `time_calls`."""
    return stat(time_calls(work, device, **how))


def byte_rate(row: Mapping[str, Any]) -> float:
    """Bytes per second of a row: what it moved over its time."""
    return float(row["moved"] / row["seconds"]["median"])
