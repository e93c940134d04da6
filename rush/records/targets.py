"""The result of a target in one word: reached, close call, missed, not measured.

A record calls a target reached if the ratio itself is sufficient, and adds a reason if its interval extends beyond the target.
Then pages show "close call": the next measurement may miss it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLOSE_CALL = "close call"


def target_word(target: Mapping[str, Any]) -> str:
    """The recorded verdict, but "close call" where the interval of what was reached has an end beyond the target."""
    verdict = str(target["verdict"])
    return CLOSE_CALL if verdict == "reached" and beyond(target, target.get("ci95")) else verdict


def beyond(target: Mapping[str, Any], interval: Any) -> bool:
    """Whether an interval has an end on the wrong side of the target."""
    if not isinstance(interval, list | tuple) or len(interval) != 2:
        return False
    at_least, at_most = target.get("at_least"), target.get("at_most")
    return bool(
        (at_least is not None and interval[0] < at_least) or (at_most is not None and interval[1] > at_most)
    )
