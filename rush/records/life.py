"""The record of a short life: whether a measured recipe can be trained with, and if not, what fails.

It is part of the rungs of ladders and model benches and of the candidates of searches. Records made before there were
lives have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Required

from pydantic import AfterValidator, SkipValidation
from typing_extensions import TypedDict

from rush.records.typed import one_of


class LifePart(TypedDict):
    name: str
    seconds: float


class LifeRecord(TypedDict, total=False):
    verdict: Required[Annotated[str, one_of("ok", "broken", "not known")]]
    problem: str | None
    """What fails, or why that is not known; None where nothing does."""
    parts: Required[list[SkipValidation[LifePart]]]
    techniques: SkipValidation[list[str]]
    """The techniques to blame; missing in old records."""
    layers: SkipValidation[list[int] | None]
    """How many layers it had, of how many; None where all of them."""


def _has_problem(life: LifeRecord) -> LifeRecord:
    if life["verdict"] != "ok" and life.get("problem") is None:
        raise ValueError(f"the verdict is {life['verdict']!r} without a problem")
    return life


RecordedLife = Annotated[LifeRecord, AfterValidator(_has_problem)]


def broken(life: Mapping[str, Any] | None) -> bool:
    """Whether the recipe is known to be unusable for training."""
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
