"""The errors a user can meet, each with its exit code.

A message is one sentence or two for a person: what is wrong, what was found, what is allowed, what
to do. The command line prints it without a traceback and leaves with `exit_code`. Our own broken
invariants are plain `assert`s: they are bugs. Their traceback goes to a log, and one message says where that lies.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RushError(Exception):
    """Something the user can understand and mend."""

    exit_code = 1


class RecipeError(RushError):
    """The recipe, an override or an argument is wrong."""

    exit_code = 2


class KernelRefusal(RecipeError):
    """A kernel was handed something it does not support (a dtype, a width, a device)."""


class DataError(RushError):
    """A corpus, a tokenizer, a weight file or a checkpoint is missing, broken or does not fit."""

    exit_code = 3


class MachineError(RushError):
    """This machine or its environment cannot do what was asked (memory, disk, device, a missing extra)."""

    exit_code = 4


class RankLost(MachineError):
    """Another rank was killed, stopped or cut off; nothing is wrong here, and the run can start again from its checkpoint.

    The code is the one that sysexits.h has for "try again". A launcher that ends with it says 4, as of any machine.
    """

    exit_code = 75


class RunFailed(MachineError):
    """A run broke off: a technique, the compiler, a kernel or memory failed in mid-run, and would fail again."""


class Outage(RunFailed):
    """The device or the system failed in mid-run. Another try may go well, so launchers start lost ranks again."""


class OwnFault(RushError):
    """A mistake of this package broke a run off."""


class Diverged(RushError):
    """The loss or a gradient stopped being a finite number."""

    exit_code = 5


class Drifted(Diverged):
    """Ranks that hold the same weights no longer do."""


def nearest(found: str, allowed: Iterable[str]) -> str:
    """The tail of a message: the allowed words that begin like this or else the nearest, if there is one, and all of them."""
    names = sorted(allowed)
    begun = [name for name in names if found and name.startswith(found)]
    close = begun[:3] or difflib.get_close_matches(found, names, n=1, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, close))}? Allowed" if close else "allowed"
    return f"{hint}: {', '.join(names)}."
