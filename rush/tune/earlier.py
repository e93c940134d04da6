"""Gains measured on this machine by earlier searches and ladders, which order the trials of the next search.

A file in the cache folder, one per machine fingerprint, holds the gains of searches; ladders next to the search's folder are
read too. They only order the trials: a move that lost on another model, or to noise, may win now.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rush.errors import RushError
from rush.files import cache_folder, write_json_atomic
from rush.hardware import Machine
from rush.records.ladder import LADDER, read_ladder

MOST_KEPT = 20
"""Gains kept per move and model, the newest."""


@dataclass(frozen=True)
class RememberedGain:
    """The gain of one move: the ratio of two medians."""

    key: str
    model: str
    ratio: float


def remembered(fingerprint: str, model: str, beside: Path) -> dict[str, float]:
    """Median gains on this machine by key, from the cache and from ladders next to the search's folder.

    Gains of other models count where the move was not tried on this one; losses on other models do not.
    """
    gains = [*_kept(_file(fingerprint)), *_of_ladders(fingerprint, beside)]
    own = {gain.key for gain in gains if gain.model == model}
    found: dict[str, list[float]] = {}
    for gain in gains:
        if gain.model == model or gain.key not in own:
            found.setdefault(gain.key, []).append(gain.ratio)
    medians = {key: statistics.median(ratios) for key, ratios in found.items()}
    return {key: ratio for key, ratio in medians.items() if key in own or ratio > 1}


def remember(fingerprint: str, gains: Iterable[RememberedGain]) -> None:
    """Add gains to the cache of this machine."""
    kept: dict[tuple[str, str], list[RememberedGain]] = {}
    for gain in [*_kept(_file(fingerprint)), *gains]:
        kept.setdefault((gain.key, gain.model), []).append(gain)
    rows = [vars(gain) for same in kept.values() for gain in same[-MOST_KEPT:]]
    path = _file(fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {"gains": rows})


def _file(fingerprint: str) -> Path:
    return cache_folder() / f"gains-{fingerprint}.json"


def _kept(path: Path) -> list[RememberedGain]:
    try:
        return [RememberedGain(**row) for row in json.loads(path.read_text())["gains"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # an unreadable cache is an empty one


def _of_ladders(fingerprint: str, beside: Path) -> list[RememberedGain]:
    gains = []
    for path in sorted(beside.glob("*/ladder.json")):
        try:
            record = read_ladder(path)
            if Machine.from_dict(record["machine"]).fingerprint() != fingerprint:
                continue
            with LADDER.using(path):
                model = str(tomllib.loads(record["base"]["recipe"])["model"]["name"])
                gains += [
                    RememberedGain(rung["name"], model, float(found["ratio"]))
                    for rung in record["rungs"]
                    if rung["status"] == "ok" and (found := rung.get("gain")) is not None
                ]
        except RushError:
            continue  # they only order the trials
    return gains
