"""The status of a run, a ladder or a search, seen from outside: running, finished, interrupted, failed or stale.

The holder of a folder's lock writes its process and host into it, and a release empties it. This never tries to take the lock:
even a short hold would refuse a run that is just starting. A killed holder leaves its entry behind.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any, Literal

from rush.files import parse_json
from rush.records.lock import LOCK_NAME

Status = Literal["running", "finished", "interrupted", "failed", "stale"]
QUIET_S = 120.0
"""A run with a live holder but without a new row for this long (and for twenty of its steps) is stale."""

KINDS = {
    "ladder": "ladder.json",
    "tune": "tune.json",
    "scale": "scale.json",
    "race": "race.json",
    "kernels": "kernels.json",
    "models": "models.json",
    "explain": "explain.json",
    "plan": "plan-chart.json",
}
"""The record file of each kind of folder; a folder with none of them and rows or a machine is a run."""


def kind_of(folder: Path) -> str | None:
    """What a folder holds: a run, a ladder, … by its record file; None where there is no record. A record file is taken, too."""
    if os.path.isfile(folder):
        return next((kind for kind, file in KINDS.items() if file == folder.name), None)
    names = [kind for kind, file in KINDS.items() if os.path.isfile(folder / file)]
    if names:
        return names[0]
    started = os.path.isfile(folder / "recipe.toml") and os.path.isfile(folder / "machine.json")
    return "run" if started or os.path.isfile(folder / "metrics.jsonl") else None


def holder_is_alive(folder: Path) -> bool | None:
    """Whether the process that holds the folder is there; None where it cannot be known from this machine."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        content = os.read(descriptor, 4096) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)
    if not content.strip():
        return False
    try:
        holder: Any = parse_json(content)
        pid, host = int(holder["pid"]), str(holder["host"])
    except (ValueError, KeyError, TypeError):
        return None
    if host != socket.gethostname() or not 0 < pid < 2**31:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True


def status_of(
    *, done: bool, alive: bool | None, quiet_s: float, step_s: float = 0.0, failed: bool = False
) -> Status:
    """The status, from whether it is done, its holder, and the time since the last write."""
    if alive is False:
        return "finished" if done else "failed" if failed else "interrupted"
    if done and alive is None:
        return "finished"
    return "stale" if quiet_s > max(QUIET_S, 20 * step_s) else "running"
