"""Two GPU models in words, and whether eight devices can be nine times as fast as one."""

from __future__ import annotations

from collections.abc import Sequence

from rush.records.plan_chart import MODES, SAME_STEP, PlanChartRecord, PredictedPoint
from rush.report import formatting


def in_group(record: PlanChartRecord, group: str) -> list[PredictedPoint]:
    return [point for point in record["predicted"] if point["group"] == group]


def times_one(points: Sequence[PredictedPoint], devices: float) -> float | None:
    """The speedup over the smallest number of devices, if both fit."""
    found = {point["x"]: point for point in points if point["fits"]}
    base = min(found, default=None)
    if base is None or base != 1 or devices not in found:
        return None
    return found[devices]["tokens_per_s"] / found[base]["tokens_per_s"]


def cards_words(record: PlanChartRecord) -> list[str]:
    options = record["options"]
    first, second, most = options["machine"], options["against"], float(options["devices"])
    found = []
    for name in options["recipes"]:
        pairs: dict[str, dict[str, PredictedPoint]] = {}
        for point in in_group(record, name):
            if point["fits"]:
                pairs.setdefault(point["name"], {})[point["series"]] = point
        both = {n: two for n, two in pairs.items() if len(two) == 2}
        if both:
            ratios = {n: two[second]["tokens_per_s"] / two[first]["tokens_per_s"] for n, two in both.items()}
            low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
            found.append(
                f"{name} on {most:g} {second}: {formatting.share(ratios[high])} of {first} with {high}, {formatting.share(ratios[low])} "
                f"with {low}."
            )
    return [*_claimed(record), *found]


def _claimed(record: PlanChartRecord) -> list[str]:
    """Whether four GPUs can be ×4 as fast as one and eight ×9, as somebody claimed."""
    options = record["options"]
    second = options["against"]
    if float(options["devices"]) < 8:
        return []
    groups: dict[str, list[tuple[str, float, float, float]]] = {mode: [] for mode in MODES}
    for name in options["recipes"]:
        for mode in MODES:
            own = [p for p in in_group(record, f"{name}, {mode}") if p["series"] == second]
            four, eight = times_one(own, 4), times_one(own, 8)
            if four is not None and eight is not None:
                error = max(point["expected_error"]["time"] for point in own)
                groups[mode].append((f"{name}, {mode}", four, eight, error))
    modes = [group for own in groups.values() for group in own]
    if not modes:
        return [f"Whether 8 {second} can make ×9 of one is not answered: nothing here fits one device."]
    top = max(modes, key=lambda mode: mode[2])
    same = max(groups[SAME_STEP], key=lambda mode: mode[2], default=top)
    reach = top[2] * (1 + top[3])
    found = [
        f"Can 4 {second} make ×4 of one and 8 make ×9? With the same step the plan gives at most {formatting.ratio(same[1])} and {formatting.ratio(same[2])} "
        f"({same[0].split(',')[0]}); the most of all is {formatting.ratio(top[1])} and {formatting.ratio(top[2])} ({top[0]}).",
    ]
    verdict = (
        "is what the plan says"
        if top[2] >= 9
        else "is within the stated error"
        if reach >= 9
        else "is beyond the stated error"
    )
    found.append(
        f"×9 on 8 {verdict} (±{100 * top[3]:.0f} %: {formatting.ratio(top[2] * (1 - top[3]))} to {formatting.ratio(reach)}), and the plan "
        + ("cannot rule it out. " if reach >= 9 else "rules it out. ")
        + _why_more(record, top)
    )
    if top[2] < 9:
        found.append(
            "Somebody who measures ×4 on 4 and ×9 on 8 should ask whether the one device did the same work: a smaller batch, "
            "checkpointing or an update that the others share make it slower, and the quotient larger than the number of cards."
        )
    return found


def _why_more(record: PlanChartRecord, top: tuple[str, float, float, float]) -> str:
    """Why eight devices can be more than eight times as fast as one."""
    if top[2] <= 8:
        return ""
    own = {p["x"]: p for p in in_group(record, top[0]) if p["series"] == record["options"]["against"]}
    one, eight = own[1.0], own[8.0]

    def each(point: PredictedPoint, part: str) -> float:
        return point["time_s"].get(part, 0.0) / (point.get("step_tokens", 1) / point["devices"])

    parts = {part for point in (one, eight) for part in point["time_s"]}
    shrinks = max(parts, key=lambda part: each(one, part) - each(eight, part))
    whole = sum(one["time_s"].values()) / (one.get("step_tokens", 1) / one["devices"])
    share = (each(one, shrinks) - each(eight, shrinks)) / whole
    return (
        f"More than ×8 is no magic: per token a device spends less on one part, the {shrinks} ({formatting.share(share)} of one device's "
        "step), because the shards divide it or more memory avoids it."
    )
