"""Requests to the restricted child: one child per process, started on first use, restarted after it died."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from rush.data.guarded.child import LENGTH

KEPT_VARIABLES = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "LANG",
    "TMPDIR",
)
"""No other environment variable reaches the child: it must not see tokens and keys."""
PATIENCE = 200
"""Allowed wall-clock time per CPU time: the machine may be busy, and the kernel stops endless loops by CPU time."""
START_S = 60.0
LOOK_S = 0.05
CHUNK = 1 << 20


class Refused(Exception):
    """The untrusted code raised an error: its message."""


class Exhausted(Exception):
    """The child reached a limit or died: the reason, as the end of a sentence."""


class _Child:
    def __init__(self) -> None:
        script = Path(__file__).with_name("child.py")
        known = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=known | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
        )
        self.fresh = True

    def ask(self, request: Mapping[str, Any], cpu_s: float, memory_bytes: int) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE * cpu_s + (START_S if self.fresh else 1.0)
        self.fresh = False
        written = json.dumps(request).encode()
        with contextlib.suppress(BrokenPipeError):  # then there is no reply either
            self._write(memoryview(LENGTH.pack(len(written)) + written))
        (size,) = LENGTH.unpack(self._read(LENGTH.size, until, memory_bytes))
        reply: dict[str, Any] = json.loads(self._read(size, until, memory_bytes))
        return reply

    def _write(self, rest: memoryview) -> None:
        assert self.process.stdin is not None
        while rest:
            rest = rest[os.write(self.process.stdin.fileno(), rest) :]

    def _read(self, size: int, until: float, memory_bytes: int) -> bytes:
        assert self.process.stdout is not None
        source = self.process.stdout.fileno()
        parts: list[bytes] = []
        while size:
            if select.select([source], [], [], LOOK_S)[0]:
                part = os.read(source, min(size, CHUNK))
                if not part:
                    raise Exhausted(self._death())
                parts.append(part)
                size -= len(part)
            elif time.monotonic() > until:
                raise Exhausted("did not end in time")
            elif sys.platform == "darwin" and _memory_of(self.process.pid) > memory_bytes:
                raise Exhausted("needs too much memory")
        return b"".join(parts)

    def _death(self) -> str:
        code = self.process.wait()
        if code == -signal.SIGPROF:
            return "does not end: it used all the processor time that is allowed"
        if code == -signal.SIGABRT:
            return "asks for more memory than is allowed, or aborts"
        return f"ended its process ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def stop(self) -> None:
        self.close()
        self.process.kill()
        self.process.wait()


def _memory_of(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


_lock = threading.Lock()
_child: _Child | None = None


def ask(home: str, call: str, arguments: Mapping[str, Any], *, cpu_s: float, memory_bytes: int) -> Any:
    """The value of a function of `rendering.py` or `trial.py`, called in the child."""
    global _child
    request = {
        "home": home,
        "call": call,
        "arguments": arguments,
        "cpu_s": cpu_s,
        "memory_bytes": memory_bytes,
    }
    with _lock:
        if _child is None:
            _child = _Child()
        try:
            reply = _child.ask(request, cpu_s, memory_bytes)
        except BaseException:  # also after an interrupt: a late reply would be taken for the next request's
            _child.stop()
            _child = None
            raise
    if "refused" in reply:
        raise Refused(reply["refused"])
    if "exhausted" in reply:
        raise Exhausted("asks for more memory than is allowed")
    return reply["value"]


def _forget() -> None:
    """In a forked process: the child belongs to the parent, and two must not speak to it at once."""
    global _child, _lock
    _lock = threading.Lock()
    if _child is not None:
        _child.process.returncode = 0  # not ours to wait for
        _child.close()
        _child = None


def _stop() -> None:
    if _child is not None:
        _child.stop()


os.register_at_fork(after_in_child=_forget)
atexit.register(_stop)
