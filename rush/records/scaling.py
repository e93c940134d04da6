"""The record of a study of scale: what `scale.json` holds, checked when it is written and when it is read.

A point is one layout on one number of devices, with one number of tokens in a step. It belongs to strong scaling (the
step stays what it is and is divided), to weak scaling (the step grows with the devices), or, at the largest number of
devices, to both. An efficiency stands only beside a verdict of "equal": ranks that learn something else are no finding,
and ranks that shared a device are no speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from rush.errors import DataError
from rush.files import write_json_atomic
from rush.records.checked import check_head, check_in, check_measured, check_of, read_json
from rush.records.ladder import PARITY_VERDICTS, STATUSES, Measured

FORMAT = 1
FILE = "scale.json"
SCALINGS = ("strong", "weak")
VERDICTS = (
    "baseline", "equal", "different", "not judged", "no effect", "shared device", "unsupported", "out of memory",
    "crashed", "timed out", "diverged",
)  # fmt: skip


class ScalingEfficiency(TypedDict, total=False):
    """Tokens per second and device over those of what it is compared with."""

    ratio: float
    ci95: list[float]
    over: str
    paired: int | None
    """On how many batches they were compared one by one; None (or missing) where by their medians."""


class ExposedCommunication(TypedDict, total=False):
    """Of the rank that waits longest; `ranks` has the share of each."""

    share: float
    exposed_ms: float
    exchange_ms: float
    step_ms: float
    ranks: list[float]


class PointRecord(TypedDict, total=False):
    """`tokens_per_s` and what follows from it are None unless steps were timed."""

    layout: str
    sizes: dict[str, int]
    devices: int
    scalings: list[str]
    peer_to_peer: bool
    shared: bool
    backend: str | None
    """Whose operations carried what ranks exchange (nccl, gloo); None of a rank alone, and in records of before."""
    status: str
    reason: str | None
    verdict: str
    recipe: str
    digest: str
    techniques: list[str]
    step_tokens: int
    tokens_per_s: Measured | None
    step_ms: Measured | None
    efficiency: dict[str, ScalingEfficiency]
    exposed: ExposedCommunication | None
    memory_bytes: list[int] | None
    """The peak of each rank."""
    evidence: list[dict[str, Any]]
    parity: dict[str, Any] | None
    predicted_tokens_per_s: float | None
    """What the planner expects; None where there is no prediction."""
    compile_s: float | None
    warmup_s: float | None
    environment: dict[str, Any]


class PointComparison(TypedDict, total=False):
    """Two points that differ in one thing; the quotients are the second's over the first's."""

    what: str
    first: str
    second: str
    devices: int
    scalings: list[str]
    speed: ScalingEfficiency | None
    real: bool
    memory: float | None


class MessageSize(TypedDict, total=False):
    bytes: float
    seconds: list[float]
    bytes_per_s: float
    bus_bytes_per_s: float


class LinkRecord(TypedDict, total=False):
    """One operation between so many ranks over message sizes; `reason` says why there are none."""

    operation: str
    backend: str
    ranks: int
    peer_to_peer: bool
    sizes: list[MessageSize]
    reason: str | None


class ScaleRecord(TypedDict, total=False):
    format: int
    name: str
    started: str
    finished: str | None
    machine: dict[str, Any]
    base: dict[str, str]
    devices: list[int]
    layouts: list[str]
    step_tokens: int
    tokens_per_device: float
    threads_per_rank: int | None
    counted: str
    formulas: dict[str, str]
    points: list[PointRecord]
    comparisons: list[PointComparison]
    links: list[LinkRecord]
    drift: dict[str, Any] | None


def write_scale(path: Path, record: ScaleRecord) -> None:
    """Check the record and replace the file in one piece."""
    check_scale(record, str(path))
    write_json_atomic(path, record)


def read_scale(path: Path) -> ScaleRecord:
    """The study in a file or in a study's folder; a DataError when it is something else."""
    tree, file = read_json(path, FILE, "study of scale", "rush scale")
    check_scale(tree, str(file))
    record: ScaleRecord = tree
    return record


def check_scale(tree: Any, where: str) -> None:
    """Raise a DataError that names the first thing that is not as it should be."""
    check_head(tree, "study of scale", FORMAT, where)
    for key, kind in (
        ("name", str), ("started", str), ("machine", dict), ("base", dict), ("devices", list), ("layouts", list),
        ("points", list), ("comparisons", list), ("links", list), ("step_tokens", int),
    ):  # fmt: skip
        check_of(tree, key, kind, where)
    for index, point in enumerate(tree["points"]):
        _check_point(point, f"{where}: points[{index}]")
    for index, link in enumerate(tree["links"]):
        here = f"{where}: links[{index}]"
        for key, kind in (("operation", str), ("ranks", int), ("sizes", list)):
            check_of(link, key, kind, here)


def _check_point(point: Any, where: str) -> None:
    for key, kind in (
        ("layout", str), ("devices", int), ("scalings", list), ("techniques", list), ("recipe", str),
        ("evidence", list), ("efficiency", dict),
    ):  # fmt: skip
        check_of(point, key, kind, where)
    check_in(point, "status", STATUSES, where)
    check_in(point, "verdict", VERDICTS, where)
    if not point["scalings"] or not set(point["scalings"]) <= set(SCALINGS):
        raise DataError(f"{where}: scalings is {point['scalings']!r:.80}; allowed: {', '.join(SCALINGS)}.")
    if point.get("tokens_per_s") is not None:
        check_measured(point["tokens_per_s"], f"{where}.tokens_per_s")
    if point["efficiency"] and point["verdict"] != "equal":
        raise DataError(
            f"{where}: an efficiency stands beside the verdict {point['verdict']!r}, which is no finding."
        )
    if point.get("shared") and point.get("tokens_per_s") is not None:
        raise DataError(f"{where}: ranks that share a device have no speed, but tokens_per_s is there.")
    parity = point.get("parity")
    if parity is not None:
        check_of(point, "parity", dict, where)
        check_in(parity, "verdict", PARITY_VERDICTS, f"{where}.parity")
