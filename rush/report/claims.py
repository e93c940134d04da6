"""Claims against findings: the authors' claimed gain of a technique, and its gain here.

A claim states what it is relative to, and the finding is the gain over the same baseline. Mixed precision is claimed to be ×3.5
of plain fp32; on a ladder with TF32 below it, its gain over the rung before is a different quantity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rush.records.gains import judge
from rush.report import formatting, headlines
from rush.report.ladder import ClaimView, LadderView, RungView, careful_ratio

RUNG_BEFORE, PLAIN, BASE = "the rung before", "plain fp32", "the base"
"""What a claim may be relative to, besides a technique: see `Claim.relative_to`."""
CLIMB = "the whole climb"
FORMER = {"from plain fp32": PLAIN, "over padding": "pad", "half of the tokens were padding": BASE}
"""Regimes of claims in older records, and what they are relative to."""


@dataclass(frozen=True)
class ClaimCheck:
    """A claim beside its finding, both as ratios of the same quantity over the same baseline."""

    rung: RungView
    claimed: float | None
    found: float | None
    low: float | None
    high: float | None
    outcome: str
    sign: str
    tone: str
    what: str
    against: str
    """What the finding is over, for a person."""


def compare_claim(ladder: LadderView, rung: RungView) -> ClaimCheck | None:
    """The authors' claim against what was measured; None when there is no claim."""
    claim = rung.claim
    if claim is None:
        return None
    claimed = None if claim.gain is None else 1 + claim.gain
    what = {"tokens_per_s": "speed", "peak_memory_bytes": "peak memory"}.get(claim.metric, claim.metric)
    measurable = claim.metric in ("tokens_per_s", "peak_memory_bytes")
    relative = relative_to(claim)
    baseline = baseline_of(ladder, rung, relative)
    finding = _finding(rung, baseline, claim.metric) if baseline else None
    if finding is None:
        if not measurable:
            outcome = "not measured as such"
        elif baseline is None and relative != RUNG_BEFORE and rung.speed:
            outcome = f"not measured over {relative}"
        else:
            outcome = "not measured"
        return ClaimCheck(rung, claimed, None, None, None, outcome, "ring", "plain", what, "")
    if ladder.view == "left_out":
        finding = _turned(*finding)
    less = claim.metric == "peak_memory_bytes"
    outcome, sign, tone = _outcome(claimed, *finding, less_is_better=less)
    assert baseline is not None
    against = "" if relative == RUNG_BEFORE else f"over {relative} ({baseline.title})"
    return ClaimCheck(rung, claimed, *finding, outcome, sign, tone, what, against)


def climb_claim(ladder: LadderView) -> ClaimCheck | None:
    """The claim for the whole climb against the rung that the headline credits, over the first one measured."""
    if ladder.claim is None:
        return None
    top = headlines.credited(ladder) or headlines.together(ladder)
    first = headlines.first_measured(ladder)
    if top is None or first is None:
        whole = RungView(0, CLIMB, CLIMB, "", "", claim=ladder.claim)
        claimed = None if ladder.claim.gain is None else 1 + ladder.claim.gain
        return ClaimCheck(
            whole, claimed, None, None, None, "no rung is credited", "ring", "plain", "speed", ""
        )
    whole = replace(
        top,
        name=CLIMB,
        title=CLIMB,
        claim=replace(ladder.claim, relative_to=RUNG_BEFORE),
        gain=top.total_gain,
    )
    checked = compare_claim(ladder, whole)
    assert checked is not None
    return replace(checked, against=f"over {first.title}, to {top.title}")


def relative_to(claim: ClaimView) -> str:
    """What the claim is relative to; older records have it in the regime only."""
    if claim.relative_to:
        return claim.relative_to
    said = (claim.regime or "") if claim.metric == "tokens_per_s" else ""
    return next((relative for words, relative in FORMER.items() if words in said), RUNG_BEFORE)


def baseline_of(ladder: LadderView, rung: RungView, relative: str) -> RungView | None:
    """The measured rung that a claim is relative to; None where the ladder has none.

    Batch and sequence must be the rung's own: a claim for a technique is not one for a larger batch.
    """
    if relative == RUNG_BEFORE:
        return ladder.rung(rung.gain.over) if rung.gain else None
    below = [r for r in ladder.rungs[: rung.index - 1] if r.speed and r.status == "ok"]
    alike = [r for r in below if (r.micro, r.sequence) == (rung.micro, rung.sequence)]
    if relative == BASE:
        return alike[0] if alike and alike[0].index == 1 else None
    if relative == PLAIN:
        return next((r for r in alike if not r.techniques), None)
    return next((r for r in reversed(alike) if relative in r.techniques), None)


def effects(ladder: LadderView, rung: RungView) -> str:
    """What the rung changed here, whatever its claim is about: speed, memory, waiting for data."""
    if rung.name == CLIMB:
        return ""
    before = ladder.rung(rung.gain.over) if rung.gain else None
    sentences = []
    if rung.gain:
        judged = rung.gain.judged
        noise = f" ({judged})" if judged in ("no gain", "cannot tell") else ""
        sentences.append(f"speed {formatting.change(rung.gain.ratio)}{noise}")
    if before and before.peak_memory_bytes and rung.peak_memory_bytes:
        sentences.append(
            f"peak memory {formatting.change(rung.peak_memory_bytes / before.peak_memory_bytes)}"
        )
    if before and rung.claim and "data" in rung.claim.metric:
        waits = (formatting.milliseconds(before.data_wait_ms), formatting.milliseconds(rung.data_wait_ms))
        sentences.append(f"waiting for data {waits[0]} before, {waits[1]} now")
    over = f", over {before.title}" if before else ""
    return f"Here{over}: {'; '.join(sentences)}." if sentences else ""


def _finding(
    rung: RungView, baseline: RungView, metric: str
) -> tuple[float, float | None, float | None] | None:
    """The measured ratio of the claim's quantity over the baseline, with its interval."""
    if metric == "peak_memory_bytes" and baseline.peak_memory_bytes and rung.peak_memory_bytes:
        return rung.peak_memory_bytes / baseline.peak_memory_bytes, None, None
    if metric != "tokens_per_s":
        return None
    for gain in (rung.gain, rung.total_gain):
        if gain and gain.over == baseline.name:
            return gain.ratio, gain.low, gain.high
    return careful_ratio(rung.speed, baseline.speed) if rung.speed and baseline.speed else None


def _turned(ratio: float, low: float | None, high: float | None) -> tuple[float, float | None, float | None]:
    """The gain of a technique from what is lost without it."""
    return 1 / ratio, 1 / high if high else None, 1 / low if low else None


def _outcome(
    claimed: float | None, found: float, low: float | None, high: float | None, *, less_is_better: bool
) -> tuple[str, str, str]:
    """The words, sign and tone for a finding beside its claim; both ends of the interval are heard."""
    if claimed is None or claimed <= 0:
        return "no figure to compare", "ring", "plain"
    worse, better = low or found, high or found
    if less_is_better:
        claimed, found, worse, better = 1 / claimed, 1 / found, 1 / better, 1 / worse
    if better >= claimed and (claimed <= 1 or worse > 1):
        return "as claimed or better", "up", "good"
    if claimed <= 1:
        return "costs more than claimed", "down", "caution"
    if worse <= 1 <= better:
        known = judge(worse, better) == "no gain"
        return ("not seen here", "level", "plain") if known else ("cannot tell", "query", "plain")
    return (
        ("less than claimed", "level", "caution") if found > 1 else ("the opposite here", "down", "caution")
    )
