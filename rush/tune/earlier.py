"""What changes gained on this machine before: searches and ladders teach the next search where to look first.

A small file in the cache folder, one for each fingerprint of a machine, remembers the gains that searches measured; ladders
that lie beside the search's folder are read as they are. They only order what is tried: what lost on another model, or in a
busy minute, may win now.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rush.errors import RushError
from rush.files import write_json_atomic
from rush.hardware import Machine
from rush.hardware.ceilings import cache_folder
from rush.records.ladder import read_ladder

MOST_KEPT = 20
"""Gains remembered of one change on one model; the newest count."""


@dataclass(frozen=True)
class RememberedGain:
    """What a change gained once: the quotient of two medians."""

    key: str
    model: str
    ratio: float


def remembered(fingerprint: str, model: str, beside: Path) -> dict[str, float]:
    """Gains found earlier on this machine by what was changed, of this model. Of others what gained there, where it was not
    tried on this one; what lost on another model says little.

    From the cache, and from ladders that lie beside the search's folder.
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
    """Add gains to what is remembered of this machine."""
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
        return []  # a cache: what cannot be read is not known


def _of_ladders(fingerprint: str, beside: Path) -> list[RememberedGain]:
    gains = []
    for path in sorted(beside.glob("*/ladder.json")):
        try:
            record = read_ladder(path)
            if Machine.from_dict(record["machine"]).fingerprint() != fingerprint:
                continue
        except RushError:
            continue
        model = tomllib.loads(record["base"]["recipe"])["model"]["name"]
        gains += [
            RememberedGain(rung["name"], model, found["ratio"])
            for rung in record["rungs"]
            if rung["status"] == "ok" and (found := rung.get("gain")) is not None
        ]
    return gains
