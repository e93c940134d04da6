"""The record of a ladder: what `ladder.json` holds, checked when it is written and when it is read.

One record has a machine, a base recipe and rungs; each rung has a status (what became of the trial), raw
samples with their interval, evidence, parity and a verdict. Statuses and verdicts are closed lists, so
that whoever draws or compares ladders knows every word that can come.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypedDict

from rush.errors import DataError
from rush.files import write_json_atomic
from rush.records.checked import check_head, check_in, check_measured, check_of, read_json
from rush.records.life import LifeRecord, check_life

FORMAT = 1
VIEWS = ("cumulative", "alone", "left_out")
STATUSES = ("ok", "out_of_memory", "unsupported", "no_effect", "diverged", "crashed", "timed_out")
VERDICTS = (
    "baseline", "equal and faster", "equal and smaller", "faster but different", "smaller but different", "different", "no gain", "slower",
    "no effect", "unsupported", "out of memory", "crashed", "timed out", "diverged", "unusable",
)  # fmt: skip
PARITY_VERDICTS = ("equal", "different", "not judged")

Status = Literal["ok", "out_of_memory", "unsupported", "no_effect", "diverged", "crashed", "timed_out"]


class Measured(TypedDict, total=False):
    median: float
    ci95: list[float]
    n: int
    samples: list[float]
    processes: list[list[float]]


class GainRecord(TypedDict, total=False):
    over: str
    ratio: float
    ci95: list[float]
    real: bool
    paired: int | None
    """On how many batches the two were compared one by one; None (or missing) where by their medians."""


class RungRecord(TypedDict, total=False):
    """One rung. `tokens_per_s` and what follows from it are None unless steps were timed."""

    name: str
    title: str
    adds: list[Any] | dict[str, Any]
    techniques: list[str]
    recipe: str
    digest: str
    kept: bool
    status: str
    reason: str | None
    tokens_per_s: Measured | None
    step_ms: Measured | None
    tokens_kind: dict[str, float] | None
    mfu: float | None
    hfu: float | None
    ceiling_fraction: float | None
    flops_per_token: float
    step_tokens: int
    micro: int
    sequence: int
    peak_memory_bytes: int | None
    compile_s: float | None
    warmup_s: float | None
    warmup_steps: int | None
    data_wait_ms: float | None
    evidence: list[dict[str, Any]]
    parity: dict[str, Any] | None
    life: LifeRecord | None
    """None (or missing) where no life was tried."""
    gain: GainRecord | None
    total_gain: GainRecord | None
    claim: dict[str, Any] | None
    verdict: str
    breakdown_ms: dict[str, float] | None
    longest: list[dict[str, Any]] | None
    environment: dict[str, Any]


class LadderRecord(TypedDict, total=False):
    format: int
    name: str
    view: str
    started: str
    finished: str | None
    machine: dict[str, Any]
    ceilings: dict[str, Any] | None
    peaks: dict[str, float] | None
    base: dict[str, str]
    formulas: dict[str, str]
    rungs: list[RungRecord]
    counted: str
    drift: dict[str, Any] | None
    batch_curve: list[dict[str, Any]] | None
    batch_stops_paying_at: int | None
    sequence_limits: list[dict[str, Any]] | None
    interactions: list[dict[str, Any]] | None


def write_ladder(path: Path, record: LadderRecord) -> None:
    """Check the record and replace the file in one piece."""
    check_ladder(record, str(path))
    write_json_atomic(path, record)


def read_ladder(path: Path) -> LadderRecord:
    """The ladder in a file or in a ladder's folder; a DataError when it is something else."""
    tree, file = read_json(path, "ladder.json", "ladder", "rush ladder")
    check_ladder(tree, str(file))
    record: LadderRecord = tree
    return record


def check_ladder(tree: Any, where: str) -> None:
    """Raise a DataError that names the first thing that is not as it should be."""
    check_head(tree, "ladder", FORMAT, where)
    check_in(tree, "view", VIEWS, where)
    for key, kind in (("name", str), ("started", str), ("machine", dict), ("base", dict), ("rungs", list)):
        check_of(tree, key, kind, where)
    for index, rung in enumerate(tree["rungs"]):
        check_rung(rung, f"{where}: rungs[{index}]")


def check_rung(rung: Any, where: str) -> None:
    """A rung with its status, its verdict and, if it ran, its figures."""
    for key, kind in (("name", str), ("techniques", list), ("recipe", str), ("evidence", list)):
        check_of(rung, key, kind, where)
    check_in(rung, "status", STATUSES, where)
    check_in(rung, "verdict", VERDICTS, where)
    measured = rung.get("tokens_per_s")
    if measured is None:
        if rung["status"] == "ok":
            raise DataError(f"{where}: status is ok but tokens_per_s is missing.")
    else:
        check_measured(measured, f"{where}.tokens_per_s")
    parity = rung.get("parity")
    if parity is not None:
        check_of(rung, "parity", dict, where)
        check_in(parity, "verdict", PARITY_VERDICTS, f"{where}.parity")
    check_life(rung, where)
