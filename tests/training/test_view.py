"""What a run shows of its time."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from rush.batch_schedule import BatchSizes
from rush.training.view import Countdown, Lines, Panels

ROW: dict[str, Any] = {"loss": 2.0, "tokens_per_s": 1000.0}


@pytest.mark.parametrize(
    ("done", "step", "elapsed_s", "left_s"), [(0, 5, 5.0, 105.0), (0, 15, 12.0, 10.0), (5, 10, 5.0, 100.0)]
)
def test_steps_of_more_tokens_take_longer(done: int, step: int, elapsed_s: float, left_s: float) -> None:
    """Ten steps of 100 tokens, then ten of 1,000."""
    seconds = iter([0.0, elapsed_s])
    countdown = Countdown(20, done, BatchSizes((10,), (100, 1000)).until, lambda: next(seconds))
    assert countdown.left_s(step) == pytest.approx(left_s)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_says_how_much_time_is_left(terminal: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=100)
    view = Panels(console) if terminal else Lines(console, every_s=0.0)
    view.start("a run", 4, 0, BatchSizes((2,), (1, 10**9)).until)
    view.row({**ROW, "step": 1})  # type: ignore[typeddict-item]
    between = written.getvalue()
    view.row({**ROW, "step": 4})  # type: ignore[typeddict-item]
    view.close()
    assert terminal or ":" in between.split("left")[1]
    assert written.getvalue().rstrip().count("left 0:00")
