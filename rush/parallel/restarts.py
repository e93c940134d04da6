"""What a rank must know about the time before torchrun started it again.

torchrun starts ranks again whatever they ended with. Whether this is such a start stands in the environment. What would only
fail again (a wrong recipe, missing data) is noted in a small file for those who come after, who then leave with the same exit code
and say nothing.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from rush.parallel.launching import FINAL


def restarted() -> bool:
    """Whether torchrun has started this process again after a failure: then the run in the folder is this one."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def most_restarts() -> int:
    """How often torchrun may start this process again."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def note_failure(code: int) -> None:
    """Tell the ranks of this machine that torchrun starts next what would only repeat itself."""
    if code in FINAL and most_restarts() > int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        for local in range(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
            with suppress(OSError):  # then they fail again, and say so again
                _note(str(local)).write_text(str(code))


def failed_before() -> int | None:
    """With what a rank of this machine failed that would only repeat itself, before torchrun started them again."""
    note = _note(os.environ.get("LOCAL_RANK", "0"))
    if not restarted() or not note.is_file() or note.stat().st_uid != os.getuid():
        return None
    code = int(note.read_text())
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ.get("TORCHELASTIC_MAX_RESTARTS"):
        note.unlink(missing_ok=True)
    return code


def _note(local_rank: str) -> Path:
    """Named after the launcher's process, which stays the same over its restarts."""
    run = "".join(letter for letter in os.environ.get("TORCHELASTIC_RUN_ID", "") if letter.isalnum())
    return Path(tempfile.gettempdir()) / f"rush-{os.getuid()}-{os.getppid()}-{run}-{local_rank}.failed"
