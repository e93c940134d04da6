"""The errors of the command line, with their exit codes.

A message says what is wrong, what was found, what is allowed, what to do. The command line prints it without a traceback and
exits with `exit_code`. Broken invariants are plain `assert`s: they are bugs, whose traceback goes to a log.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RushError(Exception):
    """An error that the user can understand and fix."""

    exit_code = 1


class RecipeError(RushError):
    """The recipe, an override or an argument is wrong."""

    exit_code = 2


class KernelRefusal(RecipeError):
    """A kernel was given something it does not support (a dtype, a width, a device)."""


class DataError(RushError):
    """A corpus, a tokenizer, a weight file or a checkpoint is missing, broken or does not fit."""

    exit_code = 3


class MachineError(RushError):
    """This machine or its environment cannot do what was asked (memory, disk, device, a missing extra)."""

    exit_code = 4


class RankLost(MachineError):
    """Another rank was killed, stopped or disconnected; the run can restart from its checkpoint.

    The code is EX_TEMPFAIL of sysexits.h. The launcher itself exits with 4, as for any MachineError.
    """

    exit_code = 75


class RunFailed(MachineError):
    """A technique, the compiler, a kernel or memory failed during a run, and would fail again."""


class Outage(RunFailed):
    """The device or the system failed during a run. A retry may succeed, so launchers restart all ranks."""


class OwnFault(RushError):
    """A bug of this package ended a run."""


class Diverged(RushError):
    """The loss or a gradient is non-finite."""

    exit_code = 5


class Drifted(Diverged):
    """Replicas no longer hold the same weights."""


def nearest(found: str, allowed: Iterable[str]) -> str:
    """The tail of a message: the allowed words that begin like this or else the nearest, if there is one, and all of them."""
    names = sorted(allowed)
    begun = [name for name in names if found and name.startswith(found)]
    close = begun[:3] or difflib.get_close_matches(found, names, n=1, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, close))}? Allowed" if close else "allowed"
    return f"{hint}: {', '.join(names)}."
