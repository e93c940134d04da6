"""Restarts by torchrun, which restarts ranks whatever they ended with.

A failure that would only repeat (a wrong recipe, missing data) is noted in a small file for the restarted ranks, which then
exit with the same code and no message.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from rush.launched import launched
from rush.parallel.launching import FINAL


def restarted() -> bool:
    """Whether torchrun restarted this process after a failure: then the run in the folder is this one."""
    return launched("TORCHELASTIC_RESTART_COUNT", 0) > 0


def most_restarts() -> int:
    """How often torchrun may restart this process."""
    return launched("TORCHELASTIC_MAX_RESTARTS", 0)


def note_failure(code: int) -> None:
    """Note a failure that would only repeat, for the ranks of this machine that torchrun restarts."""
    if code in FINAL and most_restarts() > launched("TORCHELASTIC_RESTART_COUNT", 0):
        for local in range(launched("LOCAL_WORLD_SIZE", 1)):
            with suppress(OSError):  # then they fail again, with a message
                _note(str(local)).write_text(str(code))


def failed_before() -> int | None:
    """The exit code of a noted failure before this restart."""
    note = _note(os.environ.get("LOCAL_RANK", "0"))
    if not restarted() or not note.is_file() or note.stat().st_uid != os.getuid():
        return None
    code = int(note.read_text())
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ.get("TORCHELASTIC_MAX_RESTARTS"):
        note.unlink(missing_ok=True)
    return code


def _note(local_rank: str) -> Path:
    """Named after the launcher's process, which stays the same over restarts."""
    run = "".join(letter for letter in os.environ.get("TORCHELASTIC_RUN_ID", "") if letter.isalnum())
    return Path(tempfile.gettempdir()) / f"rush-{os.getuid()}-{os.getppid()}-{run}-{local_rank}.failed"
