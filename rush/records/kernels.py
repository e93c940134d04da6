"""The record of a kernel bench: what `kernels.json` holds.

One record has a machine, its ceilings and the ops; each op has rows, one per size, contender and pass, with
raw samples and their interval, what that is of the ceiling, the memory it took, and whether the contender
computed the right thing at that size. Statuses and verdicts are closed lists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import AfterValidator, SkipValidation, TypeAdapter
from typing_extensions import TypedDict

from rush.records.typed import Measurement, RecordFile, having, one_of

FORMAT = 1
FILE = "kernels.json"
RENAMED_OPS = {"biased": "bias_grad", "norm_of_all": "grad_norm"}
"""Op names in older records, and what they are called now."""


class KernelRow(TypedDict, total=False):
    """One contender at one size in one pass. Figures are None unless it was timed."""

    size: Required[str]
    dims: SkipValidation[dict[str, int]]
    series: SkipValidation[str]
    contender: Required[str]
    kind: Required[Annotated[str, one_of("ours", "plain", "compiled", "baseline", "rival")]]
    """Older records say rival for baseline."""
    step: Required[Annotated[str, one_of("forward", "backward", "both")]]
    """The pass."""
    status: Required[Annotated[str, one_of("ok", "untimed", "absent", "refused", "out_of_memory", "failed")]]
    """`untimed`: checked, but not timed here (interpreted). `absent`: not installed, or for other machines."""
    reason: SkipValidation[str | None]
    time_ms: Measurement | None
    bytes: SkipValidation[float | None]
    flops: SkipValidation[float | None]
    bytes_per_s: SkipValidation[float | None]
    flops_per_s: SkipValidation[float | None]
    ceiling_fraction: SkipValidation[float | None]
    peak_extra_bytes: SkipValidation[int | None]
    """The peak memory beyond its inputs, over forward and backward."""
    beyond_results_bytes: SkipValidation[int | None]
    """The same without the results and gradients that every contender has to return."""
    correctness: Annotated[dict[str, Any], having("verdict", "equal", "different", "not judged")] | None
    first_call_s: SkipValidation[float | None]


def _checked(row: KernelRow) -> KernelRow:
    _reasoned(row)
    if row["status"] == "ok" and row.get("correctness") is None:
        raise ValueError("a time without a check of what was computed is not a finding")
    if row["status"] == "ok" and row.get("time_ms") is None:
        raise ValueError("status is ok but time_ms is missing")
    return row


def _reasoned(tree: Any) -> Any:
    if tree["status"] != "ok" and not tree.get("reason"):
        raise ValueError(f"status is {tree['status']} without a reason")
    return tree


class KernelOp(TypedDict, total=False):
    op: Required[str]
    key: SkipValidation[str]
    about: SkipValidation[str]
    bound: SkipValidation[str]
    axis: SkipValidation[str]
    dtype: SkipValidation[str]
    status: Required[Annotated[str, one_of("ok", "failed", "crashed", "timed_out")]]
    reason: SkipValidation[str | None]
    complete: SkipValidation[bool]
    seconds: SkipValidation[float]
    rows: Required[list[Annotated[KernelRow, AfterValidator(_checked)]]]
    targets: Required[list[Annotated[dict[str, Any], having("verdict", "reached", "missed", "not measured")]]]


class KernelRecord(TypedDict, total=False):
    """A machine, its ceilings and the ops; an op has a row for each size, contender and pass."""

    format: int
    started: Required[str]
    finished: SkipValidation[str | None]
    quick: SkipValidation[bool]
    interpreted: SkipValidation[bool]
    machine: Required[dict[str, Any]]
    ceilings: SkipValidation[dict[str, Any] | None]
    packages: SkipValidation[dict[str, str]]
    environment: SkipValidation[dict[str, Any]]
    formulas: Required[dict[str, Any]]
    ops: Required[list[Annotated[KernelOp, AfterValidator(_reasoned)]]]


KERNELS = RecordFile(TypeAdapter(KernelRecord), FILE, "kernel bench", "rush bench kernels")
write_kernels, check_kernels = KERNELS.write, KERNELS.check


def read_kernels(path: Path) -> KernelRecord:
    """The record, with the names of today."""
    record = KERNELS.read(path)
    for op in record["ops"]:
        op["op"] = RENAMED_OPS.get(op["op"], op["op"])
        for row in op["rows"]:
            row["kind"] = "baseline" if row["kind"] == "rival" else row["kind"]
    return record
