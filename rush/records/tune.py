"""The record of a search: what `tune.json` holds, and the mark that a tuned recipe carries.

Every recipe that the search considered is a candidate with a result, a reason, predictions and measurements;
`events` are the trials in chronological order. The mark is a comment in the recipe's file with the
fingerprint of the machine: it stays in copies of the file, and does not affect the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import SkipValidation, TypeAdapter
from typing_extensions import TypedDict

from rush.files import read_file
from rush.records.gains import interval_of, judge, over_original
from rush.records.life import RecordedLife, broken
from rush.records.parity import parity_again
from rush.records.typed import Measurement, RecordFile, having, one_of

FORMAT = 1
STATES = (
    "start", "ahead", "lost", "won", "pruned", "refused", "failed", "different", "no effect", "not tried", "unusable",
)  # fmt: skip
TRIALS = ("reference", "rank", "confirm", "decide", "prove", "length", "life")
_MARK = re.compile(r"^# tuned-on: ([0-9a-f]{16}) (.*)$", re.MULTILINE)


class CandidateRow(TypedDict, total=False):
    key: Required[str]
    over: SkipValidation[str]
    state: Required[Annotated[str, one_of(*STATES)]]
    reason: Required[str]
    round: SkipValidation[int]
    at_s: SkipValidation[float]
    recipe: SkipValidation[str]
    techniques: SkipValidation[list[str]]
    kind: SkipValidation[str | None]
    """What the candidate changes (`rush.tune.moves.MoveKind`); None where it was not tried, missing in old records."""
    settings: SkipValidation[list[str]]
    """The techniques with their knobs; missing in old records."""
    micro: SkipValidation[int | None]
    predicted: SkipValidation[dict[str, float] | None]
    expected: SkipValidation[float | None]
    ratio: SkipValidation[float | None]
    tokens_per_s: Measurement | None
    """The kind of tokens that is `counted`."""
    processed_per_s: SkipValidation[float | None]
    """Tokens of every kind, padding among them."""
    peak_memory_bytes: SkipValidation[int | None]
    evidence: SkipValidation[list[dict[str, Any]]]
    parity: SkipValidation[dict[str, Any] | None]
    life: RecordedLife | None
    """None (or missing) where no life was tried; the winner has one."""


class TuneRecord(TypedDict, total=False):
    format: int
    name: Required[str]
    started: Required[str]
    finished: SkipValidation[str | None]
    machine: Required[dict[str, Any]]
    fingerprint: SkipValidation[str]
    ceilings: SkipValidation[dict[str, Any] | None]
    """The measured ceilings of the machine, as the planner used them."""
    objective: SkipValidation[str]
    allowed: SkipValidation[list[str]]
    budget_s: SkipValidation[float]
    spent_s: SkipValidation[float]
    load: SkipValidation[float | None]
    """Load average per core while trials were timed, the median; a trial on a CPU makes about one itself."""
    price: SkipValidation[float | None]
    keep_speed: SkipValidation[float]
    settings: SkipValidation[dict[str, Any]]
    known: SkipValidation[dict[str, float]]
    """Expected gains of changes, from earlier findings on this machine."""
    base: Required[dict[str, Any]]
    counted: SkipValidation[str]
    candidates: Required[list[CandidateRow]]
    events: Required[list[Annotated[dict[str, Any], having("kind", *TRIALS)]]]
    winner: SkipValidation[dict[str, Any] | None]


TUNE = RecordFile(TypeAdapter(TuneRecord), "tune.json", "search", "rush tune")
read_tune, write_tune, check_tune = TUNE.read, TUNE.write, TUNE.check


def judged_again(record: TuneRecord) -> TuneRecord:
    """The record by the current rules: parity from the recorded curves, the winner's gain from its interval. Pages and the
    terminal print this; the file stays unchanged."""
    winner = record.get("winner")
    gain = winner.get("gain") if isinstance(winner, dict) else None
    rows = [_row_again(row, gain) for row in record.get("candidates", ())]
    if not isinstance(winner, dict):
        return {**record, "candidates": rows}
    return {**record, "candidates": rows, "winner": {**winner, "parity": parity_again(winner.get("parity"))}}


def _row_again(row: CandidateRow, gain: Any) -> CandidateRow:
    parity, recorded = parity_again(row.get("parity")), row.get("parity")
    again: CandidateRow = {**row, "parity": parity}
    if parity and recorded and parity["verdict"] != recorded["verdict"]:
        if row["state"] in ("won", "ahead", "lost"):
            again["state"] = "different" if parity["verdict"] == "different" else "failed"
        again["reason"] = f"parity: {parity['verdict']}; {parity['why']}"
    elif row["state"] == "won" and (ends := interval_of(gain)) and judge(*ends) != "faster":
        again["reason"] = over_original(gain)
    return again


def proved(winner: Mapping[str, Any]) -> bool:
    """Whether a winner learns the same as plain fp32, or something else by design, and nothing broke its short life. Only then is
    its gain one."""
    parity = winner.get("parity") or {}
    same = parity.get("verdict") == "equal" or parity.get("class") == "CHANGES"
    return same and not broken(winner.get("life"))


PLANNED = "planned: "
"""Prefix of the key of a recipe that the planner composed; its techniques and micro batch follow."""


@dataclass(frozen=True)
class CandidateName:
    """A name that fits into a table."""

    short: str
    difference: str = ""
    """The difference of a later recipe of the planner from the first."""
    whole: str | None = None
    """All parts of a recipe of the planner whose difference is not given."""

    def __str__(self) -> str:
        return f"{self.short}: {self.difference}" if self.difference else self.short


def short_names(rows: Iterable[CandidateRow]) -> dict[str, CandidateName]:
    """A name for each key. A recipe of the planner gets a number, and after the first its difference from that one."""
    names: dict[str, CandidateName] = {}
    first: _Parts | None = None
    number = 0
    for row in rows:
        key = row["key"]
        if row.get("kind", "jump" if key.startswith(PLANNED) else "") != "jump":
            names[key] = CandidateName(key)
            continue
        parts, number = _parts(row), number + 1
        difference = [] if first is None else parts.differences(first)
        if 0 < len(difference) <= 3:
            names[key] = CandidateName(f"jump {number}", f"jump 1 {', '.join(difference)}")
        else:
            names[key] = CandidateName(f"jump {number}", whole=key.removeprefix(PLANNED))
        first = first or parts
    return names


@dataclass(frozen=True)
class _Parts:
    """The parts of a recipe that the planner composed."""

    settings: tuple[str, ...]
    micro: str

    def differences(self, other: _Parts) -> list[str]:
        """In words: what it has and the other has not, then what it lacks."""
        more = [f"with {setting}" for setting in self.settings if setting not in other.settings]
        micro = [f"with micro {self.micro}"] if self.micro not in ("", other.micro) else []
        less = [f"without {setting}" for setting in other.settings if setting not in self.settings]
        return [*more, *micro, *less]


def _parts(row: CandidateRow) -> _Parts:
    """The techniques of a candidate; from its key in records that do not list them."""
    if "settings" in row:
        return _Parts(tuple(row["settings"]), str(row["micro"]))
    settings, _, micro = row["key"].removeprefix(PLANNED).partition(", micro ")
    return _Parts(tuple(settings.split(" + ")), micro)


def mark(fingerprint: str, machine: str) -> str:
    """The comment that names the machine a recipe was tuned on."""
    return f"# tuned-on: {fingerprint} {machine}"


def tuned_on(recipe: Path) -> tuple[str, str] | None:
    """Fingerprint and name of the machine that a recipe's file was tuned on; None for others."""
    try:
        found = _MARK.search(read_file(recipe).decode())
    except (OSError, UnicodeDecodeError):
        return None
    return (found[1], found[2]) if found else None
