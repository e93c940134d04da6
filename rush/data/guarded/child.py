"""The restricted child: reads a request, sets its limits, answers, and waits for the next.

Executed as a file by `process.py`. Requests and replies are length-prefixed JSON: nothing is unpickled on either side. At the
limit of CPU time the kernel ends this process (SIGPROF); at the limit of memory Python raises MemoryError, and libraries in
other languages abort.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")
LONGEST_REASON = 500


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    while header := requests.read(LENGTH.size):
        (size,) = LENGTH.unpack(header)
        request = json.loads(requests.read(size))
        written = json.dumps(_answer(request)).encode()
        replies.write(LENGTH.pack(len(written)) + written)
        replies.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    home = load(request["home"])
    limit_memory(request["memory_bytes"])
    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
    try:
        value = getattr(home, request["call"])(**request["arguments"])
        json.dumps(value)  # within the limits
        return {"value": value}
    except MemoryError:
        return {"exhausted": "memory"}
    except RecursionError:
        return {"refused": "it recurses or is nested too deeply"}
    except BaseException as error:  # a panic of a library is no Exception
        return {"refused": str(error)[:LONGEST_REASON] or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        limit_memory(None)


def load(name: str, loaded: dict[str, ModuleType] = {}) -> ModuleType:  # noqa: B006 — a cache
    """Import a file of this folder without its package."""
    if name not in loaded:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        loaded[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded[name])
    return loaded[name]


def limit_memory(room_bytes: int | None) -> None:
    """Limit the address space. macOS has no such limit: there the parent checks the memory in use."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = hard if room_bytes is None else room_bytes
    try:
        resource.setrlimit(
            resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
        )
    except (ValueError, OSError):
        return


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    serve(sys.stdin.buffer, sys.stdout.buffer)
