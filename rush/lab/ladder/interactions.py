"""Interactions between techniques, from the three views of a ladder.

Without interactions a technique would gain the same alone on the base, as a rung, and at the top of all the others. If the
three figures differ, techniques interact: two save the same time, or one makes the other possible.
"""

from __future__ import annotations

from typing import Any

from rush.records.ladder import LadderRecord, RungRecord


def interactions(
    cumulative: LadderRecord, alone: LadderRecord, left_out: LadderRecord
) -> list[dict[str, Any]]:
    """For every rung that was measured: its gain alone, in the ladder, and at the top."""
    rows = []
    alone_by, left_by = _by_name(alone), _by_name(left_out)
    moved = max(_drift(view) for view in (cumulative, alone, left_out))
    for rung in cumulative["rungs"][1:]:
        here = _ratio(rung)
        if here is None:
            continue
        name = rung["name"]
        by_itself = _ratio(alone_by.get(name))
        without = _ratio(left_by.get(f"without {name}"))
        at_top = 1 / without if without else None
        seen = (rung, alone_by.get(name), left_by.get(f"without {name}"))
        spread = max(_spread(*seen), moved)
        rows.append(
            {
                "technique": name,
                "alone": by_itself,
                "in_ladder": here,
                "left_out": at_top,
                "sentence": _sentence(name, by_itself, here, at_top, spread),
            }
        )
    return rows


def _by_name(record: LadderRecord) -> dict[str, RungRecord]:
    return {rung["name"]: rung for rung in record["rungs"]}


def _ratio(rung: RungRecord | None) -> float | None:
    gain = rung["gain"] if rung else None
    return gain["ratio"] if gain else None


def _spread(*rungs: RungRecord | None) -> float:
    """Half the widest interval among the gains: smaller differences are noise."""
    gains = [rung["gain"] for rung in rungs if rung and rung["gain"]]
    return max((gain["ci95"][1] - gain["ci95"][0]) / 2 for gain in gains)


def _drift(record: LadderRecord) -> float:
    """The machine's drift during a view, if it was more than noise."""
    drift = record["drift"]
    return abs(drift["ratio"] - 1) if drift and drift["flagged"] else 0.0


def _sentence(name: str, alone: float | None, here: float, at_top: float | None, spread: float) -> str:
    figures = [f"×{here:.2f} as a rung"]
    if alone is not None:
        figures.insert(0, f"×{alone:.2f} alone on the base")
    if at_top is not None:
        figures.append(f"×{at_top:.2f} at the top, with all the others")
    told = f"{name}: {', '.join(figures)}"
    first, last = alone if alone is not None else here, at_top if at_top is not None else here
    if alone is None:
        return f"{told}; alone on the base it cannot run here."
    if last > first + spread:
        return f"{told}: the others make room for it."
    if last < first - spread:
        return f"{told}: the others already save part of what it saves."
    return f"{told}: within the noise it gains the same in any company."
