"""Starting processes: trials and `rush` commands, forked from one that has imported everything and done nothing else.

Importing torch and this package takes seconds, on some machines a quarter of a minute, and a ladder starts
dozens of trials. So one process (`python -m rush.lab.trial.starter`) imports once and then forks a child for each trial or
command. It never computes, and opens no device: a child starts like a process that has just finished its imports, without warm
caches. Where forking is not safe (anything but Linux) a child is a new process.

Every child leads its own session, so that ending it ends everything it started.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from rush import version
from rush.lab.trial.parent_death import die_with_parent
from rush.techniques import registry

PRELOADED = ("rush.lab.trial.process", "torch._dynamo", "torch.profiler", "torch.nn.attention.flex_attention")
COMMANDS = (
    "numpy.ma",
    "rush.api",
    "rush.cli",
    "rush.hardware.collectives",
    "rush.hardware.launch_rate",
    "rush.parallel.launching",
    "rush.parallel.restarts",
    "rush.hub.export",
    "rush.hub.tokenizers",
    "rush.report.redraw",
    "rush.training.loop",
)
"""What `rush train`, `rush generate` and their like import only when they are called: for a starter of such commands."""
ANSWER_S = 300.0
"""How long the imports may take; a machine with a cold disk needs a minute."""


@dataclass(frozen=True)
class Streams:
    """The files that a command reads and writes instead of a terminal; every further process has its own."""

    stdin: Path
    stdout: Path
    stderr: Path

    def of(self, place: int) -> list[str]:
        written = [path.with_name(f"{path.name}.{place}" if place else path.name) for path in (self.stdout, self.stderr)]  # fmt: skip
        return [str(path) for path in (self.stdin, *written)]


class Starter:
    """Starts one trial after another; the forking process is made when the first is asked for."""

    def __init__(
        self,
        preloaded: Sequence[str] = (),
        *,
        fork: bool = sys.platform == "linux",
        dismantle: bool = True,
        line: Callable[[Sequence[str]], Connection] | None = None,
    ) -> None:
        self._preloaded = preloaded
        """Further modules that trials will need."""
        self._fork = fork
        """Whether children are forked; otherwise each is `python -m rush` and imports everything itself, as a user's does."""
        self._dismantle = dismantle
        """Whether a finished `rush` command finalizes its interpreter, as a user's does. That takes longer than a tiny command
        itself; without it, threads are still joined and exit callbacks still run."""
        self._given_line = line
        """Connects to a forking process that somebody else started, which has imported the modules it is called with
        (`serve`); None: this starts one of its own."""
        self._server: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None

    def run(
        self, spec: Path, result: Path, log: Path, extra: Mapping[str, str], limit_s: float
    ) -> int | None:
        """Run a trial to its end; its exit code (negative: the signal it died of), or None if it ran past the limit."""
        if not self._fork:
            return run_plainly(spec, result, log, extra, limit_s)
        streams = [os.devnull, str(log), str(log)]
        trial = {"spec": str(spec), "result": str(result), "streams": streams, "environment": dict(extra)}
        codes = self._children([trial], limit_s, None)
        return None if codes is None else codes[0]

    def rush(
        self,
        words: Sequence[str],
        streams: Streams,
        environments: Sequence[Mapping[str, str]],
        limit_s: float,
        kill_when: Callable[[], bool] | None = None,
    ) -> list[int] | None:
        """Run `rush WORDS` to its end, in a process for each environment; their exit codes, as `run` gives them.

        All of them are killed (SIGKILL) as soon as `kill_when` says so; it is asked every millisecond at first, and after
        ten seconds every five: a run that has taken long so far will take longer still.
        """
        children = [
            {
                "words": list(words),
                "streams": streams.of(place),
                "environment": dict(extra),
                "dismantle": self._dismantle,
            }
            for place, extra in enumerate(environments)
        ]
        if not self._fork:
            return _rush_plainly(children, limit_s, kill_when)
        return self._children(children, limit_s, kill_when)

    def _children(
        self, children: Sequence[Mapping[str, Any]], limit_s: float, kill_when: Callable[[], bool] | None
    ) -> list[int] | None:
        """Fork these children and wait for all of them; None if they ran past the limit."""
        line = self._connect()
        pids: list[int] = []
        late = False
        try:
            line.send_bytes(json.dumps(children).encode())
            if not line.poll(ANSWER_S):
                raise EOFError
            pids = json.loads(line.recv_bytes())
            late = not _wait(line.poll, limit_s, kill_when, lambda: _kill(pids))
            if late:
                for pid in pids:
                    end_session(pid)
            codes: list[int] = json.loads(line.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            # The forking process itself was killed, and its children died with it.
            self.close()
            return [-signal.SIGKILL] * len(children)
        except BaseException:
            self.close()
            raise
        finally:
            for pid in pids:
                end_session(pid)
        return None if late else codes

    def close(self) -> None:
        """End the forking process, and with it a trial that may be running."""
        if self._line is not None:
            self._line.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._server = self._line = None

    def _connect(self) -> Connection:
        if self._line is None and self._given_line is not None:
            self._line = self._given_line(self._preloaded)
        if self._line is None:
            self._line, far = Pipe()
            with far:
                self._server = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "rush.lab.trial.starter",
                        str(os.getpid()),
                        str(far.fileno()),
                        *self._preloaded,
                    ],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the ladder, which ends its trial and this
                    pass_fds=[far.fileno()],
                    env=environment({}),
                )
        return self._line


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with this package importable, and what is given."""
    root = str(Path(version.__file__).resolve().parents[1])
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, before] if before else [root]), **extra}


def end_session(session: int) -> None:
    """Kill the leader of a session, if it still lives, and all it started."""
    for candidate in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):  # it ended just now; or is another user's
            if os.getsid(candidate) == session:
                os.kill(candidate, signal.SIGKILL)


def run_plainly(spec: Path, result: Path, log: Path, extra: Mapping[str, str], limit_s: float) -> int | None:
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rush.lab.trial.process", str(spec), str(result)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment(extra),
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_session(process.pid)
            process.wait()


def _rush_plainly(
    children: Sequence[Mapping[str, Any]], limit_s: float, kill_when: Callable[[], bool] | None
) -> list[int] | None:
    processes = []
    for child in children:
        stdin, stdout, stderr = child["streams"]
        with open(stdin, "rb") as read, open(stdout, "wb") as out, open(stderr, "wb") as err:
            command = [sys.executable, "-m", "rush", *child["words"]]
            surroundings = environment(child["environment"])
            processes.append(
                subprocess.Popen(
                    command, stdin=read, stdout=out, stderr=err, start_new_session=True, env=surroundings
                )
            )

    def ended(wait_s: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(wait_s)
            return True
        return False

    pids = [process.pid for process in processes]
    try:
        in_time = _wait(ended, limit_s, kill_when, lambda: _kill(pids))
    finally:
        for process in processes:
            end_session(process.pid)
            process.wait()
    return [process.returncode for process in processes] if in_time else None


def _wait(
    ended: Callable[[float], bool],
    limit_s: float,
    kill_when: Callable[[], bool] | None,
    kill: Callable[[], None],
) -> bool:
    """Wait until `ended`, which itself waits for as long as it is told; kill on the way when asked to. False: too late."""
    began = time.monotonic()
    deadline = began + limit_s
    while kill_when is not None and not ended(max(0.001, min(0.005, (time.monotonic() - began) / 2000))):
        if time.monotonic() > deadline:
            return False
        if kill_when():
            kill()
            break
    return ended(max(0.0, deadline - time.monotonic()))


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def preload(names: Sequence[str]) -> None:
    """Import what trials need, and these modules."""
    for name in (*PRELOADED, *names):
        importlib.import_module(name)
    registry()
    if "rush.cli" in sys.modules:
        sys.modules["rush.cli"].command()
    # Children share these objects' memory until they write to it, and a collection writes to every object it looks at.
    gc.collect()
    gc.freeze()


def serve(line: Connection) -> None:
    """Fork the children of every request, report their pids, wait for them, report how they ended."""
    while True:
        try:
            children: list[dict[str, Any]] = json.loads(line.recv_bytes())
        except EOFError:
            return
        pids = []
        for child in children:
            pid = os.fork()
            if pid == 0:
                line.close()
                _be_child(child)
                return
            pids.append(pid)
        line.send_bytes(json.dumps(pids).encode())
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        line.send_bytes(json.dumps([os.waitstatus_to_exitcode(status) for status in statuses]).encode())


def _be_child(child: Mapping[str, Any]) -> None:
    os.setsid()
    modes = (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND] * 2)
    for number, (path, mode) in enumerate(zip(child["streams"], modes, strict=True)):
        opened = os.open(path, mode, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.update(child["environment"])
    if (threads := child["environment"].get("OMP_NUM_THREADS")) is not None and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))  # OpenMP read the variable when torch was imported
    if "words" in child:
        die_with_parent(os.getppid())
        # `python -m rush`, which this process becomes; it leaves by the front door, as a user's would.
        sys.argv = ["rush", *child["words"]]
        if child["dismantle"]:
            runpy.run_module("rush", run_name="__main__")
        else:
            _leave_standing()
        return
    from rush.lab.trial.process import main

    main(child["spec"], child["result"], os.getppid())
    # Its result is written. A normal exit would wait for the compiler's workers to start (they are started
    # speculatively, which takes seconds) only to stop them; ending the session ends them too.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _leave_standing() -> None:
    """Run `rush` and end with its exit code, without finalizing the interpreter."""
    code: object = 0
    try:
        runpy.run_module("rush", run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    preload(sys.argv[3:])
    serve(Connection(int(sys.argv[2])))
