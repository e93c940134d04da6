"""One trial: a recipe executed in a process of its own, with a time limit, whatever becomes of it.

A fresh process is the only fair start: no warm caches, no fragments in the allocator, no compiled graph
left over from the rung before. It is also the only safe one: a trial may run out of memory, hang or take
the interpreter down with it, and each of these is a result, not the end of the ladder. The two sides
talk through files of JSON. The child gets a session of its own, so that ending it (at the limit, or when
the person presses Ctrl-C) ends everything it started.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

import rush
from rush.files import write_json_atomic

LOG_TAIL = 2000


@dataclass(frozen=True)
class Outcome:
    """What a trial came to: one of the record's statuses, a sentence unless it is ok, and what was found."""

    status: str
    reason: str | None
    found: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "reason": self.reason,
            "found": dict(self.found),
            "wall_s": self.wall_s,
        }

    @staticmethod
    def from_dict(tree: Mapping[str, Any]) -> Outcome:
        return Outcome(tree["status"], tree["reason"], tree["found"], tree["wall_s"])


def execute(
    spec: Mapping[str, Any], workspace: Path, limit_s: float, compiled: Path | None = None
) -> Outcome:
    """Run `python -m rush.lab.trial_process` on a spec and wait, at most `limit_s` seconds.

    `compiled` keeps what the compiler made; a folder per recipe, so that no graph is ever taken from another.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    spec_file, result_file, log_file = (workspace / name for name in ("spec.json", "result.json", "log.txt"))
    result_file.unlink(missing_ok=True)
    write_json_atomic(spec_file, {**spec, "parent": os.getpid()})
    began = time.monotonic()
    with open(log_file, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rush.lab.trial_process", str(spec_file), str(result_file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(compiled),
        )
        late = False
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end_session(process)
    wall_s = time.monotonic() - began
    found = json.loads(result_file.read_text()) if result_file.exists() else {}
    status, reason = _judge(found, process.returncode, late, limit_s, _tail(log_file))
    shutil.rmtree(workspace)
    return Outcome(status, reason, found, wall_s)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of the child and of all it started, and wait until the child is gone."""
    session = process.pid
    for candidate in psutil.pids():
        try:
            if candidate != session and os.getsid(candidate) == session:
                os.kill(candidate, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended between the look and the kill
        except PermissionError:
            continue  # another user's: not one of ours
    if process.poll() is None:
        process.kill()
    process.wait()


def _environment(compiled: Path | None) -> dict[str, str]:
    root = str(Path(rush.__file__).resolve().parents[1])
    before = os.environ.get("PYTHONPATH")
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([root, before] if before else [root])}
    if compiled is not None:
        given |= {
            "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
            "TRITON_CACHE_DIR": str(compiled / "triton"),
        }
    return given


def _judge(
    found: Mapping[str, Any], code: int | None, late: bool, limit_s: float, tail: str
) -> tuple[str, str | None]:
    """The status of a trial from what it wrote and how it ended."""
    if found.get("complete"):
        return found["status"], found["reason"]
    how = _ending(code, late, limit_s, tail)
    if found.get("timing"):
        # The figures are whole; only what came after them (profile or parity) was lost.
        return "ok", f"after the timing, {how[1]}"
    return how


def _ending(code: int | None, late: bool, limit_s: float, tail: str) -> tuple[str, str]:
    if late:
        return "timed_out", f"the trial was not done after {limit_s:g} s and was ended."
    assert code is not None
    if code == -signal.SIGKILL:
        return "out_of_memory", (
            "the process was killed from outside (SIGKILL), which is what Linux does when memory runs out."
        )
    if code < 0:
        return "crashed", f"the process died of {signal.Signals(-code).name}{_last_words(tail)}."
    return "crashed", f"the process left with exit code {code}{_last_words(tail)}."


def _last_words(tail: str) -> str:
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return f": {lines[-1][:300].rstrip('.')}" if lines else ""


def _tail(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOG_TAIL))
        return file.read().decode("utf-8", "replace")
