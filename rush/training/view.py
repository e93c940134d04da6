"""The console output of a run.

On a terminal: a live panel with progress, a loss curve and the main metrics. Elsewhere (a log file, a batch job): one line
every few seconds. A plain `View` prints nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from rush.errors import printable
from rush.files import append_log, shareable
from rush.records.metrics import MetricsRow

BARS = "▁▂▃▄▅▆▇█"


Tokens = Callable[[int], int]
"""The tokens of all steps up to one. If all steps have the same size, the step number suffices."""


class View:
    """Prints nothing."""

    def start(self, title: str, total: int, done: int, tokens: Tokens = int) -> None: ...
    def row(self, row: MetricsRow) -> None: ...
    def note(self, text: str) -> None: ...
    def sample(self, step: int, text: str) -> None: ...
    def close(self) -> None: ...


class Recording(View):
    """Forwards everything, and records notes in the run's folder, for its page."""

    def __init__(self, inner: View, path: Path) -> None:
        self._inner, self._path = inner, path
        self._waiting: list[str] = []
        self._step, self._started = 0, False

    def start(self, title: str, total: int, done: int, tokens: Tokens = int) -> None:
        self._step, self._started = done, True
        for text in self._waiting:
            self._write(text)
        self._inner.start(title, total, done, tokens)

    def row(self, row: MetricsRow) -> None:
        self._step = row["step"]
        self._inner.row(row)

    def note(self, text: str) -> None:
        if self._started:
            self._write(text)
        else:
            self._waiting.append(text)
        self._inner.note(text)

    def sample(self, step: int, text: str) -> None:
        self._inner.sample(step, text)

    def close(self) -> None:
        self._inner.close()

    def _write(self, text: str) -> None:
        """Record one line; a failure to write it does not stop the run."""
        append_log(json.dumps({"step": self._step, "note": shareable(text)}) + "\n", self._path)


class Countdown:
    """The time left, if the tokens to come take as long as those since the start."""

    def __init__(
        self, total: int, done: int, tokens: Tokens, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._done, self._tokens = total, done, tokens
        self._now, self._began = now, now()

    def left_s(self, step: int) -> float:
        ahead = self._tokens(self._total) - self._tokens(step)
        return ahead * (self._now() - self._began) / max(1, self._tokens(step) - self._tokens(self._done))


class Lines(View):
    """One line every few seconds, for logs."""

    def __init__(self, console: Console, every_s: float = 5.0, hint: str = "") -> None:
        self._console, self._every_s, self._hint = console, every_s, hint
        self._last, self._total = 0.0, 0

    def start(self, title: str, total: int, done: int, tokens: Tokens = int) -> None:
        self._total, self._countdown = total, Countdown(total, done, tokens)
        self._console.print(title, highlight=False, markup=False)
        if self._hint:
            self._console.print(printable(self._hint), highlight=False, markup=False, soft_wrap=True)

    def row(self, row: MetricsRow) -> None:
        now, step = time.monotonic(), row["step"]
        if now - self._last < self._every_s and step not in (1, self._total) and "val_loss" not in row:
            return
        self._last = now
        facts = "  ".join(f"{name} {text}" for name, text in describe(row).items())
        line = f"step {step:>6}/{self._total}  {facts}  left {clock(self._countdown.left_s(step))}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        self._console.print(printable(text), style="yellow", highlight=False, markup=False, soft_wrap=True)

    def sample(self, step: int, text: str) -> None:
        self._console.print(
            f"--- sample at step {step} ---\n{printable(text)}\n---", highlight=False, markup=False
        )


class Panels(View):
    """The live view of a terminal."""

    def __init__(self, console: Console, hint: str = "") -> None:
        self._console, self._hint = console, hint
        self._losses: list[float] = []
        self._row: Mapping[str, Any] = {}
        self._title = ""
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("step", total=None, left="-")
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def start(self, title: str, total: int, done: int, tokens: Tokens = int) -> None:
        self._title, self._countdown = title, Countdown(total, done, tokens)
        self._progress.reset(self._task, total=total, completed=done)
        if self._hint:
            self._console.print(Text(printable(self._hint)), soft_wrap=True)
        self._live.start()

    def row(self, row: MetricsRow) -> None:
        self._losses.append(float(row["loss"]))
        self._row = {**self._row, **row}
        left = clock(self._countdown.left_s(row["step"]))
        self._progress.update(self._task, completed=row["step"], left=left)

    def note(self, text: str) -> None:
        self._live.console.print(Text(printable(text), style="yellow"))

    def sample(self, step: int, text: str) -> None:
        self._live.console.print(
            Panel(Text(printable(text)), title=f"sample at step {step}", title_align="left")
        )

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        facts = Table.grid(padding=(0, 3))
        for _ in range(4):
            facts.add_column()
        cells = [
            Text.assemble((f"{name} ", "dim"), (text, "bold")) for name, text in describe(self._row).items()
        ]
        for first in range(0, len(cells), 4):
            facts.add_row(*cells[first : first + 4])
        curve = Text(sparkline(self._losses, max(20, self._console.width - 12)), style="cyan")
        return Panel(Group(self._progress, facts, Text.assemble(("loss ", "dim"), curve)), title=self._title)


FORMS = {
    "loss": ("loss", "{:.4f}"),
    "val_loss": ("validation", "{:.4f}"),
    "epoch": ("epoch", "{:.2f}"),
    "lr": ("lr", "{:.2e}"),
    "grad_norm": ("grad norm", "{:.3f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "trained_per_s": ("trained/s", "{:,.0f}"),
    "padding": ("padding", "{:.0%}"),
    "accuracy": ("wins", "{:.0%}"),
    "val_accuracy": ("held-out wins", "{:.0%}"),
    "mfu": ("MFU", "{:.1%}"),
    "ceiling_fraction": ("of ceiling", "{:.1%}"),
}


def describe(row: Mapping[str, Any]) -> dict[str, str]:
    """A metrics row as labels and formatted values."""
    found = {name: form.format(row[key]) for key, (name, form) in FORMS.items() if row.get(key) is not None}
    if "memory_bytes" in row:
        found["memory"] = f"{row['memory_bytes'] / 2**30:.2f} GiB"
    return found


def sparkline(values: list[float], width: int) -> str:
    """A curve in one line of text: means of equal intervals, scaled to their range."""
    if not values:
        return ""
    interval = max(1, -(-len(values) // width))
    means = [
        sum(part) / len(part) for part in (values[i : i + interval] for i in range(0, len(values), interval))
    ]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in means)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def terminal_view(hint: str = "") -> View:
    """The view for standard error; `hint` is a line that it prints when the run starts."""
    console = Console(stderr=True)
    return Panels(console, hint) if console.is_terminal else Lines(console, hint=hint)
