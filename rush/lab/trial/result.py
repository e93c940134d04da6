"""The result of a trial: a JSON file that is rewritten after each part, and the status of an error that ended it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from rush.errors import Diverged, MachineError, RankLost, RecipeError
from rush.files import json_safe, write_json_atomic
from rush.hardware.memory_use import out_of_memory
from rush.lab.trial.found import TrialFound


def settle(result: TrialResult, work: Callable[[], None]) -> None:
    """Do the work and write the status of its end; unknown errors are raised."""
    try:
        work()
        result.finish("ok", None)
    except RecipeError as error:
        result.finish("unsupported", str(error))
    except MachineError as error:
        # The trainer reports a failed allocation, and a lost rank, as an error of the machine.
        memory = isinstance(error.__context__, torch.OutOfMemoryError)
        lost = isinstance(error, RankLost)
        result.add(lost=lost)
        result.finish("out_of_memory" if memory else "crashed" if lost else "unsupported", str(error))
    except Diverged as error:
        result.finish("diverged", str(error))
    except MemoryError as error:
        result.finish("out_of_memory", f"memory ran out ({error or 'MemoryError'}).")
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        result.finish("out_of_memory", f"memory ran out: {str(error).splitlines()[0][:300]}")


class TrialResult:
    """The result so far; written after every part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: TrialFound = {"complete": False, "status": "ok", "reason": None}

    def add(self, **parts: Any) -> None:
        self.found |= cast(TrialFound, parts)
        write_json_atomic(self.path, json_safe(self.found)[0])

    def took(self, part: str, began: float) -> None:
        """Record the duration of a part of the trial."""
        self.add(seconds={**self.found.get("seconds", {}), part: round(time.monotonic() - began, 2)})

    def finish(self, status: str, reason: str | None) -> None:
        """Write the status of the trial; a later call changes nothing."""
        if self.found["complete"]:
            return
        timed = "timing" in self.found and status != "ok"
        # A timing stays valid when a later part of the trial fails.
        after = {
            "status": "ok",
            "reason": f"after the timing: {reason}",
            "ended": status,
            "ended_reason": reason,
        }
        ended = after if timed else {}
        self.add(**{"status": status, "reason": reason, **ended, "complete": True})
