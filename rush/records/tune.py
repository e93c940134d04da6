"""The record of a search: what `tune.json` holds, and the mark that a tuned recipe carries.

Every recipe that was thought of is a candidate with one word of what became of it, a reason, what was predicted and what was
measured; `events` are the trials in the order they were made. The mark is a comment in the recipe's file with the fingerprint
of the machine: it goes wherever the file is copied to, and changes nothing about the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypedDict

from rush.files import write_json_atomic
from rush.records.checked import check_head, check_in, check_measured, check_of, read_json
from rush.records.ladder import Measured
from rush.records.life import LifeRecord, check_life

FORMAT = 1
STATES = (
    "start", "ahead", "lost", "won", "pruned", "refused", "failed", "different", "no effect", "not tried", "unusable",
)  # fmt: skip
TRIALS = ("reference", "rank", "confirm", "decide", "prove", "length", "life")
_MARK = re.compile(r"^# tuned-on: ([0-9a-f]{16}) (.*)$", re.MULTILINE)


class CandidateRow(TypedDict, total=False):
    key: str
    over: str
    state: str
    reason: str
    round: int
    at_s: float
    recipe: str
    techniques: list[str]
    micro: int | None
    predicted: dict[str, float] | None
    expected: float | None
    ratio: float | None
    tokens_per_s: Measured | None
    """Of the kind that is `counted`."""
    processed_per_s: float | None
    """Tokens of every kind, padding among them."""
    peak_memory_bytes: int | None
    evidence: list[dict[str, Any]]
    parity: dict[str, Any] | None
    life: LifeRecord | None
    """None (or missing) where no life was tried; the winner has one."""


class TuneRecord(TypedDict, total=False):
    format: int
    name: str
    started: str
    finished: str | None
    machine: dict[str, Any]
    fingerprint: str
    ceilings: dict[str, Any] | None
    """What the machine was measured to reach, as the planner was told."""
    objective: str
    allowed: list[str]
    budget_s: float
    spent_s: float
    load: float | None
    """Load average per core while trials were timed, the median; a trial on a CPU makes about one itself."""
    price: float | None
    keep_speed: float
    settings: dict[str, Any]
    known: dict[str, float]
    """What was expected of changes from earlier findings on this machine."""
    base: dict[str, str]
    counted: str
    candidates: list[CandidateRow]
    events: list[dict[str, Any]]
    winner: dict[str, Any] | None


def write_tune(path: Path, record: TuneRecord) -> None:
    """Check the record and replace the file in one piece."""
    check_tune(record, str(path))
    write_json_atomic(path, record)


def read_tune(path: Path) -> TuneRecord:
    """The search in a file or in its folder; a DataError when it is something else."""
    tree, file = read_json(path, "tune.json", "search", "rush tune")
    check_tune(tree, str(file))
    record: TuneRecord = tree
    return record


def check_tune(tree: Any, where: str) -> None:
    """Raise a DataError that names the first thing that is not as it should be."""
    check_head(tree, "search", FORMAT, where)
    for key, kind in (
        ("name", str),
        ("started", str),
        ("machine", dict),
        ("base", dict),
        ("candidates", list),
        ("events", list),
    ):
        check_of(tree, key, kind, where)
    for index, row in enumerate(tree["candidates"]):
        at = f"{where}: candidates[{index}]"
        check_of(row, "key", str, at)
        check_of(row, "reason", str, at)
        check_in(row, "state", STATES, at)
        if row.get("tokens_per_s") is not None:
            check_measured(row["tokens_per_s"], f"{at}.tokens_per_s")
        check_life(row, at)
    for index, event in enumerate(tree["events"]):
        check_in(event, "kind", TRIALS, f"{where}: events[{index}]")


LEAP = "planned: "
"""How the key of a recipe begins that was put together on paper; all it is made of follows."""


def short_names(rows: Iterable[CandidateRow]) -> dict[str, str]:
    """A name for each key that fits into a table. A recipe put together on paper gets a number, and after the first what it has
    more and less than that one."""
    names: dict[str, str] = {}
    first: list[str] = []
    for key in (row["key"] for row in rows):
        if not key.startswith(LEAP):
            names[key] = key
            continue
        whole, _, micro = key.removeprefix(LEAP).partition(", micro ")
        parts = [*whole.split(" + "), *([f"micro {micro}"] if micro else [])]
        more = [f"with {part}" for part in parts if part not in first]
        less = [f"without {part}" for part in first if part not in parts and not part.startswith("micro ")]
        number = 1 + sum(name.startswith("leap ") for name in names.values())
        told = ", ".join([*more, *less]) if first and len(more) + len(less) <= 3 else ""
        names[key] = f"leap {number}" + (f": leap 1 {told}" if told else "")
        first = first or parts
    return names


def mark(fingerprint: str, machine: str) -> str:
    """The comment that says which machine a recipe was tuned on."""
    return f"# tuned-on: {fingerprint} {machine}"


def tuned_on(recipe: Path) -> tuple[str, str] | None:
    """Fingerprint and name of the machine that a recipe's file was tuned on; None for others."""
    try:
        found = _MARK.search(recipe.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return (found[1], found[2]) if found else None
