"""A scaling study in words: the headline, comparisons of two points, warnings.

Only layouts with parity with one device have a speed. If none has one, the proof is still reported: ranks that shared a device
show that a layout learns the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from rush.records.gains import judge
from rush.records.scaling import PointRecord, ScaleRecord, ScalingEfficiency
from rush.report import formatting, headlines


def headline(record: ScaleRecord) -> str:
    """The study in a few sentences: the fastest layout that learns the same on the most devices, or why there is none."""
    there = _on_most_devices(record)
    if not there:
        return " ".join(_without_speed(record))
    best = max(there, key=speed_of)
    most = best["devices"]
    kind = "strong" if "strong" in best["efficiency"] else "weak"
    found = best["efficiency"][kind]
    low, high = found["ci95"]
    level = [p["layout"] for p in there if p is not best and _interval(p)[1] >= _interval(best)[0]]
    noise = f" Within the noise of this study, {' and '.join(level)} may be as fast." if level else ""
    only = "the only layout measured" if len(there) == 1 else "the fastest"
    return (
        f"On {most} devices {best['layout']} is {only} that learns the same: {formatting.speed(speed_of(best))}, "
        f"{formatting.share(found['ratio'])} of what {most} devices could do ({formatting.share(low)} to {formatting.share(high)})"
        f"{_over_one(most, low, high, found['ratio'])}.{noise}"
    )


def best_point(record: ScaleRecord) -> PointRecord | None:
    """The fastest layout that learns the same, on the most devices."""
    return max(_on_most_devices(record), key=speed_of, default=None)


def _on_most_devices(record: ScaleRecord) -> list[PointRecord]:
    """The points on the most devices that learn the same and have an efficiency, strong scaling first."""
    equal = [
        p for p in record["points"] if p["verdict"] == "equal" and p["tokens_per_s"] and p["devices"] > 1
    ]
    several = [p for p in equal if "strong" in p["efficiency"]] or [p for p in equal if p["efficiency"]]
    return [p for p in several if p["devices"] == max(point["devices"] for point in several)]


def _over_one(devices: int, low: float, high: float, ratio: float) -> str:
    """What the devices gain over one: the efficiency times their number."""
    judged = judge(devices * low, devices * high)
    times = formatting.ratio(devices * ratio)
    if judged in ("faster", "slower"):
        return f", {times} of one device"
    return (
        ", no faster than one device"
        if judged == "no gain"
        else f", {times} of one device, which cannot be told from none"
    )


def _without_speed(record: ScaleRecord) -> list[str]:
    """What can be said where no layout on several devices has a speed: who learns the same nevertheless."""
    ran = [p for p in record["points"] if p["devices"] > 1 and p["verdict"] in ("equal", "shared device")]
    same = [point for point in ran if (point["parity"] or {}).get("verdict") == "equal"]
    sentences = []
    for count in sorted({point["devices"] for point in same}):
        own = [point for point in same if point["devices"] == count]
        names = list(dict.fromkeys(point["layout"] for point in own))
        verb = "learns" if len(names) == 1 else "learn"
        why = (
            "the ranks shared a device, so there is no speed"
            if all(point.get("shared") for point in own)
            else "there is no speed beside it"
        )
        sentences.append(f"{_listed(names)} on {count} ranks {verb} what one rank learns; {why}.")
    if not same:
        sentences.append("No layout on several devices has been measured that learns what one device learns.")
    alone = [
        p
        for p in record["points"]
        if p["devices"] == 1 and p["verdict"] == "equal" and "strong" in p["efficiency"]
    ]
    for point in alone:
        found = point["efficiency"]["strong"]
        low, high = found["ci95"]
        sentences.append(
            f"{point['layout']} as a group of one makes {formatting.share(found['ratio'])} of one device "
            f"({formatting.share(low)} to {formatting.share(high)})."
        )
    return sentences


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def pair_words(speed: ScalingEfficiency | None) -> str:
    """A quotient of two points with its interval, and what that says where it is no difference."""
    if not speed:
        return formatting.MISSING
    said = {"no gain": ", no difference", "cannot tell": ", cannot tell"}.get(judge(*speed["ci95"]), "")
    return formatting.ratio_between(speed["ratio"], speed["ci95"]) + said


def took(record: ScaleRecord) -> str:
    """How long it was measured, as far as the record says."""
    timed = [step["samples"] for point in record["points"] if (step := point.get("step_ms"))]
    steps = sum(sum(samples) for samples in timed) / 1000
    return headlines.took_words(record.get("trials_s"), record["started"], record.get("finished"), steps)


def _interval(point: PointRecord) -> tuple[float, float]:
    assert point["tokens_per_s"] is not None
    low, high = point["tokens_per_s"]["ci95"]
    return low, high


def speed_of(point: PointRecord) -> float:
    speed = point["tokens_per_s"]
    return speed["median"] if speed else 0.0


def warnings(record: ScaleRecord) -> list[str]:
    sentences = []
    if record["machine"].get("device") == "cpu":
        cores = record.get("threads_per_rank") or 1
        sentences.append(
            f"These ranks ran on a CPU, {formatting.plural(cores, 'core')} each, and talked through gloo: this shows that the machinery "
            "works, and is no figure for GPUs."
        )
    if any(point.get("shared") for point in record["points"]):
        sentences.append(
            "Some ranks shared a device. They show that a layout learns the same; they have no speed."
        )
    drift = record.get("drift")
    if drift and drift.get("flagged"):
        sentences.append(
            f"The first point was measured again at the end and had moved by {formatting.change(drift['ratio'])}."
        )
    elif drift and drift.get("restless"):
        sentences.append(
            "Batches differ, and the two measurements of the first point share too few of them to tell small differences."
            if drift.get("uneven")
            else "The machine was too busy to tell small differences; run the study again when nothing else runs."
        )
    return sentences
