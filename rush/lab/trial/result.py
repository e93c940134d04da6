"""What a trial found: a JSON file that is rewritten after each part, and the status of an error that ended it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rush.errors import Diverged, MachineError, RankLost, RecipeError
from rush.files import json_safe, write_json_atomic

_NO_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "not enough memory")


def settle(result: TrialResult, work: Callable[[], None]) -> None:
    """Do the work and write down what became of it; what means nothing to a study is raised."""
    try:
        work()
        result.finish("ok", None)
    except RecipeError as error:
        result.finish("unsupported", str(error))
    except MachineError as error:
        # The trainer explains a failed allocation, and a rank that lost another, to people as an error of the machine.
        memory = isinstance(error.__context__, torch.OutOfMemoryError)
        lost = isinstance(error, RankLost)
        result.add(lost=lost)
        result.finish("out_of_memory" if memory else "crashed" if lost else "unsupported", str(error))
    except Diverged as error:
        result.finish("diverged", str(error))
    except MemoryError as error:
        result.finish("out_of_memory", f"memory ran out ({error or 'MemoryError'}).")
    except RuntimeError as error:
        if not any(text in str(error) for text in _NO_MEMORY):
            raise
        result.finish("out_of_memory", f"memory ran out: {str(error).splitlines()[0][:300]}")


class TrialResult:
    """What was found so far; written after every part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {"complete": False, "status": "ok", "reason": None}

    def add(self, **parts: Any) -> None:
        self.found |= parts
        write_json_atomic(self.path, json_safe(self.found)[0])

    def took(self, part: str, began: float) -> None:
        """Note how long a part of the trial took."""
        self.add(seconds={**self.found.get("seconds", {}), part: round(time.monotonic() - began, 2)})

    def finish(self, status: str, reason: str | None) -> None:
        """The last word on the trial; a later one changes nothing."""
        if self.found["complete"]:
            return
        timed = "timing" in self.found and status != "ok"
        # Figures that were taken stay good when a later part of the trial fails.
        words = {"status": "ok", "reason": f"after the timing: {reason}", "ended": status} if timed else {}
        self.add(**{"status": status, "reason": reason, **words, "complete": True})
