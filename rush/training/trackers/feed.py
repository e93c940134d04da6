"""Feed trackers from separate threads, so that none of them can slow down, stop or hang a run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Literal

from rush.files import shareable
from rush.training.trackers.contract import Ended, Tracker

MOST_WAITING = 10_000
"""Maximum rows queued for a tracker: hours of steps, and a few megabytes."""
END_S, AT_ONCE_S = 60.0, 5.0
"""Seconds that a run waits for its trackers at its end, and when it must end at once."""
LONGEST = 300


class Trackers:
    """The trackers of a run. As a context manager it reports to them how the run ended."""

    def __init__(self, named: Sequence[tuple[str, Tracker]], note: Callable[[str], None]) -> None:
        self.ended: Literal["finished", "interrupted"] = "interrupted"
        """How a run without an exception ends."""
        self._feeds = [_Feed(name, tracker) for name, tracker in named]
        self._note = note

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._put(lambda tracker: tracker.scalars(step, values))

    def sample(self, step: int, text: str) -> None:
        self._put(lambda tracker: tracker.sample(step, text))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at_once = error is not None and not isinstance(error, Exception)
        ended = Ended(self.ended) if error is None else Ended("interrupted")
        if isinstance(error, Exception):
            ended = Ended("failed", shareable(f"{type(error).__name__}: {error}")[:LONGEST])
        self._put(lambda tracker: tracker.end(ended))
        until = time.monotonic() + (AT_ONCE_S if at_once else END_S)
        for feed in self._feeds:
            feed.finish(until)
            self._warn(feed)

    def _put(self, row: Callable[[Tracker], None]) -> None:
        for feed in self._feeds:
            feed.put(row)
            self._warn(feed)

    def _warn(self, feed: _Feed) -> None:
        if feed.problem is not None and not feed.warned:
            feed.warned = True
            self._note(
                f"The tracker {feed.name} {feed.problem}. It gets nothing more; the run continues, and metrics.jsonl has every row."
            )


class _Feed:
    """One tracker, its queue of rows, and the thread that sends them."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.warned = name, False
        self.problem: str | None = None
        self._tracker = tracker
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._hand_over, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, row: Callable[[Tracker], None] | None) -> None:
        if self.problem is not None:
            return
        try:
            self._waiting.put_nowait(row)
        except queue.Full:
            self.problem = f"is {MOST_WAITING:,} rows behind"

    def finish(self, until: float) -> None:
        """Wait until everything is sent, or until the timeout."""
        self.put(None)
        if self.problem is None:
            self._thread.join(max(0.0, until - time.monotonic()))
            if self._thread.is_alive():
                self.problem = f"did not take the last {self._waiting.qsize():,} rows in time"

    def _hand_over(self) -> None:
        while (row := self._waiting.get()) is not None and self.problem is None:
            try:
                row(self._tracker)
            except Exception as error:
                told = shareable(f"{type(error).__name__}: {error}").splitlines()[0]
                self.problem = f"failed with {told[:LONGEST]}".rstrip(".")
