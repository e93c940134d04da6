"""A recorded parity verdict, judged again by the current rule.

A record never changes, but the rule gets stricter: bf16 weights that lost a warm-up were once called equal. So every page and
table re-evaluates "equal" from the record: the named differences, the worst difference with its tolerance, the loss curves
against plain fp32's. A verdict can only get worse: most of the compared gradients are not in the record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rush.records.loss_curves import (
    CLOSE_STEPS,
    close_tolerance,
    compare_curves,
    growth,
    step_differences,
)

COARSEST = "bfloat16"
"""The dtype that rounds the most: records of earlier versions do not name theirs."""
MOST = 1e100
"""Larger numbers are no losses."""


def parity_again(parity: Any) -> dict[str, Any] | None:
    """The recorded parity with the verdict and the reason by the current rule; None without a record."""
    if not isinstance(parity, Mapping):
        return None
    if parity.get("verdict") != "equal":
        return dict(parity)
    fault = _named(parity) or _worst(parity) or _curves(parity)
    if fault is None:
        return dict(parity)
    verdict, why = fault
    return {**parity, "verdict": verdict, "measured": None, "why": f"{why}; recorded as equal"}


def parity_verdict(parity: Any) -> str | None:
    """The verdict alone: equal, different or not judged; None without a record."""
    again = parity_again(parity)
    return str(again.get("verdict")) if again else None


def _named(parity: Mapping[str, Any]) -> tuple[str, str] | None:
    """Differences that the record names, of any of the steps."""
    found = [each for each in _rows(parity.get("differences")) if each.get("kind")]
    if found:
        return "different", f"{found[0]['kind']}: {found[0].get('detail', 'no detail')}"
    timed = parity.get("timed")
    if isinstance(timed, Mapping) and timed.get("verdict") == "different":
        return "different", f"over the timed steps {timed.get('why', 'the loss curve differs')}"
    return None


def _worst(parity: Mapping[str, Any]) -> tuple[str, str] | None:
    """The worst difference, where it is beyond the tolerance recorded with it."""
    worst, tolerance = _number(parity.get("worst")), _number(parity.get("tolerance"))
    if worst is None or tolerance is None or worst <= tolerance:
        return None
    return "different", f"the worst difference is {worst:.1e}, beyond the tolerance of {tolerance:.1e}"


def _curves(parity: Mapping[str, Any]) -> tuple[str, str] | None:
    """The losses beside those of plain fp32; where bits are promised, the gradient norms too."""
    if "losses" not in parity and "reference_losses" not in parity:
        return None  # an excerpt
    losses, reference = _series(parity.get("losses")), _series(parity.get("reference_losses"))
    if losses is None:
        return "different", "a loss is non-finite"
    if not losses or not reference or len(losses) != len(reference):
        return "not judged", "the record holds no two loss curves to compare"
    if parity.get("measured") == "same bits" or parity.get("class") == "EXACT":
        norms = parity.get("grad_norms") == parity.get("reference_grad_norms")
        same = losses == reference and norms
        return (
            None
            if same
            else ("different", "losses or gradient norms are not, bit for bit, those of plain fp32")
        )
    twin = _series(parity.get("twin_losses"))
    twin = twin if twin and len(twin) == len(losses) else None
    beyond, curve = _beyond_rounding(losses, reference, twin), compare_curves(losses, reference, twin)
    short = len(losses) <= CLOSE_STEPS
    if short and (beyond is None or parity.get("class") == "CLOSE"):
        verdict, why = ("different", beyond) if beyond else ("equal", "")
    else:
        verdict, why = curve.verdict, curve.why
    if verdict == "equal":
        return None
    # Without a perturbed run nobody knows how much of a difference rounding explains.
    return (verdict, why) if twin else ("not judged", f"{why}; the record has no perturbed reference run")


def _beyond_rounding(
    losses: Sequence[float], reference: Sequence[float], twin: Sequence[float] | None
) -> str | None:
    """The differences in the first steps that rounding does not explain."""
    first = slice(CLOSE_STEPS)
    rows = step_differences(
        "loss", close_tolerance(COARSEST).loss, growth(COARSEST), losses[first], reference[first], twin
    )
    found = max(rows, key=lambda row: row[0] / row[1])
    return (
        f"{found[2]} is off by {found[0]:.1e}, beyond the {found[1]:.1e} of rounding"
        if found[0] > found[1]
        else None
    )


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST:
        return None
    return float(value)


def _series(value: Any) -> list[float] | None:
    """Numbers, all of them finite; None where one is not, as a diverged run leaves it."""
    if not isinstance(value, list):
        return []
    found = [_number(each) for each in value]
    return None if None in found else [each for each in found if each is not None]
