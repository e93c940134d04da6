"""Find the rank that keeps the others waiting: heartbeats in the store, read by any rank that waits too long.

In a collective every rank waits for all others. If one never enters it, torch ends the others at its timeout with a
message about a socket. Here a thread beside each rank writes a heartbeat to the store every few seconds: the phase, the
function its rank is in and, from torch's flight recorder, how many collectives of each group it has entered. A rank whose
collective does not end within the limit reads the heartbeats of the others: one that has not entered the collective is
late, one whose heartbeat stands still is stopped or gone. It reports that rank, and all exit; a stopped process on the same
machine is killed, since it cannot exit by itself. This uses no collective, and no step waits for it.

A rank that fails alone says so in the store, and leaves once the others have read it: they exit without a message of their
own.

Slow work is no hang: a rank that waits for nothing is never judged by its own slowness. Waits outside of collectives are
declared by the code that waits (`Wait`).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rush.errors import RankLost
from rush.libraries import silence_stderr

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ROOT = Path(__file__).resolve().parents[1]
BEATS = 6
"""Heartbeats within the limit, at least."""
LONGEST_BEAT_S = 5.0
GRACE_S = 10.0
"""How long a rank may still be printing its last message after it has failed, or after the store is gone."""
POLL_S = 0.05
"""Between two looks into the store, while ranks leave."""
LOOK_BEATS = 3
"""Heartbeats between two readings: a rank without a new one is silent."""


class Wait(Enum):
    """What a rank waits for outside of a collective."""

    RANK_0 = "a value from rank 0"
    ALL_RANKS = "a value from every rank"
    SAVE = "the checkpoint under way"


@dataclass
class Heartbeat:
    """What a rank reports about itself."""

    beat: int
    phase: str
    inside: str
    """The function of this package that it is in."""
    collective: str = ""
    """The collective that it has entered and not left."""
    group: str = ""
    """The process group of that collective."""
    number: int = 0
    """The collective's sequence number in its group."""
    entered: dict[str, int] = field(default_factory=dict)
    """Collectives entered, by group."""
    wait: str = ""
    """The name of the declared `Wait`."""
    wait_number: int = 0
    host: str = ""
    pid: int = 0

    @property
    def waits_for(self) -> str:
        """A name for what the rank waits for; empty if it does not."""
        if self.collective:
            return f"{self.group}/{self.number}"
        return f"{self.wait}/{self.wait_number}" if self.wait else ""


class Watchdog:
    """This rank's heartbeat thread; runs as long as the block lasts."""

    def __init__(self, store: Store, rank: int, world: int, limit_s: float) -> None:
        self.phase = "the start"
        self.reported = False
        """Whether this rank has reported a late one, and is about to exit."""
        self._store, self._rank, self._world, self._limit_s = store, rank, world, limit_s
        self._beat_s = min(LONGEST_BEAT_S, limit_s / BEATS)
        self._beat = 0
        self._given_up = False
        """Whether another rank has failed, and this one only stays until that has been reported."""
        self._main = threading.main_thread().ident
        self._wait: tuple[Wait, int] | None = None
        self._wait_numbers = itertools.count()
        self._ended = threading.Event()
        self._asked = math.inf
        """When the store was asked that has not answered yet."""
        self._thread = threading.Thread(target=self._run, name="rush-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._write()  # a rank that is stopped before its first beat is known, too
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    @contextmanager
    def waiting(self, kind: Wait) -> Iterator[None]:
        """Declare that the main thread waits for other ranks in this block."""
        before, self._wait = self._wait, (kind, next(self._wait_numbers))
        try:
            yield
        finally:
            self._wait = before

    @property
    def store_is_silent(self) -> bool:
        """Whether the store has not answered for as long as ranks wait for each other."""
        return time.monotonic() - self._asked > self._limit_s - LOOK_BEATS * self._beat_s

    def exit_if_reported(self) -> None:
        """Exit without a message where a late rank was reported already: by this rank, whose thread ends the process, or by
        another, whose exit is what was noticed."""
        if self.reported or self._given_up:
            self._thread.join()
        with suppress(RuntimeError):
            if not self.store_is_silent and self._store.check(["reporter"]):
                os._exit(RankLost.exit_code)

    def claim_report(self) -> None:
        """This rank has failed and reports why: the others, which will lose it, exit without a message."""
        with suppress(RuntimeError):
            self._store.compare_set("reporter", "", str(self._rank))
            self._store.set(f"knows/{self._rank}", "")
            self._store.set("failed", "")
            if self._rank == 0:  # it may host the store
                others = [f"knows/{other}" for other in range(1, self._world)]
                deadline = time.monotonic() + 2 * self._beat_s
                while time.monotonic() < deadline and not self._store.check(others):
                    time.sleep(POLL_S)

    def _run(self) -> None:
        waited_for, since = "", time.monotonic()
        while not self._ended.wait(self._beat_s):
            self._asked = time.monotonic()
            try:
                mine = self._write()
                if mine.waits_for != waited_for or not mine.waits_for:
                    waited_for, since = mine.waits_for, time.monotonic()
                if self._store.check(["found"]):
                    self._exit(json.loads(self._store.get("found")))
                if self._store.check(["failed"]):
                    self._give_up()
                if time.monotonic() - since > self._limit_s - LOOK_BEATS * self._beat_s:
                    self._look_around(mine)
                    since = time.monotonic()
            except RuntimeError:
                # Rank 0 or the launcher, which hosts the store, is gone: the run cannot continue.
                if self.reported or self._given_up or not self._ended.wait(GRACE_S):
                    os._exit(RankLost.exit_code)
                return
            self._asked = math.inf

    def _give_up(self) -> None:
        """Exit without a message, but after the rank that failed: a launcher ends all ranks with the first that exits."""
        self._given_up = True
        silence_stderr()
        self._store.set(f"knows/{self._rank}", "")
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and self._store.check(["failed"]):
            time.sleep(POLL_S)
        os._exit(RankLost.exit_code)

    def _write(self) -> Heartbeat:
        self._beat += 1
        mine = self._heartbeat()
        self._store.set(f"heartbeat/{self._rank}", json.dumps(asdict(mine)))
        return mine

    def _heartbeat(self) -> Heartbeat:
        wait = self._wait
        mine = Heartbeat(
            self._beat,
            self.phase,
            self._inside(),
            wait=wait[0].name if wait is not None else "",
            wait_number=wait[1] if wait is not None else 0,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        entries, status = _flight_records()
        for group, counts in status.items():
            mine.entered[group] = int(counts["last_enqueued_collective"])
        if entries:
            oldest = min(entries, key=lambda entry: int(entry["record_id"]))
            mine.collective, mine.group = _describe_collective(oldest), str(oldest["process_group"][0])
            mine.number = int(oldest["collective_seq_id"])
        return mine

    def _inside(self) -> str:
        """The innermost function of the main thread that is of this package, but not of this folder."""
        frame = sys._current_frames().get(self._main or 0)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and path.parent != Path(__file__).resolve().parent:
                return f"{frame.f_code.co_name} ({path.relative_to(ROOT.parent)}:{frame.f_lineno})"
            frame = frame.f_back
        return "code outside of rush"

    def _look_around(self, mine: Heartbeat) -> None:
        """Report who is late, unless all are alive and rank 0 only does something that takes long."""
        before = self._heartbeats()
        # A call of rank 0 may block its threads; then silence must be long to mean anything.
        beats = LOOK_BEATS if mine.collective else math.ceil(self._limit_s / self._beat_s)
        for _ in range(beats):
            if self._ended.wait(self._beat_s) or self._store.check(["found"]):
                return
            if self._write().waits_for != mine.waits_for:
                return  # the wait has ended after all
        after = self._heartbeats()
        silent = [r for r, theirs in after.items() if r != self._rank and before[r].beat == theirs.beat]
        if silent or mine.collective:
            self._report(mine, after, silent)

    def _report(self, mine: Heartbeat, after: dict[int, Heartbeat], silent: list[int]) -> None:
        late = [
            r
            for r, theirs in after.items()
            if r not in (self._rank, *silent)
            and (not theirs.collective or theirs.entered.get(mine.group, mine.number) < mine.number)
        ]
        found = [self._describe(r, after[r], silent=r in silent) for r in (silent or late)]
        if not found:
            found = [
                f"no rank is behind, they may wait in different collectives (rank {self._rank} in {mine.inside}, "
                + ", ".join(f"rank {r} in {theirs.inside}" for r, theirs in after.items() if r != self._rank)
                + ")"
            ]
        waited = mine.collective or Wait[mine.wait].value
        message = (
            f"rank {self._rank} has waited {self._limit_s:g} s (run.timeout_s) at {mine.phase} for {waited}, in {mine.inside}: "
            + "; ".join(found[:4])
            + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
            + ". All ranks exit; the run can be resumed from its last checkpoint."
        )
        stopped = [(after[r].host, after[r].pid) for r in silent]
        if self._store.compare_set("reporter", "", str(self._rank)).decode() == str(self._rank):
            self.reported = True
            print(f"error: {message}", file=sys.stderr, flush=True)  # noqa: T201
            self._store.set("found", json.dumps(stopped))
            self._ended.wait(2 * self._beat_s)  # this rank may host the store: let the others read it
            self._exit(stopped)

    def _heartbeats(self) -> dict[int, Heartbeat]:
        found = {}
        for rank in range(self._world):
            key = f"heartbeat/{rank}"
            written = self._store.check([key])
            found[rank] = (
                Heartbeat(**json.loads(self._store.get(key)))
                if written
                else Heartbeat(0, "the start", "an unknown function")
            )
        return found

    def _describe(self, rank: int, theirs: Heartbeat, *, silent: bool) -> str:
        if not silent:
            return f"rank {rank} did not join it, it is at {theirs.phase} in {theirs.inside}"
        state = _process_state(theirs.pid) if theirs.host == socket.gethostname() else ""
        return (
            f"rank {rank} did not join it and sends no heartbeat{state}, it was last seen at {theirs.phase} in "
            f"{theirs.inside}"
        )

    def _exit(self, stopped: list[Any]) -> None:
        for host, pid in stopped:
            if host == socket.gethostname() and pid != os.getpid() and pid > 0:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(RankLost.exit_code)


def _flight_records() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The collectives under way, and for each group how many were entered and left."""
    from torch._C import _distributed_c10d as c10d

    entries: list[dict[str, Any]] = []
    status: dict[str, Any] = {}
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            trace = json.loads(dump(True, True))
            entries += [entry for entry in trace.get("entries", ()) if not entry["retired"]]
            status |= trace.get("pg_status", {})
    return entries, status


def _describe_collective(entry: dict[str, Any]) -> str:
    kind = str(entry["profiling_name"]).split(":", 1)[-1]
    numel = sum(math.prod(map(int, size)) for size in entry.get("input_sizes") or [[]])
    dtype = str((entry.get("input_dtypes") or [""])[0]).lower()
    group = entry["process_group"]
    return (
        f"{kind} of {numel:,} {dtype} (number {entry['collective_seq_id']} of group {group[-1] or group[0]})"
    )


def _process_state(pid: int) -> str:
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return " (its process is gone)"
    return {"T": " (it is stopped)", "Z": " (it has died)", "D": " (it hangs in the kernel)"}.get(letter, "")
