"""Who keeps the others waiting: every rank says where it is, and whoever waits too long looks around.

In an exchange (a collective) every rank waits for all the others. If one never comes, torch ends the others after a
time, with a message about a socket. Here a thread beside each rank writes down every few seconds, at the store where the
ranks met: the step, the function its rank is in, and, from torch's flight recorder, how many exchanges of each group it
has entered. A rank whose exchange does not end within the limit reads what the others wrote: one that has not entered it
is late; one that has stopped writing is stopped or gone. It says so, and all leave; a stopped process on the same machine is
killed, since it cannot leave by itself. Nothing is exchanged for this, and no step waits for it.

Work that is slow but alive is no hang: a rank that waits in no exchange is never judged by its own slowness.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from rush.errors import RankLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ROOT = Path(__file__).resolve().parents[1]
BEATS = 6
"""How often within the limit a rank writes down where it is, at least."""
LONGEST_BEAT_S = 5.0
GRACE_S = 10.0
"""How long a rank may still be at its last words when the store is gone."""
LOOK_BEATS = 3
"""How many times a living rank would have written again, while one that waits looks twice."""


@dataclass
class Note:
    """What a rank writes down about itself."""

    beat: int
    phase: str
    inside: str
    """The function of ours that it is in."""
    waits_in: str
    """The exchange that it has entered and not left, if any."""
    group: str = ""
    """Of that exchange."""
    number: int = 0
    """Which one of its group it is."""
    entered: dict[str, int] = field(default_factory=dict)
    """How many exchanges of each group it has entered."""
    host: str = ""
    pid: int = 0


class Watchdog:
    """This rank's thread that writes and looks; runs as long as the block lasts."""

    def __init__(self, store: Store, rank: int, world: int, limit_s: float) -> None:
        self.phase = "the start"
        self.told = False
        """Whether this rank has named a late one, and is about to leave."""
        self._store, self._rank, self._world, self._limit_s = store, rank, world, limit_s
        self._beat_s = min(LONGEST_BEAT_S, limit_s / BEATS)
        self._beat = 0
        self._main = threading.main_thread().ident
        self._ended = threading.Event()
        self._asked = math.inf
        """When the store was asked that has not answered yet."""
        self._thread = threading.Thread(target=self._run, name="rush-watch", daemon=True)

    def __enter__(self) -> Watchdog:
        self._write()  # whoever is stopped before its first beat is known, too
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    @property
    def store_is_silent(self) -> bool:
        """Whether the store has not answered for as long as ranks wait for each other."""
        return time.monotonic() - self._asked > self._limit_s - LOOK_BEATS * self._beat_s

    def exit_if_reported(self) -> None:
        """Say nothing more where a late rank was named already, by this one, whose thread is about to end the process, or by
        another, whose leaving is what was noticed."""
        if self.told:
            self._thread.join()
        with suppress(RuntimeError):
            if not self.store_is_silent and self._store.check(["teller"]):
                os._exit(RankLost.exit_code)

    def claim_report(self) -> None:
        """This rank has failed and says why: the others, who will lose it, leave without a word."""
        with suppress(RuntimeError):
            self._store.compare_set("teller", "", str(self._rank))

    def _run(self) -> None:
        waited_for, since = "", time.monotonic()
        while not self._ended.wait(self._beat_s):
            self._asked = time.monotonic()
            try:
                note = self._write()
                waits_for = self._waits_for(note)
                if waits_for != waited_for or not waits_for:
                    waited_for, since = waits_for, time.monotonic()
                if self._store.check(["found"]):
                    self._leave(json.loads(self._store.get("found")))
                if time.monotonic() - since > self._limit_s - LOOK_BEATS * self._beat_s:
                    self._look_around(note)
                    since = time.monotonic()
            except RuntimeError:
                # Rank 0 or the launcher, who kept the store, is gone: nothing can be exchanged any more.
                if self.told or not self._ended.wait(GRACE_S):
                    os._exit(RankLost.exit_code)
                return
            self._asked = math.inf

    def _write(self) -> Note:
        """One more sign of life."""
        self._beat += 1
        note = self._note()
        self._store.set(f"note/{self._rank}", json.dumps(asdict(note)))
        return note

    def _waits_for(self, note: Note) -> str:
        """A name for what this rank waits for: an exchange, or at the store whatever rank 0 is at; none if it does not."""
        return f"{note.group}/{note.number}" if note.waits_in else note.inside * self._at_store()

    def _note(self) -> Note:
        note = Note(self._beat, self.phase, self._inside(), "", host=socket.gethostname(), pid=os.getpid())
        entries, status = _flight_records()
        for group, counts in status.items():
            note.entered[group] = int(counts["last_enqueued_collective"])
        if entries:
            oldest = min(entries, key=lambda entry: int(entry["record_id"]))
            note.waits_in, note.group = _say_exchange(oldest), str(oldest["process_group"][0])
            note.number = int(oldest["collective_seq_id"])
        return note

    def _frames(self) -> list[FrameType]:
        """Of the main thread, the innermost first."""
        frame = sys._current_frames().get(self._main or 0)
        found = []
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
        return found

    def _inside(self) -> str:
        for frame in self._frames():
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and path.parent != Path(__file__).resolve().parent:
                return f"{frame.f_code.co_name} ({path.relative_to(ROOT.parent)}:{frame.f_lineno})"
        return "code that is not ours"

    def _at_store(self) -> bool:
        """Whether the main thread waits for what rank 0 has to say, or for a save that takes all ranks."""
        ours = [frame.f_code for frame in self._frames()[:5]]
        return any(code.co_name == "once" for code in ours[:2]) or any(
            code.co_name == "wait" and code.co_filename.endswith("saving.py") for code in ours
        )

    def _look_around(self, mine: Note) -> None:
        """Name who is late, unless everybody is alive and only rank 0 is at something that takes long."""
        before = self._notes()
        # Rank 0 may be at something that lets no thread of its run; then silence must be long to mean anything.
        beats = LOOK_BEATS if mine.waits_in else math.ceil(self._limit_s / self._beat_s)
        for _ in range(beats):
            if self._ended.wait(self._beat_s) or self._store.check(["found"]):
                return
            if self._waits_for(self._write()) != self._waits_for(mine):
                return  # it came after all
        after = self._notes()
        silent = [r for r, note in after.items() if r != self._rank and before[r].beat == note.beat]
        late = [
            r
            for r, note in after.items()
            if r not in (self._rank, *silent)
            and (not note.waits_in or note.entered.get(mine.group, mine.number) < mine.number)
        ]
        if not (silent or mine.waits_in):
            return
        says = [self._describe(r, after[r], silent=r in silent) for r in (silent or late)]
        if not says:
            says = [
                f"no rank is behind, they may wait in unlike exchanges (rank {self._rank} in {mine.inside}, "
                + ", ".join(f"rank {r} in {note.inside}" for r, note in after.items() if r != self._rank)
                + ")"
            ]
        waited = mine.waits_in or "what rank 0 has to say"
        message = (
            f"rank {self._rank} has waited {self._limit_s:g} s (run.timeout_s) at {mine.phase} for {waited}, in {mine.inside}: "
            + "; ".join(says[:4])
            + (f"; and {len(says) - 4} more" if len(says) > 4 else "")
            + ". All ranks end here; the run goes on from its last checkpoint."
        )
        stopped = [(after[r].host, after[r].pid) for r in silent]
        if self._store.compare_set("teller", "", str(self._rank)).decode() == str(self._rank):
            self.told = True
            print(f"error: {message}", file=sys.stderr, flush=True)  # noqa: T201
            self._store.set("found", json.dumps(stopped))
            self._ended.wait(2 * self._beat_s)  # the store may be ours: let the others read it
            self._leave(stopped)

    def _notes(self) -> dict[int, Note]:
        found = {}
        for rank in range(self._world):
            empty = asdict(Note(0, "the start", "nothing it has told of", ""))
            key = f"note/{rank}"
            told = json.loads(self._store.get(key)) if self._store.check([key]) else empty
            found[rank] = Note(**told)
        return found

    def _describe(self, rank: int, note: Note, *, silent: bool) -> str:
        if not silent:
            return f"rank {rank} did not come to it, it is at {note.phase} in {note.inside}"
        state = _state(note.pid) if note.host == socket.gethostname() else ""
        return (
            f"rank {rank} did not come to it and gives no sign of life{state}, it was last seen at {note.phase} in "
            f"{note.inside}"
        )

    def _leave(self, stopped: list[Any]) -> None:
        for host, pid in stopped:
            if host == socket.gethostname() and pid != os.getpid() and pid > 0:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(RankLost.exit_code)


def _flight_records() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The exchanges that are under way, and of each group how many were entered and left."""
    from torch._C import _distributed_c10d as c10d

    entries: list[dict[str, Any]] = []
    status: dict[str, Any] = {}
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            told = json.loads(dump(True, True))
            entries += [entry for entry in told.get("entries", ()) if not entry["retired"]]
            status |= told.get("pg_status", {})
    return entries, status


def _say_exchange(entry: dict[str, Any]) -> str:
    kind = str(entry["profiling_name"]).split(":", 1)[-1]
    sizes = entry.get("input_sizes") or [[]]
    numel = 0
    for size in sizes:
        product = 1
        for length in size:
            product *= int(length)
        numel += product
    dtype = str((entry.get("input_dtypes") or [""])[0]).lower()
    group = entry["process_group"]
    return (
        f"{kind} of {numel:,} {dtype} (number {entry['collective_seq_id']} of group {group[-1] or group[0]})"
    )


def _state(pid: int) -> str:
    """What the system says of a process that has fallen silent."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return " (its process is gone)"
    return {"T": " (it is stopped)", "Z": " (it has died)", "D": " (it hangs in the kernel)"}.get(letter, "")
