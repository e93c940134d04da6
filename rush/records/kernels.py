"""The record of a kernel bench: what `kernels.json` holds, checked when it is written and when it is read.

One record has a machine, its ceilings and the ops; each op has rows, one per size, contender and pass, with
raw samples and their interval, what that is of the ceiling, the memory it took, and whether the contender
computed the right thing at that size. Statuses and verdicts are closed lists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from rush.errors import DataError
from rush.files import write_json_atomic
from rush.records.checked import check_head, check_in, check_measured, check_of, read_json

FORMAT = 1
FILE = "kernels.json"
OP_STATUSES = ("ok", "failed", "crashed", "timed_out")
ROW_STATUSES = ("ok", "untimed", "absent", "refused", "out_of_memory", "failed")
"""`untimed`: checked, but no speed is to be had here (interpreted). `absent`: not installed, or for other machines."""
KINDS = ("ours", "plain", "compiled", "rival")
PASSES = ("forward", "backward", "both")
CORRECTNESS = ("equal", "different", "not judged")
TARGET_VERDICTS = ("reached", "missed", "not measured")
RENAMED_OPS = {"biased": "bias_grad", "norm_of_all": "grad_norm"}
"""Op names in older records, and what they are called now."""


class KernelTime(TypedDict):
    median: float
    ci95: list[float]
    n: int
    samples: list[float]


class KernelRow(TypedDict, total=False):
    """One contender at one size in one pass. Figures are None unless it was timed."""

    size: str
    dims: dict[str, int]
    series: str
    contender: str
    kind: str
    step: str
    """The pass: forward, backward or both."""
    status: str
    reason: str | None
    time_ms: KernelTime | None
    bytes: float | None
    flops: float | None
    bytes_per_s: float | None
    flops_per_s: float | None
    ceiling_fraction: float | None
    peak_extra_bytes: int | None
    """The most memory it held beyond its inputs, over forward and backward."""
    beyond_results_bytes: int | None
    """The same without the results and gradients that every contender has to return."""
    correctness: dict[str, Any] | None
    first_call_s: float | None


class KernelOp(TypedDict, total=False):
    op: str
    key: str
    about: str
    bound: str
    axis: str
    dtype: str
    status: str
    reason: str | None
    complete: bool
    seconds: float
    rows: list[KernelRow]
    targets: list[dict[str, Any]]


class KernelRecord(TypedDict, total=False):
    format: int
    started: str
    finished: str | None
    quick: bool
    interpreted: bool
    machine: dict[str, Any]
    ceilings: dict[str, Any] | None
    packages: dict[str, str]
    environment: dict[str, Any]
    formulas: dict[str, str]
    ops: list[KernelOp]


def write_kernels(folder: Path, record: KernelRecord) -> None:
    """Check the record and replace the file in one piece."""
    check_kernels(record, str(folder / FILE))
    write_json_atomic(folder / FILE, record)


def read_kernels(path: Path) -> KernelRecord:
    """The record in a file or in a bench's folder; a DataError when it is something else."""
    tree, file = read_json(path, FILE, "kernel bench", "rush bench kernels")
    check_kernels(tree, str(file))
    record: KernelRecord = tree
    for op in record["ops"]:
        op["op"] = RENAMED_OPS.get(op["op"], op["op"])
    return record


def check_kernels(tree: Any, where: str) -> None:
    """Raise a DataError that names the first thing that is not as it should be."""
    check_head(tree, "kernel bench", FORMAT, where)
    for key, kind in (("started", str), ("machine", dict), ("ops", list), ("formulas", dict)):
        check_of(tree, key, kind, where)
    for index, op in enumerate(tree["ops"]):
        _check_op(op, f"{where}: ops[{index}]")


def _check_op(op: Any, where: str) -> None:
    for key, kind in (("op", str), ("rows", list), ("targets", list)):
        check_of(op, key, kind, where)
    check_in(op, "status", OP_STATUSES, where)
    if op["status"] != "ok" and not op.get("reason"):
        raise DataError(f"{where}: status is {op['status']} without a reason.")
    for index, row in enumerate(op["rows"]):
        _check_row(row, f"{where}.rows[{index}]")
    for index, target in enumerate(op["targets"]):
        check_in(target, "verdict", TARGET_VERDICTS, f"{where}.targets[{index}]")


def _check_row(row: Any, where: str) -> None:
    for key in ("size", "contender"):
        check_of(row, key, str, where)
    check_in(row, "kind", KINDS, where)
    check_in(row, "step", PASSES, where)
    check_in(row, "status", ROW_STATUSES, where)
    correctness = row.get("correctness")
    if correctness is not None:
        check_of(row, "correctness", dict, where)
        check_in(correctness, "verdict", CORRECTNESS, f"{where}.correctness")
    if row["status"] != "ok":
        if not row.get("reason"):
            raise DataError(f"{where}: status is {row['status']} without a reason.")
        return
    if correctness is None:
        raise DataError(f"{where}: a time without a check of what was computed is not a finding.")
    check_measured(row.get("time_ms"), f"{where}.time_ms")
