"""How a command exits, whatever goes wrong during shutdown.

The result is complete when the command returns. What follows can only damage it: an `atexit` callback that raises prints a
traceback; a thread inside C++ during interpreter finalization, or a destructor on a broken device, aborts the process with
exit code 134. So the interpreter is not finalized. Threads are joined and callbacks run as always, what they raise is logged
and reported in one sentence, and the process exits with the command's code.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import select
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

from rush.errors import text_of
from rush.files import append_log
from rush.interrupts import interrupt_again
from rush.version import __version__

LOG = "failure.log"
Reporter = Callable[[BaseException, str], None]
"""Logs an exception and reports it in one sentence, with where it was raised, as in "at exit"."""


@dataclass
class ExitStatus:
    code: int = 1


def exit_before_finalization() -> ExitStatus:
    """Exit with the code of the returned object once threads and callbacks are done, before the interpreter is finalized."""
    status, process = ExitStatus(), os.getpid()

    def leave() -> None:
        if os.getpid() != process:
            return  # a fork of this process, which exits by itself
        with suppress(Exception):
            logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status.code)

    atexit.register(leave)  # the first to be registered is the last to run
    return status


def set_reporter(reporter: Reporter) -> None:
    """Replace the reporter of exceptions that no caller can catch."""
    global _report
    _report = reporter


def has_exception_hooks() -> bool:
    """Whether this process belongs to the command, which then reports all that ends it."""
    return _hooked


def install_exception_hooks() -> None:
    """One sentence instead of a traceback for exceptions in `atexit` callbacks, destructors and threads. A Ctrl-C during a
    destructor, which Python drops (imports run many), is raised again."""

    global _hooked
    _hooked = True

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        if isinstance(found.exc_value, KeyboardInterrupt):
            interrupt_again()  # raised in here it would be dropped, too
        elif found.exc_value is not None:
            at_exit = "atexit" in (found.err_msg or "")
            _report(found.exc_value, "at exit, after the work was done" if at_exit else "in a destructor")

    def in_thread(found: threading.ExceptHookArgs) -> None:
        if found.exc_value is not None and not isinstance(found.exc_value, SystemExit):
            _report(found.exc_value, f"in the thread {found.thread.name if found.thread else 'that ended'}")

    sys.unraisablehook, threading.excepthook = unraisable, in_thread


class Readers:
    """Copies of standard output and standard error: Rich replaces the originals by /dev/null when a reader has left."""

    def __init__(self) -> None:
        self.copies: list[int] = []
        for stream in (1, 2):
            with suppress(OSError):  # the parent process closed it
                self.copies.append(os.dup(stream))

    def left(self) -> bool:
        """Whether one of them is a pipe that nobody reads any more."""
        watched = select.poll()
        for copy in self.copies:
            watched.register(copy, 0)  # register for errors only, which are always reported
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0))


def log_unexpected(error: BaseException, at: str, *places: Path) -> str:
    """Log an unexpected error to the first of these files that can be written; returns a sentence with its path."""
    head = f"=== {time.strftime('%Y-%m-%d %H:%M:%S %z')} ===\nat: {at}\nversions: rush {__version__}, Python {platform.python_version()}\n\n"
    log = append_log(head + "".join(traceback.format_exception(error)) + "\n", *places, *_usual_places())
    return f"The full log is {log}." if log else "No log could be written; --debug shows the traceback."


def report_unexpected(error: BaseException, at: str) -> None:
    typer.secho(f"rush: {first_line(error)} {at}. {log_unexpected(error, at)}", err=True, fg="yellow")


_hooked = False
_report: Reporter = report_unexpected


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300].rstrip('.')}" if lines else type(error).__name__


def _usual_places() -> list[Path]:
    """`failure.log` in the cache folder, else in the folder for temporary files."""
    base = os.environ.get("XDG_CACHE_HOME")
    chosen = os.environ.get("RUSH_CACHE")
    with suppress(RuntimeError):  # there is no home folder
        cache = Path(chosen) if chosen else (Path(base) if base else Path.home() / ".cache") / "rush"
        return [cache / LOG, Path(tempfile.gettempdir()) / f"rush-{LOG}"]
    return [Path(tempfile.gettempdir()) / f"rush-{LOG}"]
