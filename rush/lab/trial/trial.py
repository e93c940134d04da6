"""One trial: a recipe in a fresh process, with a time limit.

A fresh process is the only fair start: no warm caches, no fragmented allocator, no compiled graph of another rung. It is also
the only safe one: a trial may run out of memory, hang or crash, and each of these is a result, not the end of the ladder. The
two sides communicate through JSON files. `rush.lab.trial.starter` starts and ends the process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rush.files import shareable, write_json_atomic
from rush.lab.trial.found import TrialFound
from rush.lab.trial.starter import Starter

LOG_TAIL = 2000


@dataclass(frozen=True)
class Outcome:
    """The status of a trial (`rush.records.ladder.STATUSES`), a reason unless it is ok, and what it found."""

    status: str
    reason: str | None
    found: TrialFound = field(default_factory=TrialFound)
    wall_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"status": self.status, "reason": self.reason, "found": self.found, "wall_s": self.wall_s}

    @staticmethod
    def from_dict(tree: Mapping[str, Any]) -> Outcome:
        return Outcome(tree["status"], tree["reason"], tree["found"], tree["wall_s"])


def execute(
    starter: Starter,
    spec: Mapping[str, Any],
    workspace: Path,
    limit_s: float,
    compiled: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a spec in a fresh process (`rush.lab.trial.process`) for at most `limit_s` seconds.

    `compiled`: the compiler's cache, a folder per recipe, so that none uses a graph of another. `environment`: additional
    environment variables.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    spec_file, result_file, log_file = (
        workspace.resolve() / name for name in ("spec.json", "result.json", "log.txt")
    )
    result_file.unlink(missing_ok=True)
    log_file.touch()
    write_json_atomic(spec_file, spec)
    extra = dict(environment or {})
    if compiled is not None:
        extra |= compiler_caches(compiled)
    began = time.monotonic()
    code = starter.run(spec_file, result_file, log_file, extra, limit_s)
    wall_s = time.monotonic() - began
    found: TrialFound = json.loads(result_file.read_text()) if result_file.exists() else {}
    if said := found.get("reason"):
        found["reason"] = shareable(said)
    status, reason = judged_trial(found, code, limit_s, shareable(_tail(log_file)))
    shutil.rmtree(workspace)
    return Outcome(status, reason, found, wall_s)


def compiler_caches(folder: Path) -> dict[str, str]:
    """The environment variables of compiler caches in this folder."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def judged_trial(found: TrialFound, code: int | None, limit_s: float, tail: str) -> tuple[str, str | None]:
    """The status of a trial from its result and its exit code."""
    if found.get("complete"):
        return found["status"], found["reason"]
    how = _ending(code, limit_s, tail)
    if found.get("timing"):
        # The timing is complete; only what came after it (profile or parity) failed.
        return "ok", f"after the timing, {how[1]}"
    return how


def _ending(code: int | None, limit_s: float, tail: str) -> tuple[str, str]:
    if code is None:
        return "timed_out", f"the trial was not done after {limit_s:g} s and was ended."
    if code == -signal.SIGKILL:
        return "out_of_memory", (
            "the process was killed from outside (SIGKILL), which is what Linux does when memory runs out."
        )
    if code < 0:
        return "crashed", f"the process died of {signal.Signals(-code).name}{_last_line(tail)}."
    return "crashed", f"the process left with exit code {code}{_last_line(tail)}."


def _last_line(tail: str) -> str:
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return f": {lines[-1][:300].rstrip('.')}" if lines else ""


def _tail(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOG_TAIL))
        return file.read().decode("utf-8", "replace")
