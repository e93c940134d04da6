"""Checks the field types of a technique from outside rush, because a dataclass accepts any value.

The commonest slip is `conflicts=("compile")`, a string: without its comma the technique would conflict with nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from rush.techniques.api.contract import (
    Claim,
    MemoryEffect,
    Parity,
    Requirement,
    Setting,
    Stage,
    Technique,
    WorkEffect,
)

_ONE = {"name": str, "stage": Stage, "claim": Claim, "parity": Parity, "knobs": Mapping, "reasons": Mapping}
_TUPLES = {
    "memory": MemoryEffect,
    "work": WorkEffect,
    "requires": Requirement,
    "conflicts": str,
    "after": str,
    "settings": Setting,
}
_FUNCTIONS = ("apply", "evidence", "nondeterministic", "compiles", "summary")


def wrong_type(technique: Technique) -> str | None:
    """The first field with a wrong type, and the right type; None if all are right."""
    for name, kind in _ONE.items():
        if not isinstance(value := getattr(technique, name), kind):
            return f"its {name} is a {type(value).__name__}, and must be a {kind.__name__}"
    for name, kind in _TUPLES.items():
        value = getattr(technique, name)
        if not isinstance(value, tuple) or not all(isinstance(one, kind) for one in value):
            found = f"a {type(value).__name__}" if not isinstance(value, tuple) else "another tuple"
            return f"its {name} is {found}, and must be a tuple of {kind.__name__}, as in (one,) or ()"
    for name in _FUNCTIONS:
        if not callable(value := getattr(technique, name)):
            return f"its {name} is a {type(value).__name__}, and must be a function"
    return None
