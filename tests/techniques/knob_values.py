"""Which values of its knobs a run shows: the one in use, and no other."""

from __future__ import annotations

from collections.abc import Iterable

from rush.recipe import Knob
from rush.techniques.api.contract import Observation, Use


def accepted(use: Use, seen: Observation) -> dict[str, list[Knob]]:
    """For every knob of a technique the values that its evidence accepts of one observation."""
    found = {}
    for name, knob in use.technique.knobs.items():
        assert knob.evidence is not None, name
        found[name] = [
            value for value in knob.values if knob.evidence(seen, {**use.knobs, name: value}).took_effect
        ]
    return found


def unclear(use: Use, seen: Observation, alike: Iterable[str] = ()) -> dict[str, list[Knob]]:
    """Knobs of which the observation does not show the value in use and it alone. Values of `alike` knobs do the same here."""
    found = accepted(use, seen)
    return {
        name: values
        for name, values in found.items()
        if (use.knobs[name] not in values if name in alike else values != [use.knobs[name]])
    }
