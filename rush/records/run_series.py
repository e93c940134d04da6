"""The rows of a run as curves, read and downsampled as the file grows.

Rows are aggregated in buckets of equal numbers of rows. When there are too many buckets, neighbors are merged and a bucket
holds twice as many rows: so a run of any length has at most `MOST_BUCKETS` of them. A bucket keeps the minimum and maximum with
the mean, so that no spike is lost. A reader requests the buckets after its last position; `generation` changes when its earlier
buckets are stale (merged buckets, or rows that a resumed run truncated).

Rows are read leniently: an invalid line is counted and skipped, a value that is not a finite number is missing.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rush.files import parse_json
from rush.records.tail import Tail

MOST_BUCKETS = 1000
MOST_VALIDATIONS = 1000
MOST_RECENT = 50
"""The final loss is a mean over a tenth of the steps, and at most so many, as in the summary of a run."""
FIGURES = (
    "loss", "grad_norm", "lr", "tokens_per_s", "trained_per_s", "mfu", "ceiling_fraction", "memory_bytes", "epoch", "padding",
    "accuracy",
)  # fmt: skip


def finite(value: Any) -> float | None:
    """A finite number of a size that can be drawn; None for anything else."""
    if type(value) is float:  # almost all are, and a long run has millions
        return value if -1e100 < value < 1e100 else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e100:
        return None
    return float(value)


@dataclass
class Spread:
    """The values of one figure in a bucket."""

    total: float
    count: int
    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    def put(self, value: float) -> None:
        self.total += value
        self.count += 1
        if value < self.low:
            self.low = value
        elif value > self.high:
            self.high = value

    def add(self, other: Spread) -> None:
        self.total, self.count = self.total + other.total, self.count + other.count
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


@dataclass
class Bucket:
    """Neighboring rows: where the last of them stands, and the spread of every figure over them."""

    step: int
    tokens: float
    seconds: float
    num_rows: int = 0
    figures: dict[str, Spread] = field(default_factory=dict)

    def add(self, other: Bucket) -> None:
        self.step, self.tokens, self.seconds = other.step, other.tokens, other.seconds
        self.num_rows += other.num_rows
        for name, spread in other.figures.items():
            if (mine := self.figures.get(name)) is None:
                self.figures[name] = spread
            else:
                mine.add(spread)


@dataclass(frozen=True)
class Validated:
    """A validation: after which step, tokens and seconds of training, and its loss."""

    step: int
    tokens: float
    seconds: float
    loss: float


@dataclass
class RunSeries:
    """The curves of one `metrics.jsonl`. `refresh` reads what was written since."""

    path: Path
    most: int = MOST_BUCKETS
    generation: int = 0
    follow: bool = True
    """Whether the file may be a symbolic link."""

    def __post_init__(self) -> None:
        self._tail = Tail(self.path, self.follow)
        self._clear()

    def _clear(self) -> None:
        self.buckets: list[Bucket] = []
        self.width = 1
        self.validations: list[Validated] = []
        self.last: Mapping[str, Any] = {}
        self.num_rows = self._num_broken = self.num_skipped = self.num_not_finite = 0
        self.first_not_finite: int | None = None
        self.tokens = self.seconds = self.data_seconds = 0.0
        self.peak_memory_bytes = 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=MOST_RECENT)

    def refresh(self) -> bool:
        """Read the rows that were added since; whether there were any, or others than before."""
        anew, lines = self._tail.read()
        if anew:  # a resumed run cut rows away and wrote the file anew
            self._clear()
            self.generation += 1
        before = self.num_rows
        for line in lines:
            self._take(line)
        return anew or self.num_rows > before

    @property
    def bytes_read(self) -> int:
        return self._tail.bytes_read

    def _take(self, line: bytes) -> None:
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            self.put(row)
        else:
            self._num_broken += 1

    def put(self, row: Mapping[str, Any]) -> None:
        """Add a row that is not in a file."""
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or abs(step) > 2**53:
            self._num_broken += 1
            return
        self.num_rows += 1
        self.last = row
        self.num_skipped += row.get("skipped") is True
        if row.get("not_finite"):
            self.num_not_finite += 1
            self.first_not_finite = step if self.first_not_finite is None else self.first_not_finite
        self.seconds += max(0.0, finite(row.get("step_s")) or 0.0)
        self.data_seconds += max(0.0, finite(row.get("data_s")) or 0.0)
        self.tokens = finite(row.get("tokens")) or self.tokens
        self.peak_memory_bytes = max(self.peak_memory_bytes, finite(row.get("memory_bytes")) or 0.0)
        if (loss := finite(row.get("val_loss"))) is not None:
            self._validated(Validated(step, self.tokens, self.seconds, loss))
        if (train := finite(row.get("loss"))) is not None:
            self._recent.append((train, finite(row.get("labels")) or 1.0))
        if not self.buckets or self.buckets[-1].num_rows >= self.width:
            self.buckets.append(Bucket(step, self.tokens, self.seconds))
        bucket = self.buckets[-1]
        bucket.step, bucket.tokens, bucket.seconds = step, self.tokens, self.seconds
        bucket.num_rows += 1
        for name in FIGURES:
            if (value := finite(row.get(name))) is not None:
                if (spread := bucket.figures.get(name)) is None:
                    bucket.figures[name] = Spread(value, 1, value, value)
                else:
                    spread.put(value)
        if len(self.buckets) > self.most:
            self._join()

    def _validated(self, one: Validated) -> None:
        """Every validation, until there are too many: then every second one is left out, never the newest."""
        self.validations.append(one)
        if len(self.validations) > MOST_VALIDATIONS:
            self.validations = self.validations[::-2][::-1]
            self.generation += 1

    def _join(self) -> None:
        """Half as many buckets, each of twice as many rows."""
        joined = []
        for at in range(0, len(self.buckets), 2):
            one = self.buckets[at]
            for other in self.buckets[at + 1 : at + 2]:
                one.add(other)
            joined.append(one)
        self.buckets, self.width = joined, 2 * self.width
        self.generation += 1

    @property
    def num_broken(self) -> int:
        """The number of invalid lines."""
        return self._num_broken + self._tail.num_too_long

    @property
    def step(self) -> int:
        return int(self.last.get("step", 0))

    def final_loss(self) -> tuple[float, int] | None:
        """The training loss at the end, the mean over the labels of the last steps, and how many steps these are."""
        last = list(self._recent)[-max(1, self.num_rows // 10) :]
        labels = sum(count for _, count in last)
        return (sum(loss * count for loss, count in last) / labels, len(last)) if labels > 0 else None


def read_series(path: Path, most: int = MOST_BUCKETS) -> RunSeries:
    """The whole file at once."""
    series = RunSeries(path, most)
    series.refresh()
    return series


def smoothed(values: Sequence[float], part: float = 0.02) -> list[float]:
    """A moving mean over about a fiftieth of the values, centered, so that it lags behind nothing; shorter at either end."""
    reach = max(1, round(len(values) * part / 2))
    sums = [0.0, *itertools.accumulate(values)]
    found = []
    for at in range(len(values)):
        first, last = max(0, at - reach), min(len(values), at + reach + 1)
        found.append((sums[last] - sums[first]) / (last - first))
    return found
