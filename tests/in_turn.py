"""Cases that are to hold for several models, where by default each is tried with one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_turn(models: Sequence[str], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Every model with every case, as parameters of a test; all but one model of a case, in turn, are slow."""
    return [
        pytest.param(model, *case, marks=[] if place == number % len(models) else [pytest.mark.slow])
        for number, case in enumerate(cases)
        for place, model in enumerate(models)
    ]
