"""What the numbers mean, in words: verdicts, the headline, claims against findings, warnings.

A verdict never rests on color alone: it has a sign of its own and its words. A speed counts as the
ladder's result only when the model still learns the same and can be trained with, so the headline names the
fastest *equal* and usable rung and says it apart when something faster was neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rush.report import formatting
from rush.report.ladder import LadderView, RungView
from rush.report.lenient import Json, shown, text, whole

VIEWS = {
    "cumulative": "Each rung is the one before it plus one change.",
    "alone": "Each technique stands alone on the base: what it gains without the others.",
    "left_out": "Each technique is taken away from the full combination: what is lost without it.",
}


@dataclass(frozen=True)
class VerdictStyle:
    """How a verdict is shown: `tone` picks the color, `sign` the drawn sign, `meaning` explains it."""

    tone: str
    sign: str
    meaning: str


VERDICTS = {
    "baseline": VerdictStyle("plain", "dot", "where the comparison begins"),
    "equal and faster": VerdictStyle("good", "up", "learns the same, and the gain is beyond noise"),
    "equal and smaller": VerdictStyle("good", "shrink", "learns the same in less memory"),
    "faster but different": VerdictStyle("caution", "unequal", "faster, but what it learns differs from the reference"),
    "smaller but different": VerdictStyle("caution", "unequal", "less memory, but what it learns differs from the reference"),
    "no gain": VerdictStyle("plain", "level", "took effect and learns the same; the difference is within noise"),
    "slower": VerdictStyle("caution", "down", "took effect, and costs speed here"),
    "no effect": VerdictStyle("caution", "ring", "was switched on but left no trace in the profile"),
    "unsupported": VerdictStyle("plain", "barred", "cannot run on this machine or with this recipe"),
    "out of memory": VerdictStyle("bad", "cross", "did not fit"),
    "crashed": VerdictStyle("bad", "cross", "the process died"),
    "timed out": VerdictStyle("bad", "clock", "did not finish in its time"),
    "diverged": VerdictStyle("bad", "unequal", "the loss became non-finite"),
    "different": VerdictStyle("caution", "unequal", "what it learns differs from the reference"),
    "unusable": VerdictStyle("bad", "barred", "was measured, but cannot validate, sample, save or resume"),
}  # fmt: skip
_UNKNOWN = VerdictStyle("plain", "dot", "")


def verdict_of(rung: RungView) -> VerdictStyle:
    return VERDICTS.get(rung.verdict, _UNKNOWN)


def learns_the_same(rung: RungView) -> bool:
    return rung.verdict == "baseline" or (rung.parity is not None and rung.parity.verdict == "equal")


def fastest(rungs: tuple[RungView, ...], *, equal: bool) -> RungView | None:
    """The fastest measured rung that can be trained with; with `equal`, among those that learn the same."""
    able = [r for r in rungs if r.status == "ok" and r.usable and (learns_the_same(r) or not equal)]
    return _fastest(able)


def _fastest(rungs: Iterable[RungView]) -> RungView | None:
    return max((r for r in rungs if r.speed), key=lambda r: r.speed.median if r.speed else 0.0, default=None)


def first_measured(ladder: LadderView) -> RungView | None:
    return next((rung for rung in ladder.rungs if rung.speed), None)


@dataclass(frozen=True)
class HeadlineFigure:
    """One of the few large numbers at the top."""

    value: str
    label: str
    note: str = ""


def headline(ladder: LadderView) -> str:
    """One or two sentences: from where to where, and whether the result stayed the same."""
    first, best = first_measured(ladder), fastest(ladder.rungs, equal=True)
    if first is None or first.speed is None:
        return "No rung has been measured yet."
    if best is None or best is first or best.speed is None:
        sentence = (
            f"{first.title} makes {formatting.speed(first.speed.median)}; nothing equal was faster here."
        )
    else:
        gain = _cumulative(best, best.speed.median / first.speed.median)
        sentence = (
            f"From {first.title} at {formatting.speed(first.speed.median)} to {best.title} at "
            f"{formatting.speed(best.speed.median)}: {formatting.ratio(gain)}, and the model still learns the same."
        )
    other = fastest(ladder.rungs, equal=False)
    reached = best.speed.median if best and best.speed else 0.0
    if other and other.speed and other is not best and other.speed.median > reached:
        apart = (
            "learns differently"
            if other.parity and other.parity.verdict == "different"
            else "is not proven equal"
        )
        sentence += f" {other.title} reached {formatting.speed(other.speed.median)} but {apart}."
    unusable = _fastest(rung for rung in ladder.rungs if not rung.usable)
    if unusable and unusable.speed and unusable.speed.median > reached:
        sentence += (
            f" {unusable.title} reached {formatting.speed(unusable.speed.median)} but cannot be trained with."
        )
    return sentence


def figures(ladder: LadderView) -> list[HeadlineFigure]:
    first, best = first_measured(ladder), fastest(ladder.rungs, equal=True)
    found: list[HeadlineFigure] = []
    if first and first.speed and best and best.speed:
        if best is not first:
            found.append(_gain_figure(best, _cumulative(best, best.speed.median / first.speed.median)))
        found.append(HeadlineFigure(formatting.si(best.speed.median), ladder.rate, best.title))
        if best.mfu is not None:
            found.append(
                HeadlineFigure(formatting.share(best.mfu), "of the datasheet peak (MFU)", best.title)
            )
        elif best.ceiling_fraction is not None:
            found.append(
                HeadlineFigure(
                    formatting.share(best.ceiling_fraction), "of the measured matmul ceiling", best.title
                )
            )
        if best.peak_memory_bytes:
            found.append(HeadlineFigure(formatting.size(best.peak_memory_bytes), "peak memory", best.title))
    done = sum(rung.status == "ok" for rung in ladder.rungs)
    found.append(HeadlineFigure(f"{done} of {len(ladder.rungs)}", "rungs measured", ""))
    return found


def _cumulative(best: RungView, by_medians: float) -> float:
    """The gain over the first rung; compared batch by batch it is not the quotient of the two medians."""
    total = best.total_gain
    return total.ratio if total and total.paired else by_medians


def _gain_figure(best: RungView, ratio: float) -> HeadlineFigure:
    total = best.total_gain
    known = total is not None and total.low is not None and total.high is not None
    bounds = f"{formatting.ratio(total.low)} to {formatting.ratio(total.high)}" if total and known else ""
    return HeadlineFigure(formatting.ratio(ratio), "faster, learning the same", bounds)


def machine_name(machine: Mapping[str, Json]) -> str:
    """One line: `2 × NVIDIA H200 (140 GiB each)`, `CPU Neoverse-N1 (2 cores)`."""
    devices = machine.get("devices")
    rows = [row for row in devices if isinstance(row, dict)] if isinstance(devices, list) else []
    if not rows:
        return "an unknown machine"
    name = text(rows[0].get("name")) or "unnamed device"
    memory = whole(rows[0].get("memory_bytes"))
    space = formatting.size(memory) if memory else ""
    if machine.get("device") == "cpu":
        cpu = machine.get("cpu")
        threads = whole(cpu.get("num_threads")) if isinstance(cpu, dict) else None
        inside = ", ".join(
            part for part in (formatting.plural(threads, "core") if threads else "", space) if part
        )
        return f"CPU {name}{f' ({inside})' if inside else ''}"
    if len(rows) == 1:
        return f"{name}{f' ({space})' if space else ''}"
    return f"{len(rows)} × {name}{f' ({space} each)' if space else ''}"


@dataclass(frozen=True)
class ClaimCheck:
    """A claim beside its finding, both as ratios of the same quantity."""

    rung: RungView
    claimed: float | None
    found: float | None
    low: float | None
    high: float | None
    outcome: str
    sign: str
    tone: str
    what: str


def compare_claim(ladder: LadderView, rung: RungView) -> ClaimCheck | None:
    """The authors' claim against what was measured; None when there is no claim."""
    claim = rung.claim
    if claim is None:
        return None
    claimed = None if claim.gain is None else 1 + claim.gain
    what = {"tokens_per_s": "speed", "peak_memory_bytes": "peak memory"}.get(claim.metric, claim.metric)
    found, low, high = _finding(ladder, rung, claim.metric)
    if found is None:
        measurable = claim.metric in ("tokens_per_s", "peak_memory_bytes")
        outcome = "not measured" if measurable else "not measured as such"
        return ClaimCheck(rung, claimed, None, None, None, outcome, "ring", "plain", what)
    outcome, sign, tone = _outcome(
        claimed, found, low, high, less_is_better=claim.metric == "peak_memory_bytes"
    )
    return ClaimCheck(rung, claimed, found, low, high, outcome, sign, tone, what)


def effects(ladder: LadderView, rung: RungView) -> str:
    """What the rung changed here, whatever its claim is about: speed, memory, waiting for data."""
    before = ladder.rung(rung.gain.over) if rung.gain else None
    sentences = []
    if rung.gain:
        chance = ", within noise" if rung.gain.real is False else ""
        sentences.append(f"speed {formatting.change(rung.gain.ratio)}{chance}")
    if before and before.peak_memory_bytes and rung.peak_memory_bytes:
        sentences.append(
            f"peak memory {formatting.change(rung.peak_memory_bytes / before.peak_memory_bytes)}"
        )
    if before and rung.claim and "data" in rung.claim.metric:
        waits = (formatting.milliseconds(before.data_wait_ms), formatting.milliseconds(rung.data_wait_ms))
        sentences.append(f"waiting for data {waits[0]} before, {waits[1]} now")
    return f"Here: {'; '.join(sentences)}." if sentences else ""


def _finding(
    ladder: LadderView, rung: RungView, metric: str
) -> tuple[float | None, float | None, float | None]:
    """The measured ratio of the claim's quantity against the rung it is compared with."""
    if metric == "tokens_per_s" and rung.gain:
        return rung.gain.ratio, rung.gain.low, rung.gain.high
    before = ladder.rung(rung.gain.over) if rung.gain else None
    if metric == "peak_memory_bytes" and before and before.peak_memory_bytes and rung.peak_memory_bytes:
        return rung.peak_memory_bytes / before.peak_memory_bytes, None, None
    return None, None, None


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
        return "not seen here", "level", "plain"
    return (
        ("less than claimed", "level", "caution") if found > 1 else ("the opposite here", "down", "caution")
    )


def warnings(ladder: LadderView) -> list[str]:
    """What a reader should know before trusting the numbers."""
    notes = []
    if ladder.finished is None:
        notes.append(
            f"This ladder is not finished: {formatting.plural(len(ladder.rungs), 'rung')} so far. "
            "Run the same command again and it resumes where it stopped."
        )
    if ladder.drift and ladder.drift.flagged:
        notes.append(
            f"The machine drifted: the first rung, measured again at the end, came out at {formatting.change(ladder.drift.ratio)} "
            "against the first time, more than its interval allows. Differences of that size mean nothing."
        )
    if ladder.drift and ladder.drift.restless and ladder.drift.uneven:
        notes.append(
            "Batches of this data hold such unequal numbers of tokens that times of one and the same rung lie far apart, and its "
            "two measurements share too few batches to compare them one by one. Smaller gains cannot be resolved, and whether the "
            "machine was quiet cannot be concluded from this. More samples (measure.windows, measure.timed_max_s) help."
        )
    elif ladder.drift and ladder.drift.restless:
        notes.append(
            "The machine was too busy with other things: times of one and the same rung lie so far apart that smaller gains "
            "cannot be resolved. Run it again when nothing else runs."
        )
    throttled = [r.title for r in ladder.rungs if r.environment.get("throttle")]
    if throttled:
        notes.append(f"The device reported throttling during {_listed(throttled)}.")
    restless = [r.title for r in ladder.rungs if r.environment.get("steady") is False]
    if restless:
        notes.append(f"Step times did not become steady during {_listed(restless)}.")
    above = [r for r in ladder.rungs if (r.ceiling_fraction or 0) > 1.1]
    if above:
        worst = max(above, key=lambda r: r.ceiling_fraction or 0)
        notes.append(
            f"{worst.title} came to {formatting.share(worst.ceiling_fraction)} of the measured ceiling. The ceiling was "
            "measured too low, perhaps while the machine was busy: refresh it with rush probe."
        )
    crowded = [r.title for r in ladder.rungs if (whole(r.environment.get("foreign_processes")) or 0) > 0]
    if crowded:
        notes.append(f"Other processes used the device during {_listed(crowded)}.")
    return notes


def environment(rung: RungView) -> list[tuple[str, str]]:
    """The surroundings of a measurement as name and value, for the table of raw samples."""
    names = {"clock_mhz": "clock (MHz)", "temperature_c": "temperature (°C)", "throttle": "throttling",
             "foreign_processes": "foreign processes", "load": "load", "steady": "steady"}  # fmt: skip
    rows = []
    for key, value in rung.environment.items():
        if value not in (None, [], {}):
            description = ", ".join(map(shown, value)) if isinstance(value, list) else shown(value)
            rows.append((names.get(key, text(key) or ""), description))
    return rows


def _listed(names: list[str]) -> str:
    head = ", ".join(names[:6])
    return f"{head} and {len(names) - 6} more" if len(names) > 6 else head
