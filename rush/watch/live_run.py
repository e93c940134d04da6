"""A watched run: its curves and samples, and the increments for each client.

A client sends its position (`Seen`) and gets the buckets from its last one on, because that one may have grown, or everything
if the curves have a newer generation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.records.run_series import FIGURES, Bucket, RunSeries
from rush.records.tail import Tail
from rush.report.run_view import SampleView, sample_of

FRESH_S = 0.2
MOST_POINTS = 800
MOST_SAMPLES = 20


@dataclass(frozen=True)
class Seen:
    """A client's position: generation of the curves, rows, buckets, validations, samples."""

    generation: int = -1
    rows: int = 0
    buckets: int = 0
    validations: int = 0
    samples: int = 0

    @classmethod
    def parse(cls, word: str) -> Seen:
        """Parse `3.1200.600.4.2`; anything else means nothing was seen."""
        parts = word.split(".")
        if len(parts) != 5 or not all(
            part.isascii() and part.isdecimal() and len(part) < 16 for part in parts
        ):
            return cls()
        return cls(*map(int, parts))


class LiveRun:
    """One run's files, read as they grow; thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._looked = -1.0
        self.series = RunSeries(folder / "metrics.jsonl", MOST_POINTS, follow=False)
        self._sample_tail = Tail(folder / "samples.jsonl", follow=False)
        self._samples: list[SampleView] = []
        self._num_samples = 0

    def since(self, seen: Seen) -> dict[str, Any]:
        """What is new for a client."""
        with self._lock:
            if time.monotonic() - self._looked > FRESH_S:
                self._look()
                self._looked = time.monotonic()
            return self._answer(seen)

    def _look(self) -> None:
        self.series.refresh()
        anew, lines = self._sample_tail.read()
        if anew:
            self._samples, self._num_samples = [], 0
        found = [sample for line in lines if (sample := sample_of(line)) is not None]
        self._samples = [*self._samples, *found][-MOST_SAMPLES:]
        self._num_samples += len(found)

    def _answer(self, seen: Seen) -> dict[str, Any]:
        series = self.series
        same = seen.generation == series.generation and seen.buckets <= len(series.buckets)
        first = max(0, seen.buckets - 1) if same else 0
        new = series.buckets[first:] if not same or seen.rows != series.num_rows else []
        known = seen.validations if same and seen.validations <= len(series.validations) else 0
        heard = seen.samples if seen.samples <= self._num_samples else 0
        missing = min(self._num_samples - heard, len(self._samples))
        answer: dict[str, Any] = {
            "seen": f"{series.generation}.{series.num_rows}.{len(series.buckets)}.{len(series.validations)}.{self._num_samples}",
            "anew": not same,
            "from": first,
            "rows_per_point": series.width,
        }
        if new:
            answer |= {"at": _places(new), "figures": _figures(new, series.width > 1)}
        if checks := series.validations[known:]:
            answer["validations"] = _places(checks) | {"loss": [_short(one.loss) for one in checks]}
            answer["validations_from"] = known
        if missing:
            answer["samples"] = [
                {"step": one.step, "text": one.text, "why": one.why} for one in self._samples[-missing:]
            ]
        return answer


def _places(rows: Sequence[Any]) -> dict[str, list[float]]:
    return {
        "steps": [one.step for one in rows],
        "tokens": [one.tokens for one in rows],
        "time": [_short(one.seconds) for one in rows],
    }


def _figures(buckets: Sequence[Bucket], spread: bool) -> Mapping[str, Mapping[str, list[float | None]]]:
    """Every figure that some of the buckets have: its means, and of buckets with several rows its extremes."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for name in FIGURES:
        column = [bucket.figures.get(name) for bucket in buckets]
        if not any(column):
            continue
        found[name] = {"mean": [None if one is None else _short(one.mean) for one in column]}
        if spread:
            found[name]["low"] = [None if one is None else _short(one.low) for one in column]
            found[name]["high"] = [None if one is None else _short(one.high) for one in column]
    return found


def _short(value: float) -> float:
    """Round to six digits, more than a chart shows."""
    return float(f"{value:.6g}")
