"""A planner's chart in words: the answer, the expected error, published measurements, gaps.

Every figure comes from the record. No sentence claims more than a plan supports: a plan that does not fit gets no speed, and a
claim within the expected error is neither confirmed nor refuted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rush.records.gains import TIGHT
from rush.records.plan_chart import NO_CHECKPOINTING, PlanChartRecord, PredictedPoint
from rush.report import formatting
from rush.report.formatting import JOIN
from rush.report.plan_card_words import cards_words, in_group, times_one

PLANNED, MEASURED, IDEAL = "planned", "measured and published", "ideal"


def sentences(record: PlanChartRecord) -> list[str]:
    """The answer first, then what it rests on."""
    return [*ANSWERS[record["chart"]](record), *resting_on(record)]


def error_words(points: Sequence[PredictedPoint], kind: str) -> str:
    """`±20 %`, or `±20 to 25 %` where plans state different errors."""
    key = "memory" if kind == "memory" else "time"
    found = sorted({p["expected_error"]["memory" if key == "memory" else "time"] for p in points})
    low, high = (f"{100 * value:.0f}" for value in (found[0], found[-1]))
    return f"±{high}{JOIN}%" if low == high else f"±{low} to {high}{JOIN}%"


def resting_on(record: PlanChartRecord) -> list[str]:
    """The stated error, how far plans were off where somebody measured, and what cannot be planned or run."""
    plans = record["predicted"]
    hows = " and ".join(sorted({point["how"] for point in plans}))
    found = []
    if plans:
        found.append(
            f"Everything hollow, broken or pale is a plan, made without a device (rates: {hows}). The planner states "
            f"{error_words(plans, 'time')} for its times and {error_words(plans, 'memory')} for its memory."
        )
    runs = record["published"]
    if runs:
        errors = [run["planned"]["tokens_per_s"] / run["tokens_per_s"] - 1 for run in runs]
        found.append(
            f"Filled marks are what others measured and published, {formatting.plural(len(runs), 'run')}. Planned the same way, "
            f"their speeds come out {_span(errors)}"
            + (_memory_errors(record) or "; their memory was not published")
            + "."
        )
    else:
        found.append("No published measurement of this is among the sources, so there is no filled mark.")
    reasons: dict[str, dict[str, None]] = {}
    for point in record["refused"]:
        reasons.setdefault(point["reason"], {})[point["name"]] = None
    found += [
        f"{' and '.join(names)} cannot be planned: {reason.rstrip('.')}." for reason, names in reasons.items()
    ]
    problems = {problem: None for point in plans for problem in point["problems"]}
    found += [f"Some of these cannot run with rush: {problem.rstrip('.')}." for problem in problems]
    return found


def _memory_errors(record: PlanChartRecord) -> str:
    pairs = [
        (r["planned_reserved_bytes"], size) for r in record["published"] if (size := r.get("memory_bytes"))
    ]
    if not pairs:
        return ""
    errors = [planned / found - 1 for planned, found in pairs]
    return f", their memory {_span(errors)}"


def _span(errors: Sequence[float]) -> str:
    low, high = _signed(min(errors)), _signed(max(errors))
    return low if low == high else f"{low} to {high}"


def _signed(error: float) -> str:
    return f"{'+' if error > 0 else '−' if error < 0 else '±'}{abs(100 * error):.0f}{JOIN}%"


def _rate(point: PredictedPoint) -> str:
    return f"{point['tokens_per_s'] / point['devices']:,.0f} tokens/s"


def _speedup(record: PlanChartRecord) -> list[str]:
    points, most = record["predicted"], float(record["options"]["devices"])
    found = []
    for series in dict.fromkeys(point["series"] for point in points):
        own = [point for point in points if point["series"] == series]
        fits = [point for point in own if point["fits"]]
        times = times_one(own, most)
        if times is not None:
            found.append(f"{series}: {most:g} devices are planned to make {formatting.ratio(times)} of one.")
        elif fits:
            least = min(fits, key=lambda point: point["x"])
            found.append(
                f"{series} fits from {least['x']:g} devices on, where each makes {_rate(least)}; there is no single device to compare with."
            )
        else:
            smallest = min(own, key=lambda point: point["needed_bytes"])
            found.append(
                f"{series} fits no number of devices up to {most:g}: it needs {formatting.size(smallest['needed_bytes'])} of "
                f"{formatting.size(smallest['room_bytes'])}."
            )
    return found


def _memory(record: PlanChartRecord) -> list[str]:
    points = record["predicted"]
    fits = [point for point in points if point["fits"]]
    first, last = points[0], points[-1]
    parts = {name: (first["memory_bytes"].get(name, 0), last["memory_bytes"].get(name, 0)) for name in last["memory_bytes"]}  # fmt: skip
    kept = max(parts, key=lambda name: parts[name][1])
    found = [
        f"One device needs {formatting.size(last['needed_bytes'])} where {last['x']:g} share the model, and "
        f"{formatting.size(first['needed_bytes'])} alone. What sharding leaves is mostly {kept}: {formatting.size(parts[kept][1])} "
        f"of it on {last['x']:g} devices."
    ]
    if fits and fits[0] is not first:
        tight = ", by less than the error" if fits[0]["tight"] else ""
        found.append(
            f"It fits from {fits[0]['x']:g} devices on{tight} ({formatting.size(first['room_bytes'])} each)."
        )
    elif not fits:
        found.append(f"It fits none of them ({formatting.size(first['room_bytes'])} each).")
    return found


def _zero(record: PlanChartRecord) -> list[str]:
    stages = {point["series"]: point for point in in_group(record, "stages")}
    two, three = stages.get("ZeRO-2"), stages.get("ZeRO-3")
    found = []
    if two and three:
        ratio = three["tokens_per_s"] / two["tokens_per_s"]
        saved = 1 - three["needed_bytes"] / two["needed_bytes"]
        error = error_words([three], "time")
        found.append(
            f"On {three['devices']} devices ZeRO-3 is planned to make {formatting.share(ratio)} of ZeRO-2's tokens per second and to "
            f"need {formatting.share(saved)} less memory. "
            + (
                f"A difference of {formatting.share(abs(1 - ratio))} is far below the stated error of {error}: do not choose by speed here."
                if abs(1 - ratio) < three["expected_error"]["time"]
                else f"The difference is beyond the stated error of {error}."
            )
        )
    for name in ("ZeRO-2", "ZeRO-3"):
        over = [p for p in in_group(record, "over devices") if p["series"] == name]
        fits = [point for point in over if point["fits"]]
        most = max((point["x"] for point in over), default=0)
        if fits:
            found.append(f"{name} fits from {min(p['x'] for p in fits):g} devices on.")
        elif over:
            found.append(f"{name} fits no number of devices up to {most:g}.")
    return found


def _links(record: PlanChartRecord) -> list[str]:
    found = []
    for name in record["options"]["recipes"]:
        points = in_group(record, name)
        by_layout: dict[str, dict[str, PredictedPoint]] = {}
        for point in points:
            by_layout.setdefault(point["name"], {})[point["series"]] = point
        pairs = {
            n: two["other"]["tokens_per_s"] / two["own"]["tokens_per_s"]
            for n, two in by_layout.items()
            if len(two) == 2
        }
        fitting = {n: ratio for n, ratio in pairs.items() if by_layout[n]["own"]["fits"]}
        if not fitting:
            found.append(f"{name}: no layout fits.")
            continue
        best, worst = max(fitting, key=fitting.__getitem__), min(fitting, key=fitting.__getitem__)
        found.append(
            f"{name}: over {record['options']['link']} {best} keeps {formatting.share(fitting[best])} of its speed and {worst} "
            f"{formatting.share(fitting[worst])} (layouts that fit)."
        )
    return found


def _nodes(record: PlanChartRecord) -> list[str]:
    weak, strong = in_group(record, "weak"), in_group(record, "strong")
    found = []
    for series in dict.fromkeys(point["series"] for point in weak):
        own = sorted((p for p in weak if p["series"] == series), key=lambda one: one["x"])
        kept = own[-1]["tokens_per_s"] / own[-1]["x"] / (own[0]["tokens_per_s"] / own[0]["x"])
        words = f"{series}: on {own[-1]['x']:g} nodes a device is planned to keep {formatting.share(kept)} of its speed on one"
        runs = sorted((r for r in record["published"] if r["series"] == series), key=lambda one: one["x"])
        if len(runs) > 1:
            a, b = runs[0], runs[-1]
            measured = b["tokens_per_s"] / b["devices"] / (a["tokens_per_s"] / a["devices"])
            at = {p["x"]: p for p in own}
            said = at.get(b["x"])
            same = said["tokens_per_s"] / said["x"] / (own[0]["tokens_per_s"] / own[0]["x"]) if said else None
            words += f"; measured on {b['x']:g}: {formatting.share(measured)}" + (f", where the plan says {formatting.share(same)}" if same else "")  # fmt: skip
        found.append(words + ".")
    for series in dict.fromkeys(point["series"] for point in strong):
        own = sorted((p for p in strong if p["series"] == series), key=lambda one: one["x"])
        kept = own[-1]["tokens_per_s"] / own[0]["tokens_per_s"]
        found.append(
            f"Strong scaling, {series}: {own[-1]['x']:g} nodes are planned to make {formatting.ratio(kept)} of one."
        )
    return found


def _layouts(record: PlanChartRecord) -> list[str]:
    own = in_group(record, "own")
    fits = [point for point in own if point["fits"] and not point["problems"]]
    found = []
    if own:
        best = max(fits, key=lambda point: point["tokens_per_s"], default=None)
        found.append(
            f"Of {len(own)} layouts for {own[0]['devices']:,} devices {len(fits)} fit; the fastest is planned to be {best['name']}: {_rate(best)} a device."
            if best
            else f"None of {len(own)} layouts fits {own[0]['devices']:,} devices."
        )
    refused = [run for run in record["published"] if run["planned"]["problems"]]
    reasons: dict[str, list[str]] = {}
    for run in refused:
        reasons.setdefault(run["planned"]["problems"][0], []).append(run["name"])
    if refused:
        found.append(
            f"{len(refused)} of the {len(record['published'])} published layouts cannot run with rush:"
        )
        found += [
            f"{formatting.plural(len(names), 'layout')}: {reason.rstrip('.')}."
            for reason, names in reasons.items()
        ]
    return found


def stops_paying(points: Sequence[PredictedPoint]) -> float | None:
    """The smallest batch whose doubling gains less than anybody adds a technique for, of those that fit; None where none is."""
    speed = {point["x"]: point["tokens_per_s"] for point in points if point["fits"]}
    return next((x for x in sorted(speed) if 2 * x in speed and speed[2 * x] / speed[x] < 1 + TIGHT), None)


def _batch(record: PlanChartRecord) -> list[str]:
    found = []
    for group in dict.fromkeys(point["group"] for point in record["predicted"]):
        points = in_group(record, group)
        best: dict[str, PredictedPoint] = {}
        for point in points:
            if point["fits"] and point["tokens_per_s"] > best.get(point["series"], {"tokens_per_s": 0.0})["tokens_per_s"]:  # fmt: skip
                best[point["series"]] = point
        plain = best.get(NO_CHECKPOINTING)
        if plain is None:
            found.append(f"{group}: without checkpointing nothing fits.")
            continue
        found.append(
            f"{group}: without checkpointing the best that fits is a micro batch of {plain['x']:g}, planned at {_rate(plain)}."
        )
        for name, one in best.items():
            if one is plain:
                continue
            ratio = one["tokens_per_s"] / plain["tokens_per_s"]
            verdict = "it pays by the batch it allows" if ratio > 1 + TIGHT else "it does not pay" if ratio < 1 else f"less than {100 * TIGHT:.0f} % is no gain"  # fmt: skip
            found.append(
                f"{group}, {name}: a micro batch of {one['x']:g} fits, planned at {_rate(one)}, {formatting.change(ratio)}: {verdict}."
            )
        found += [
            f"{group}, {name}: from {stop:g} rows on, twice the batch is planned to gain less than {100 * TIGHT:.0f} %."
            for name in dict.fromkeys(point["series"] for point in points)
            if (stop := stops_paying([point for point in points if point["series"] == name]))
        ]
    return found


ANSWERS: dict[str, Callable[[PlanChartRecord], list[str]]] = {
    "speedup": _speedup,
    "memory": _memory,
    "zero": _zero,
    "links": _links,
    "cards": cards_words,
    "nodes": _nodes,
    "layouts": _layouts,
    "batch": _batch,
}
