"""The meaning of the numbers, in words: verdicts, the headline, claims against findings, warnings.

A verdict never relies on color alone: it has a sign and words. The highest median is not the ladder's result: among ten rungs
that change nothing one is always the fastest. The headline names only a rung that was judged *equal and faster* than the one
before it, whose cumulative gain is also real, and that is usable; a separate sentence mentions rungs that were really faster
but not equal or not usable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rush.records.gains import TIGHT
from rush.records.step_gap import more_steps
from rush.report import formatting
from rush.report.ladder import LadderView, ParityView, RungView
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
    "no gain": VerdictStyle("plain", "level", f"not faster: the whole interval is within {100 * TIGHT:g} % of no change"),
    "cannot tell": VerdictStyle("plain", "query", "the interval is too wide to tell a gain from none, or from a loss"),
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
_NOT_TIMED = ("unsupported", "out of memory", "crashed", "timed out", "diverged")


def verdict_of(rung: RungView) -> VerdictStyle:
    return VERDICTS.get(rung.verdict, _UNKNOWN)


def learns_the_same(rung: RungView) -> bool:
    return rung.verdict == "baseline" or (rung.parity is not None and rung.parity.verdict == "equal")


def credited(ladder: LadderView) -> RungView | None:
    """The fastest rung whose gain over the rung before and over the first are both real, that learns the same and can be used."""
    real = [r for r in ladder.rungs if r.verdict == "equal and faster" and learns_the_same(r) and _ahead(r)]
    return _fastest(rung for rung in real if rung.usable)


def together(ladder: LadderView) -> RungView | None:
    """If no single rung is credited: the highest that others build on, if all up to it gain together.

    One rung, fixed before the measurement: the best of many would be ahead by chance.
    """
    built = [r for r in ladder.rungs if r.kept and r.status == "ok" and r.usable and learns_the_same(r)]
    top = next((rung for rung in reversed(built) if rung.verdict != "no gain"), None)
    return top if top and ladder.view == "cumulative" and _ahead(top) else None


def _ahead(rung: RungView) -> bool:
    """Whether its cumulative gain is real."""
    return rung.status == "ok" and rung.total_gain is not None and rung.total_gain.judged == "faster"


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
    """Two or three sentences: first and best speed, whether the model learns the same, and faster rungs that do not count."""
    first, best = first_measured(ladder), credited(ladder)
    if first is None or first.speed is None:
        return "No rung has been measured yet."
    begin = f"{first.title} makes {formatting.speed(first.speed.median)}"
    top = best or together(ladder)
    if best and best.speed:
        sentence = (
            f"From {first.title} at {formatting.speed(first.speed.median)} to {best.title} at "
            f"{formatting.speed(best.speed.median)}: {formatting.ratio(_cumulative(best))}, and the model still learns the same."
        )
    elif top:
        sentence = (
            f"{begin}. No single rung is faster beyond noise; together those up to {top.title} make "
            f"{formatting.ratio(_cumulative(top))}, and the model still learns the same."
        )
    else:
        sentence = f"{begin}; {_nothing_faster(ladder)}"
    reached = top.speed.median if top and top.speed else 0.0
    return " ".join([sentence, *_faster_and_no_result(ladder, reached)])


def _nothing_faster(ladder: LadderView) -> str:
    """If nothing is credited: whether that is a finding or inconclusive."""
    tried = [rung for rung in ladder.rungs if rung.verdict not in ("baseline", *_NOT_TIMED)]
    open_ = [rung for rung in tried if rung.verdict == "cannot tell"]
    if not tried:
        return "nothing else was measured."
    if not open_:
        return "nothing was found faster here that learns the same."
    of = "of all rungs" if len(open_) == len(tried) else f"of {len(open_)} of {len(tried)} rungs"
    return f"nothing was found faster here that learns the same, but {of} this cannot be told: their intervals are too wide."


def _faster_and_no_result(ladder: LadderView, reached: float) -> list[str]:
    """Rungs that were really faster than the credited one, but learn differently, are not proven, or are unusable."""
    sentences = []
    able = [rung for rung in ladder.rungs if _ahead(rung) and rung.speed]
    other = _fastest(r for r in able if r.usable and not learns_the_same(r))
    if other and other.speed and other.speed.median > reached:
        different = other.parity is not None and other.parity.verdict == "different"
        apart = "learns differently" if different else "is not proven equal"
        sentences.append(f"{other.title} reached {formatting.speed(other.speed.median)} but {apart}.")
    unusable = _fastest(rung for rung in able if not rung.usable)
    if unusable and unusable.speed and unusable.speed.median > reached:
        speed = formatting.speed(unusable.speed.median)
        sentences.append(f"{unusable.title} reached {speed} but cannot be trained with.")
    return sentences


def figures(ladder: LadderView) -> list[HeadlineFigure]:
    """The large numbers: the gain only where one is credited, the others of that rung, or of the first."""
    first, best = first_measured(ladder), credited(ladder)
    shown_rung = best or first
    found: list[HeadlineFigure] = []
    if best:
        found.append(_gain_figure(best))
    if shown_rung and shown_rung.speed:
        name = shown_rung.title
        found.append(HeadlineFigure(formatting.si(shown_rung.speed.median), ladder.rate, name))
        if shown_rung.mfu is not None:
            share = formatting.share(shown_rung.mfu)
            found.append(HeadlineFigure(share, "of the datasheet peak (MFU)", name))
        elif shown_rung.ceiling_fraction is not None:
            share = formatting.share(shown_rung.ceiling_fraction)
            found.append(HeadlineFigure(share, "of the measured matmul ceiling", name))
        if shown_rung.peak_memory_bytes:
            found.append(HeadlineFigure(formatting.size(shown_rung.peak_memory_bytes), "peak memory", name))
    done = sum(rung.status == "ok" for rung in ladder.rungs)
    found.append(HeadlineFigure(f"{done} of {len(ladder.rungs)}", "rungs measured", ""))
    return found


def _cumulative(best: RungView) -> float:
    """The gain over the first rung, the one its interval belongs to. (Compared batch by batch it is not the quotient of the
    two medians.)"""
    assert best.total_gain is not None
    return best.total_gain.ratio


def _gain_figure(best: RungView) -> HeadlineFigure:
    total = best.total_gain
    assert total is not None
    bounds = f"{formatting.ratio(total.low)} to {formatting.ratio(total.high)}"
    return HeadlineFigure(formatting.ratio(total.ratio), "faster, learning the same", bounds)


def took(ladder: LadderView) -> str:
    """How long it was measured, as far as the record says.

    A ladder may be measured in several sessions, days apart. Newer records have the sum of their trials. In older ones
    `started` and `finished` may be those of the last session: where the steps alone took longer, only that is said.
    """
    return took_words(ladder.trials_s, ladder.started, ladder.finished, sum(map(_steps_s, ladder.rungs)))


def took_words(trials_s: float | None, started: str | None, finished: str | None, steps_s: float) -> str:
    """From the sum of the trials where it is recorded; from the clock where the steps alone did not take longer."""
    if trials_s:
        return f"its trials took {formatting.seconds(trials_s)}"
    elapsed = formatting.elapsed_s(started, finished)
    if elapsed is None:
        return ""
    if elapsed >= steps_s:
        return f"took {formatting.seconds(elapsed)}"
    return f"its steps alone took {formatting.seconds(steps_s)}, in several sessions"


def _steps_s(rung: RungView) -> float:
    """Seconds of compiling, warming up and of one timed step in each sample: the least that the rung can have taken."""
    timed = sum(rung.step.samples) / 1000 if rung.step else 0.0
    return timed + max(0.0, rung.compile_s or 0.0) + max(0.0, rung.warmup_s or 0.0)


def finest_words(parity: ParityView) -> str:
    """The finest test that a rung passed, whatever was promised; with the gap, also in per cent of steps, where only the curve agrees."""
    if parity.measured is None:
        return ""
    gap = (
        f", gap {formatting.share(abs(parity.gap))}"
        if parity.measured == "statistical" and parity.gap is not None
        else ""
    )
    losses, plain = (
        [one for one in curve if one is not None] for curve in (parity.losses, parity.reference_losses)
    )
    more = more_steps(losses, plain) if parity.measured == "statistical" else None
    steps = (
        f": {100 * abs(more):.1f} % {'more' if more >= 0 else 'fewer'} steps for the same loss"
        if more is not None
        else ""
    )
    return f"Finest test passed: {parity.measured}{gap}{steps}."


def disturbed_words(rung: RungView) -> str:
    """A sentence on a disturbed process; empty if there was none."""
    if rung.disturbed is None:
        return ""
    then = "measured again" if rung.disturbed.again else "it is in no interval"
    return f"One process was disturbed: {formatting.digits(rung.disturbed.ratio)} of the others; {then}."


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


def warnings(ladder: LadderView) -> list[str]:
    """Warnings about the numbers."""
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
    """The conditions of a measurement as name and value, for the table of raw samples."""
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
