"""The kernel bench: each op against plain torch, compiled torch and the libraries that are installed.

The ops are measured in a separate process, one after another. A kernel that crashes the device or hangs loses only
one op: it is recorded with its reason, and another process measures the rest. Results are stored per op, keyed by the
machine and the code, so an interrupted bench resumes, and a changed kernel is measured again.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from rush.errors import MachineError, RecipeError, nearest
from rush.files import timestamp, write_json_atomic
from rush.kernels.study import names
from rush.lab.trial.starter import end_session, environment
from rush.lab.trial.trial import compiler_caches
from rush.records.kernels import (
    FILE,
    FORMAT,
    RENAMED_OPS,
    KernelOp,
    KernelRecord,
    read_kernels,
    write_kernels,
)
from rush.records.lock import FolderLock

MARK = "@bench "
"""Prefix of the measuring process's messages on standard output, where compilers and libraries print, too."""
PROCESS = "rush.bench.kernel_process"
LIMIT_S = 240.0
"""Seconds without output after which an op is ended; compiling one function takes seconds."""

FORMULAS = {
    "time_ms": "device time by events (on a CPU the clock), the cache overwritten and the host ahead before each call; "
    "contenders take turns; the median over the samples of one process",
    "ci95": "bootstrap over the samples, 4000 draws",
    "forward": "as in training: activations for the backward pass are saved",
    "bytes": "every input read once and every result written once, in each pass",
    "flops": "every matmul computed once; recomputation is not counted",
    "ceiling_fraction": "bytes (memory-bound ops) or FLOPs (matmul-bound ops) over the time, over the copy or matmul rate "
    "measured on this machine",
    "peak_extra_bytes": "the most that was held beyond the inputs, forward and backward",
    "beyond_results_bytes": "the same less the results and gradients, which every contender must return",
    "correctness": "root mean square error relative to the exact result; equal if at most twice (results) or three times "
    "(gradients) that of plain torch in the same dtype",
}  # fmt: skip


Watch = Callable[[str, str, int, int], None]
"""Called with the measured item, the current action, and how many of the items are done."""


def choose(asked: Sequence[str]) -> list[str]:
    """The ops to measure: those asked for, or all; a RecipeError for a name that is none."""
    known, asked = names(), [RENAMED_OPS.get(name, name) for name in asked]
    for name in asked:
        if name not in known:
            raise RecipeError(f"there is no kernel named {name!r}; {nearest(name, known)}")
    return list(dict.fromkeys(asked)) or known


def bench_kernels(
    ops: Sequence[str],
    folder: Path,
    *,
    quick: bool = False,
    device: str = "auto",
    watch: Watch = lambda *_: None,
) -> KernelRecord:
    """Measure these ops into `folder`, or resume the bench there. Writes and returns the record."""
    chosen = choose(ops)
    if find_spec("triton") is None:
        raise MachineError(
            "the kernels need Triton, which is not installed (also where they are only interpreted): "
            'pip install "optimization-rush[kernels]".'
        )
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder):
        (folder / "ops").mkdir(exist_ok=True)
        started = read_kernels(folder)["started"] if (folder / FILE).exists() else timestamp()
        left = list(chosen)
        while left:
            child = _Child(left, folder, quick, device)
            left = child.watch(watch, len(chosen))
        record = assemble(folder, chosen, started, quick)
        write_kernels(folder, record)
    return record


def assemble(folder: Path, ops: Sequence[str], started: str, quick: bool) -> KernelRecord:
    """The record from what the processes wrote; ops measured earlier into the same folder stay in it."""
    described = json.loads((folder / "machine.json").read_text())
    around = folder / "environment.json"
    order = sorted({*ops, *(path.stem for path in (folder / "ops").glob("*.json"))})
    found: list[KernelOp] = [json.loads((folder / "ops" / f"{name}.json").read_text()) for name in order]
    return {
        "format": FORMAT,
        "started": started,
        "finished": timestamp(),
        "quick": quick,
        "interpreted": any(row["status"] == "untimed" for op in found for row in op["rows"]),
        "machine": described["machine"],
        "ceilings": described["ceilings"],
        "packages": described["packages"],
        "environment": json.loads(around.read_text()) if around.exists() else {},
        "formulas": FORMULAS,
        "ops": found,
    }


class _Child:
    """One process that measures ops until it is done or crashes."""

    def __init__(self, ops: Sequence[str], folder: Path, quick: bool, device: str) -> None:
        self.ops, self.folder = list(ops), folder
        spec = {
            "ops": self.ops,
            "folder": str(folder.resolve()),
            "quick": quick,
            "device": device,
            "parent": os.getpid(),
        }
        write_json_atomic(folder / "spec.json", spec)
        self.log = folder / "log.txt"
        with open(self.log, "ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", PROCESS, str(folder / "spec.json")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=environment(compiler_caches((folder / "work").resolve())),
            )

    def watch(self, watch: Watch, total: int) -> list[str]:
        """Wait for it, report its progress, and return the ops that are still to be measured."""
        lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        assert self.process.stdout is not None
        reader = threading.Thread(target=_read, args=(self.process.stdout, lines), daemon=True)
        reader.start()
        op: str | None = None
        left, late = list(self.ops), False
        try:
            while True:
                try:
                    message = lines.get(timeout=LIMIT_S)
                except queue.Empty:
                    late = True
                    break
                if message is None:
                    break
                op = message.get("op", op)
                if message.get("done"):
                    assert op is not None
                    left.remove(op)
                watch(op or "machine", message.get("doing", "done"), total - len(left), total)
                op = None if message.get("done") else op
        finally:
            end_session(self.process.pid)
            code = self.process.wait()
            reader.join()
            self.process.stdout.close()
        if not left:
            return []
        if op is None:
            raise MachineError(f"the kernel bench could not start: {self._why(code, late)}; see {self.log}.")
        self._note_loss(op, code, late)
        left.remove(op)
        return left

    def _note_loss(self, name: str, code: int, late: bool) -> None:
        """Keep the sizes that were measured and record why there are no more."""
        path = self.folder / "ops" / f"{name}.json"
        op = json.loads(path.read_text()) if path.exists() else empty_op(name)
        status = "timed_out" if late else "crashed" if code < 0 else "failed"
        op |= {"status": status, "reason": self._why(code, late), "complete": True}
        write_json_atomic(path, op)

    def _why(self, code: int, late: bool) -> str:
        if late:
            return f"no output for {LIMIT_S:g} s, and was ended"
        tail = self.log.read_bytes()[-2000:].decode("utf-8", "replace")
        words = [line.strip() for line in tail.splitlines() if line.strip()]
        last = f": {words[-1][:300]}" if words else ""
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        return f"the process {how}{last}"


def _read(stream: IO[bytes], lines: queue.Queue[dict[str, Any] | None]) -> None:
    for line in stream:
        text = line.decode("utf-8", "replace")
        if text.startswith(MARK):
            lines.put(json.loads(text[len(MARK) :]))
    lines.put(None)


def empty_op(name: str) -> dict[str, Any]:
    """An op of which nothing is known yet."""
    empty: dict[str, Any] = {"op": name, "key": "", "about": "", "bound": "memory", "axis": "", "dtype": ""}
    return {**empty, "status": "ok", "reason": None, "seconds": 0.0, "rows": [], "targets": []}
