"""The inside of a kernel bench: `python -m rush.bench.kernel_process SPEC`.

Measures the ops of the spec, one after another, and writes each op's rows to a separate file after every
size. A kernel that crashes the device ends this process; the parent sees which op it was, records it, and
starts another process for the rest. Progress goes to standard output, one JSON object per line.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import rush.kernels
from rush.bench.kernel_bench import MARK, empty_op
from rush.bench.kernel_measure import BenchDevice, DeviceLost, measure_size, one_line
from rush.bench.kernel_targets import targets_of
from rush.files import json_safe, write_json_atomic
from rush.hardware import ceilings, conditions, probe, stopwatch
from rush.hardware.stopwatch import QUICK, Effort
from rush.kernels.study import load
from rush.lab.trial.parent_death import die_with_parent
from rush.version import __version__


def main(spec_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    die_with_parent(spec["parent"])
    folder = Path(spec["folder"])
    (folder / "ops").mkdir(exist_ok=True)
    _report(doing="the machine and its ceilings")
    place, machine = _prepare(spec, folder)
    for name in spec["ops"]:
        key = _key(name, machine.fingerprint(), spec["quick"])
        if _known(folder, name) == key:
            _report(op=name, done=True, known=True)
            continue
        _report(op=name, doing="starting")
        _measure_or_note(name, key, place, folder)
        _report(op=name, done=True)
    write_json_atomic(folder / "environment.json", conditions(machine).to_dict())


def _prepare(spec: dict[str, Any], folder: Path) -> tuple[BenchDevice, Any]:
    machine = probe(spec["device"])
    if machine.device != "cuda":
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is imported, which is when Triton decides
    dtypes = ("float32",) if machine.device == "cpu" else ("bfloat16", "float8", "int8")
    rates = ceilings(machine, dtypes).rates()
    described = {"machine": machine.to_dict(), "ceilings": rates, "packages": _packages()}
    write_json_atomic(folder / "machine.json", json_safe(described)[0])
    effort = QUICK if spec["quick"] else Effort()
    cpp = machine.device == "cpu" and _has_cpp()
    return BenchDevice(torch.device(machine.device), rates, effort, spec["quick"], cpp), machine


def _has_cpp() -> bool:
    """Whether kernels in C++ can run here; they are built now, if they can, and not while something is timed."""
    from rush.kernels import cpu

    if cpu.cannot_run() is not None:
        return False
    cpu.load()
    return True


def _packages() -> dict[str, str]:
    """The libraries whose kernels are contenders, as far as they are installed, and their versions."""
    found = {}
    for name in ("triton", "liger-kernel", "cut-cross-entropy", "flash-attn", "torchao", "bitsandbytes"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _measure_or_note(name: str, key: str, place: BenchDevice, folder: Path) -> None:
    """Measure an op; an exception is noted, unless the device is lost with it."""
    op = empty_op(name) | {"key": key, "complete": False}
    began = time.monotonic()
    try:
        _measure(name, op, place, folder)
    except DeviceLost:
        raise
    except Exception as problem:
        traceback.print_exc()
        op |= {"status": "failed", "reason": one_line(problem)}
    op |= {"complete": True, "seconds": time.monotonic() - began}
    _write(folder, op)


def _measure(name: str, op: dict[str, Any], place: BenchDevice, folder: Path) -> None:
    from rush.kernels import support

    study = load(name)
    support.CPP_FIRST = place.device.type == "cpu" and not place.interpreted(study)
    sizes = place.sizes(study)
    op |= {"about": study.about, "bound": study.bound, "axis": study.axis}
    op["dtype"] = str(place.dtype(study)).removeprefix("torch.")
    _write(folder, op)
    for size in sizes:
        op["rows"] += measure_size(study, size, place, lambda text: _report(op=name, doing=text))
        _write(folder, op)
    op["targets"] = targets_of(study, sizes, op["rows"]) if place.device.type == "cuda" else []


def _write(folder: Path, op: dict[str, Any]) -> None:
    write_json_atomic(folder / "ops" / f"{op['op']}.json", json_safe(op)[0])


def _known(folder: Path, name: str) -> str | None:
    """The key of an op that was measured whole."""
    path = folder / "ops" / f"{name}.json"
    if not path.exists():
        return None
    op = json.loads(path.read_text())
    return str(op["key"]) if op["complete"] and op["status"] == "ok" else None


def _key(name: str, fingerprint: str, quick: bool) -> str:
    """What a measurement depends on: the machine, the libraries there, the kernel's and the bench's own code."""
    root = Path(rush.kernels.__file__).parent
    files = [
        *sorted(path for path in (root / name).iterdir() if path.is_file()),
        *sorted(root.glob("*.py")),
        *sorted(path for path in (root / "cpu").iterdir() if path.is_file()),
        *sorted(Path(__file__).parent.glob("kernel_*.py")),
        Path(stopwatch.__file__),
    ]
    digest = hashlib.sha256(f"{fingerprint} {quick} {__version__} {_packages()}".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _report(**words: Any) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(words)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
