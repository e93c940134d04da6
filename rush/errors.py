"""The errors of the command line, with their exit codes.

A message states what is wrong, what was found, what is allowed, what to do. The command line prints it without a traceback and
exits with `exit_code`. Broken invariants are plain `assert`s: they are bugs, whose traceback goes to a log.

A message often quotes untrusted input: control characters in it would reach the terminal, and a value of a million characters
would hide the sentence. So every message is `readable`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_MESSAGE = 2000
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], "�")
_PICTURES |= dict.fromkeys(range(0xD800, 0xE000), "�") | {0x7F: "␡", 0x9B: "␛"}


def printable(text: str) -> str:
    """Escape control characters (also those that change the direction of text, and unpaired surrogates)."""
    return text.translate(_PICTURES)


def readable(message: str, most: int = LONGEST_MESSAGE) -> str:
    """A message without control characters, of at most `most` characters: a longer one loses its middle."""
    half = most // 2 - 50
    if (more := len(message) - most) > 0:
        message = f"{message[:half]} … ({more + 100:,} characters left out) … {message[-half:]}"
    return printable(message)


def text_of(error: BaseException) -> str:
    """The text of an error; str() of a third-party error may fail."""
    try:
        return str(error)
    except Exception:
        return ""


class RushError(Exception):
    """An error that the user can understand and fix."""

    exit_code = 1

    def __str__(self) -> str:
        return readable(super().__str__())


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


class CannotWrite(MachineError):
    """A file could not be written: the disk is full or read-only, or forbids it."""


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
    """The end of a message: allowed words with the same prefix, or else the nearest one, and the list of all."""
    names = sorted(allowed)
    begun = [name for name in names if found and name.startswith(found)]
    close = begun[:3] or difflib.get_close_matches(found, names, n=1, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, close))}? Allowed" if close else "allowed"
    return f"{hint}: {', '.join(names)}."
