"""The record of a short life: whether a recipe that was measured can be trained with, and if not, what it cannot do.

It stands in the rungs of ladders and model benches and in the candidates of searches. Records made before there were lives
have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from rush.records.checked import check_in, check_of

LIFE_VERDICTS = ("ok", "broken", "not known")


class LifePart(TypedDict):
    name: str
    seconds: float


class LifeRecord(TypedDict, total=False):
    verdict: str
    problem: str | None
    """What it cannot do, or why that is not known; None where all is well."""
    parts: list[LifePart]
    layers: list[int] | None
    """How many layers it had, of how many; None where all of them."""


def check_life(tree: Mapping[str, Any], where: str) -> None:
    """A record's life, where it has one."""
    if tree.get("life") is None:
        return
    check_of(tree, "life", dict, where)
    check_in(tree["life"], "verdict", LIFE_VERDICTS, f"{where}.life")
    check_of(tree["life"], "parts", list, f"{where}.life")
    if tree["life"]["verdict"] != "ok":
        check_of(tree["life"], "problem", str, f"{where}.life")


def broken(life: Mapping[str, Any] | None) -> bool:
    """Whether it is known that the recipe cannot be trained with."""
    return life is not None and life.get("verdict") == "broken"


def life_words(life: Mapping[str, Any] | None) -> str:
    """A life in a few words."""
    if life is None:
        return "not lived"
    if life["verdict"] != "ok":
        return f"{life['verdict']}: {life['problem']}"
    layers = life.get("layers")
    fewer = f" with {layers[0]} of {layers[1]} layers" if layers else ""
    return f"ok: trained, validated, sampled, saved and resumed{fewer}"
