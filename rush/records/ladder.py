"""The record of a ladder: what `ladder.json` holds, checked when it is written and when it is read.

One record has a machine, a base recipe and rungs; each rung has a status (what became of the trial), raw
samples with their interval, evidence, parity and a verdict. Statuses and verdicts are closed lists, so
that whoever draws or compares ladders knows every word that can come.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from rush.errors import DataError
from rush.files import write_json_atomic

FORMAT = 1
VIEWS = ("cumulative", "alone", "left_out")
STATUSES = ("ok", "out_of_memory", "unsupported", "no_effect", "diverged", "crashed", "timed_out")
VERDICTS = (
    "baseline", "equal and faster", "equal and smaller", "faster but different", "different", "no gain", "slower",
    "no effect", "unsupported", "out of memory", "crashed", "timed out", "diverged",
)  # fmt: skip
PARITY_VERDICTS = ("equal", "different", "not judged")

Status = Literal["ok", "out_of_memory", "unsupported", "no_effect", "diverged", "crashed", "timed_out"]


class Measured(TypedDict, total=False):
    median: float
    ci95: list[float]
    n: int
    samples: list[float]
    processes: list[list[float]]


class Gain(TypedDict, total=False):
    over: str
    ratio: float
    ci95: list[float]
    real: bool


class Rung(TypedDict, total=False):
    """One rung. `tokens_per_s` and what follows from it are None unless steps were timed."""

    name: str
    title: str
    adds: list[Any] | dict[str, Any]
    techniques: list[str]
    recipe: str
    digest: str
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
    gain: Gain | None
    total_gain: Gain | None
    claim: dict[str, Any] | None
    verdict: str
    breakdown_ms: dict[str, float] | None
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
    rungs: list[Rung]
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
    file = path / "ladder.json" if path.is_dir() else path
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"there is no ladder at {file}; give a folder that `rush ladder` wrote.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{file} is not JSON ({error}); measure the ladder again.") from None
    check_ladder(tree, str(file))
    record: LadderRecord = tree
    return record


def check_ladder(tree: Any, where: str) -> None:
    """Raise a DataError that names the first thing that is not as it should be."""
    if not isinstance(tree, Mapping):
        raise DataError(f"{where} holds no ladder: found {type(tree).__name__}, allowed: an object.")
    if tree.get("format") != FORMAT:
        raise DataError(f"{where}: format is {tree.get('format')!r}; this version reads format {FORMAT}.")
    _in(tree, "view", VIEWS, where)
    for key, kind in (("name", str), ("started", str), ("machine", dict), ("base", dict), ("rungs", list)):
        _of(tree, key, kind, where)
    for index, rung in enumerate(tree["rungs"]):
        _check_rung(rung, f"{where}: rungs[{index}]")


def _check_rung(rung: Any, where: str) -> None:
    if not isinstance(rung, Mapping):
        raise DataError(f"{where} is {rung!r}; allowed: an object.")
    for key, kind in (("name", str), ("techniques", list), ("recipe", str), ("evidence", list)):
        _of(rung, key, kind, where)
    _in(rung, "status", STATUSES, where)
    _in(rung, "verdict", VERDICTS, where)
    measured = rung.get("tokens_per_s")
    if measured is None:
        if rung["status"] == "ok":
            raise DataError(f"{where}: status is ok but tokens_per_s is missing.")
    else:
        _check_measured(measured, f"{where}.tokens_per_s")
    parity = rung.get("parity")
    if parity is not None:
        _of(rung, "parity", dict, where)
        _in(parity, "verdict", PARITY_VERDICTS, f"{where}.parity")


def _check_measured(measured: Any, where: str) -> None:
    if not isinstance(measured, Mapping):
        raise DataError(f"{where} is {measured!r}; allowed: an object with median, ci95 and samples.")
    _of(measured, "median", (int, float), where)
    _of(measured, "samples", list, where)
    interval = measured.get("ci95")
    if not (isinstance(interval, list) and len(interval) == 2 and all(_number(end) for end in interval)):
        raise DataError(f"{where}.ci95 is {interval!r}; allowed: two numbers.")
    if not interval[0] <= measured["median"] <= interval[1]:
        raise DataError(f"{where}: the median {measured['median']} is outside its interval {interval}.")
    if not measured["samples"] or not all(_number(sample) and sample > 0 for sample in measured["samples"]):
        raise DataError(f"{where}.samples must be positive numbers, at least one.")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _of(tree: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> None:
    if not isinstance(tree.get(key), kind) or isinstance(tree.get(key), bool):
        raise DataError(f"{where}: {key} is {tree.get(key)!r:.80}; the record is damaged or not a ladder.")


def _in(tree: Mapping[str, Any], key: str, allowed: tuple[str, ...], where: str) -> None:
    if tree.get(key) not in allowed:
        raise DataError(f"{where}: {key} is {tree.get(key)!r}; allowed: {', '.join(allowed)}.")
