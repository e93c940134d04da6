"""How a command ends, whatever it meets on its way out.

A run's result is complete when its command has spoken its last word. What comes after that can only spoil it: a callback of
`atexit` that raises prints a traceback; a thread that is caught inside C++ while the interpreter is taken down, or a
destructor that meets a broken device, aborts the process with exit code 134. So the interpreter is not taken down. Threads are
waited for and callbacks run as always, what they raise is told in one sentence and logged, and then the process leaves
with the exit code of what it did.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from rush.files import append_log
from rush.version import __version__

LOG = "failure.log"
Tell = Callable[[BaseException, str], None]
"""Told what was raised and where, as in "at exit": says it in one sentence and logs it."""


@dataclass
class Ending:
    """The exit code this process is to leave with."""

    code: int = 1


def leave_surely() -> Ending:
    """Leave with the code of the returned object once threads and callbacks are done, before the interpreter is taken down."""
    ending, process = Ending(), os.getpid()

    def leave() -> None:
        if os.getpid() != process:
            return  # a fork of this process, which has an end of its own
        with suppress(Exception):
            logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(ending.code)

    atexit.register(leave)  # the first to be registered is the last to run
    return ending


def tell_by(tell: Tell) -> None:
    """Who speaks, from now on, of what is raised where nobody can catch it."""
    global _tell
    _tell = tell


def catch_the_rest() -> None:
    """One sentence instead of a traceback for what nobody can catch: in callbacks at exit, destructors and threads."""

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        if found.exc_value is not None:
            at_exit = "atexit" in (found.err_msg or "")
            _tell(found.exc_value, "at exit, when the work was done" if at_exit else "in a destructor")

    def in_thread(found: threading.ExceptHookArgs) -> None:
        if found.exc_value is not None and not isinstance(found.exc_value, SystemExit):
            _tell(found.exc_value, f"in the thread {found.thread.name if found.thread else 'that ended'}")

    sys.unraisablehook, threading.excepthook = unraisable, in_thread


def log_unexpected(error: BaseException, at: str, *places: Path) -> str:
    """Log an error that nobody expected, in the first of these files that takes it; where, in words."""
    head = f"=== {time.strftime('%Y-%m-%d %H:%M:%S %z')} ===\nat: {at}\nversions: rush {__version__}, Python {platform.python_version()}\n\n"
    log = append_log(head + "".join(traceback.format_exception(error)) + "\n", *places, *_usual_places())
    return f"The full log is {log}." if log else "No log could be written; --debug shows the traceback."


def say_unexpected(error: BaseException, at: str) -> None:
    """Tell of an error that nobody expected, in one sentence."""
    typer.secho(f"rush: {first_line(error)} {at}. {log_unexpected(error, at)}", err=True, fg="yellow")


_tell: Tell = say_unexpected


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300].rstrip('.')}" if lines else type(error).__name__


def _usual_places() -> list[Path]:
    """`failure.log` in the cache folder, else in the folder for temporary files."""
    base = os.environ.get("XDG_CACHE_HOME")
    chosen = os.environ.get("RUSH_CACHE")
    with suppress(RuntimeError):  # nobody's home
        cache = Path(chosen) if chosen else (Path(base) if base else Path.home() / ".cache") / "rush"
        return [cache / LOG, Path(tempfile.gettempdir()) / f"rush-{LOG}"]
    return [Path(tempfile.gettempdir()) / f"rush-{LOG}"]
