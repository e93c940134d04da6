"""Starting a trial's process: forked from one that has imported everything and done nothing else.

Importing torch and this package takes seconds, on some machines a quarter of a minute, and a ladder starts
dozens of trials. So one process (`python -m rush.lab.starter`) imports once and then forks a child for each
trial. It never computes, and opens no device: a child begins as a process that has just
finished its imports, with nothing warm. Where forking is not safe (anything but Linux) a trial is started
the plain way.

The child leads a session of its own, so that ending it ends everything it started.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

import rush

PRELOADED = ("rush.lab.trial_process", "torch._dynamo", "torch.profiler", "torch.nn.attention.flex_attention")
ANSWER_S = 300.0
"""How long the imports may take; a machine with a cold disk needs a minute."""


class Starter:
    """Starts one trial after another; the forking process is made when the first is asked for."""

    def __init__(self, preloaded: Sequence[str] = ()) -> None:
        self._preloaded = preloaded
        """Further modules that trials will need."""
        self._server: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None

    def run(
        self, spec: Path, result: Path, log: Path, extra: Mapping[str, str], limit_s: float
    ) -> int | None:
        """Run a trial to its end; its exit code (negative: the signal it died of), or None if it ran past the limit."""
        if sys.platform != "linux":
            return _run_plainly(spec, result, log, extra, limit_s)
        line = self._connect()
        order = {"spec": str(spec), "result": str(result), "log": str(log), "environment": dict(extra)}
        pid = None
        late = False
        try:
            line.send_bytes(json.dumps(order).encode())
            if not line.poll(ANSWER_S):
                raise EOFError
            pid = int(line.recv_bytes())
            late = not line.poll(limit_s)
            if late:
                end_session(pid)
            code = int(line.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            # The forking process itself was killed, and its child died with it.
            self.close()
            return -signal.SIGKILL
        except BaseException:
            self.close()
            raise
        finally:
            if pid is not None:
                end_session(pid)
        return None if late else code

    def close(self) -> None:
        """End the forking process, and with it a trial that may be running."""
        if self._line is not None:
            self._line.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._server = self._line = None

    def _connect(self) -> Connection:
        if self._line is None:
            self._line, far = Pipe()
            with far:
                self._server = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "rush.lab.starter",
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
    root = str(Path(rush.__file__).resolve().parents[1])
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, before] if before else [root]), **extra}


def end_session(session: int) -> None:
    """Kill the leader of a session, if it still lives, and all it started."""
    for candidate in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):  # it ended just now; or is another user's
            if os.getsid(candidate) == session:
                os.kill(candidate, signal.SIGKILL)


def _run_plainly(spec: Path, result: Path, log: Path, extra: Mapping[str, str], limit_s: float) -> int | None:
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rush.lab.trial_process", str(spec), str(result)],
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


def _serve(line: Connection, preloaded: Sequence[str]) -> None:
    """Fork a child for every order, tell its number, wait for it, tell how it ended."""
    for name in (*PRELOADED, *preloaded):
        importlib.import_module(name)
    while True:
        try:
            order: dict[str, Any] = json.loads(line.recv_bytes())
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            line.close()
            _be_trial(order)
            # Its result is written. Leaving by the front door would wait for the compiler's workers to start (they are
            # made on suspicion, and take seconds) only to stop them; ending the session ends them too.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        line.send_bytes(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        line.send_bytes(str(os.waitstatus_to_exitcode(status)).encode())


def _be_trial(order: Mapping[str, Any]) -> None:
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.environ.update(order["environment"])
    from rush.lab.trial_process import main

    main(order["spec"], order["result"], os.getppid())


if __name__ == "__main__":
    from rush.lab.dying import die_with_parent

    die_with_parent(int(sys.argv[1]))
    _serve(Connection(int(sys.argv[2])), sys.argv[3:])
