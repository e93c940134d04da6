"""Processes that have imported everything, shared by all workers of a session: what tests start is forked from them.

Importing torch, this package and a compiler takes five to eight seconds of a core, and rooms of tests need processes with
different modules. So one process imports what all of them need; others are forked from it, import the rest, and wait, too.
Each is made by the first test that asks for it. None computes anything: a process that is forked has nothing warm but its
imports.
"""

from __future__ import annotations

import hashlib
import importlib
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rush.lab.scaling import rank_runner
from rush.lab.trial import starter
from rush.lab.trial.parent_death import die_with_parent
from rush.lab.trial.starter import COMMANDS, Starter

ROOT = Path(__file__).resolve().parents[1]
PLACE = "RUSH_TEST_FORKS"
"""Names the folder of a session's sockets; the process that runs the session sets it (`tests/conftest.py`)."""
EVERYBODYS = (*rank_runner.PRELOADED, *COMMANDS)
ANSWER_S = 300.0
_serving: list[int] = []


def shared_starter(preloaded: Sequence[str] = (), *, dismantle: bool = False) -> Starter:
    """A starter whose forking process is forked itself, from one that all workers share."""
    return Starter(
        preloaded, dismantle=dismantle, line=lambda names: forked("rush.lab.trial.starter:serve", names)
    )


class Process:
    """`work(*arguments)` in a forked process that has imported these modules."""

    def __init__(
        self, work: Callable[..., Any], *arguments: Any, preloaded: Sequence[str] = (), run: bool = True
    ) -> None:
        self.line = forked("tests.forks:run_work", preloaded)
        self._work, self._told = (work, arguments), dict[str, Any]()
        if run:
            self.start()

    def start(self) -> None:
        """Begin. (What comes before is over, where `run` is false: the imports.)"""
        self.line.send(self._work)

    @property
    def pid(self) -> int:
        pid: int = self.tell("pid")
        return pid

    @property
    def exitcode(self) -> int | None:
        """None while it runs; negative: the signal it died of."""
        while "exit" not in self._told and self.line.poll():
            self.hear()
        return self._told.get("exit")

    def join(self, limit_s: float | None = None) -> None:
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while "exit" not in self._told:
            if not self.line.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return
            self.hear()

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it ended just now
            if self.exitcode is None:
                os.kill(self.pid, signal.SIGKILL)

    def tell(self, what: str) -> Any:
        """Its `pid`, its `answer` (whether the work returned, and what; or the traceback), its `exit` code; waited for."""
        while what not in self._told:
            self.hear()
        return self._told[what]

    def hear(self) -> str:
        """Wait for the next thing it tells: what it is."""
        what, value = self.line.recv()
        self._told[what] = value
        return str(what)


def run_work(line: Connection) -> None:
    """Fork a process for the work that `line` brings, and tell what becomes of it."""
    work, arguments = line.recv()
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(line, work, arguments))
    process.start()
    line.send(("pid", process.pid))
    process.join()
    line.send(("exit", process.exitcode))


def _answer(line: Connection, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        answer = work(*arguments)
    except BaseException:
        line.send(("answer", (False, traceback.format_exc())))
        raise
    line.send(("answer", (True, answer)))


def forked(entry: str, preloaded: Sequence[str] = ()) -> Connection:
    """A line to a new process that has imported these modules and calls `entry` ("module:function") with its end of it. It has the
    environment and the working directory of this one."""
    # Triton decides when it is imported whether kernels are interpreted.
    interpreted = os.environ.get("TRITON_INTERPRET", "")
    names = [name for name in preloaded if name not in EVERYBODYS]
    line = _reach(interpreted, _start)
    if names:
        order = _order("tests.forks:wait_for_orders", names=names)
        kind = hashlib.sha256(" ".join([interpreted, *names]).encode()).hexdigest()[:16]
        with line as everybodys:
            line = _reach(kind, lambda place: everybodys.send({**order, "place": str(place)}))
    line.send(_order(entry))
    _serving.append(line.recv())
    return line


def serving() -> list[int]:
    """The processes that were forked for this one."""
    return _serving


def _order(entry: str, **more: object) -> dict[str, object]:
    return {"entry": entry, "environment": dict(os.environ), "folder": os.getcwd(), **more}


def _reach(kind: str, start: Callable[[Path], None]) -> Connection:
    """A line to the waiting process of this kind, which is started if nobody has."""
    folder = Path(os.environ[PLACE])
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"kind-{kind}"
    with suppress(FileExistsError):
        os.close(os.open(place.with_suffix(".started"), os.O_CREAT | os.O_EXCL))
        start(place)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX) as end:
            end.connect(str(place))
            return Connection(end.detach())
        time.sleep(0.05)
    raise TimeoutError(f"no process to fork from; see {folder / 'log'}")


def _start(place: Path) -> None:
    log = os.open(place.with_name("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    command = [sys.executable, "-m", "tests.forks", str(place)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    streams = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    os.posix_spawn(
        sys.executable, command, {**os.environ, "PYTHONPATH": path}, file_actions=streams, setsid=True
    )
    os.close(log)
    os.close(null)


def wait_for_orders(place: Path) -> None:
    """Fork a process for every order, as long as the session lasts."""
    session = int(Path(os.environ[PLACE]).name.rpartition("-")[2])
    with socket.socket(socket.AF_UNIX) as door:
        # Its name appears when it listens.
        door.bind(str(place.with_suffix(".early")))
        door.listen(64)
        place.with_suffix(".early").rename(place)
        door.settimeout(1.0)
        while _runs(session):
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            with suppress(TimeoutError):
                end, _ = door.accept()
                me = os.getpid()
                if os.fork() == 0:
                    door.close()
                    die_with_parent(me)
                    end.setblocking(True)
                    _obey(Connection(end.detach()))
                    os._exit(0)
                end.close()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _obey(line: Connection) -> None:
    try:
        order = line.recv()
    except EOFError:
        return
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    module, _, name = order["entry"].partition(":")
    entry = getattr(importlib.import_module(module), name)
    if "place" in order:
        line.close()
        starter.preload(order["names"])
        entry(Path(order["place"]))
    else:
        line.send(os.getpid())
        entry(line)


if __name__ == "__main__":
    starter.preload(EVERYBODYS)
    wait_for_orders(Path(sys.argv[1]))
    shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)  # of a session that was killed
