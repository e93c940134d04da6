"""The end-to-end bench as a page: each workload as bars, the baseline and ours, with its targets and every number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rush.files import write_atomic
from rush.records.ladder import RungRecord
from rush.records.life import life_words
from rush.records.models import MODELS, LongestRecord, ModelRecord, WorkloadRecord, read_models, verdicts_of
from rush.records.parity import parity_again, parity_verdict
from rush.records.step_gap import parity_words
from rush.records.targets import target_word
from rush.report import bars, formatting, headlines
from rush.report.kernels import TONES, reached_of
from rush.report.ladder import MeasureView, measure, net_row
from rush.report.page import flattened, render
from rush.report.race_words import net_words


@dataclass(frozen=True)
class Side:
    """The baseline, or one of ours, as a row of the chart."""

    title: str
    rung: RungRecord
    target: dict[str, Any] | None
    bar: Markup | None
    memory: Markup | None
    primary: bool
    """Whether the workload's target is for it."""


def write_model_report(folder: Path, html: Path) -> None:
    """Draw the bench recorded in `folder` into one self-contained file."""
    with MODELS.using(folder):
        write_atomic(html, model_page(read_models(folder)))


def model_page(record: ModelRecord) -> str:
    verdicts = verdicts_of(record)
    return render(
        "models.html",
        title="Whole runs",
        parity_again=parity_again,
        parity_words=parity_words,
        net_words=net_words,
        net_row=net_row,
        record=record,
        machine=headlines.machine_name(record["machine"]),
        machine_rows=flattened(record["machine"]) + flattened(record.get("ceilings") or {}, "ceilings"),
        parts=[(workload, sides(workload)) for workload in record["workloads"]],
        reached=reached_of(verdicts),
        target_word=target_word,
        tones=TONES,
        longest_words=longest_words,
        life_words=life_words,
    )


def sides(workload: WorkloadRecord) -> list[Side]:
    """The baseline first, then ours, on one scale; none where only lengths were tried."""
    if "longest" in workload:
        return []
    every: list[tuple[RungRecord, dict[str, Any] | None, bool]] = [(workload["rival"], None, True)]
    every += [(o["rung"], dict(o["target"]), o.get("primary", True)) for o in workload["ours"]]
    speeds = [measure(rung.get("tokens_per_s")) for rung, _, _ in every]
    top = bars.top_speed(speeds)
    memory = max((float(rung.get("peak_memory_bytes") or 0) for rung, _, _ in every), default=0.0) or None
    return [
        _side(rung, target, primary, speed, top, memory)
        for (rung, target, primary), speed in zip(every, speeds, strict=True)
    ]


def _side(
    rung: RungRecord,
    target: dict[str, Any] | None,
    primary: bool,
    speed: MeasureView | None,
    top: float | None,
    memory: float | None,
) -> Side:
    title, held = rung["title"], rung.get("peak_memory_bytes")
    ratio = target["reached"] if target else None
    return Side(
        title,
        rung,
        target,
        bars.speed_bar(speed, top, title, total=ratio),
        bars.memory_bar(float(held) if held else None, memory, title),
        primary,
    )


def table(record: ModelRecord) -> list[Sequence[str]]:
    """Every measured pair as plain words: workload, baseline's rate, ours, ratio with interval, memory, verdicts."""
    rows: list[Sequence[str]] = []
    for workload in record["workloads"]:
        if "longest" in workload:
            continue
        baseline = workload["rival"]
        for ours in workload["ours"]:
            rung, target = ours["rung"], dict(ours["target"])
            beside = "" if ours.get("primary", True) else " (beside it)"
            rows.append(
                (
                    workload["about"],
                    f"{baseline['title']}: {_rate(baseline)}",
                    f"`{rung['name']}`{beside}: {_rate(rung)}",
                    ratio_words(target),
                    wanted_words(target),
                    f"{formatting.size(rung.get('peak_memory_bytes'))} (baseline {formatting.size(baseline.get('peak_memory_bytes'))}"
                    f"{memory_ratio(target)})",
                    parity_verdict(rung.get("parity")) or "not judged",
                    verdict_words(target),
                )
            )
    return rows


def lengths(record: ModelRecord) -> list[Sequence[str]]:
    """Every workload that asked how long a sequence fits: the limit, what was reached, its speed, what others published."""
    return [
        (
            workload["about"],
            f"{longest['limit_bytes'] / 1e9:.0f} GB",
            f"{found['sequence']:,} tokens" if (found := longest.get("found")) else "none of those tried",
            f"{'at least ' if found.get('cold') else ''}{formatting.si(found['tokens_per_s'])} tokens/s"
            if found and found["tokens_per_s"]
            else formatting.MISSING,
            formatting.size(found["peak_memory_bytes"]) if found else formatting.MISSING,
            f"{longest['published']:,} ({longest['source']})",
        )
        for workload in record["workloads"]
        if (longest := workload.get("longest"))
    ]


def ratio_words(target: dict[str, Any]) -> str:
    """The ratio with its interval."""
    if target.get("reached") is None:
        return formatting.MISSING
    low, high = target["ci95"]
    return f"{target['reached']:.3f}× ({low:.3f} to {high:.3f})"


def wanted_words(target: dict[str, Any]) -> str:
    """What must be reached, memory included where it was asked for."""
    memory = target.get("memory")
    return f"≥ {target['at_least']:g}×" + (f", memory ≤ {memory['at_most']:g}×" if memory else "")


def verdict_words(target: dict[str, Any]) -> str:
    memory = target.get("memory")
    return f"{target_word(target)}; memory {target_word(memory)}" if memory else target_word(target)


def memory_ratio(target: dict[str, Any]) -> str:
    """The ratio of memory, where one was asked for and measured."""
    reached = target.get("memory", {}).get("reached")
    return f": {reached:.3f}×" if reached is not None else ""


def longest_words(longest: LongestRecord) -> str:
    """In one sentence what was reached, and where it ended."""
    found, fails = longest.get("found"), longest.get("fails_at")
    limit = f"{longest['limit_bytes'] / 1e9:.0f} GB"
    if not found:
        return f"No length that was tried ran in {limit}"
    end = f"; {fails:,} did not fit" if fails else "; the next was not tried"
    least = "with at least" if found.get("cold") else "at"
    speed = f" {least} {found['tokens_per_s']:,.0f} tokens/s" if found["tokens_per_s"] else ""
    return f"{found['sequence']:,} tokens ran in {limit}{speed}{end}{_proved(longest)}"


def _proved(longest: LongestRecord) -> str:
    """Parity, and the techniques without effect."""
    parity, idle = parity_again(longest.get("parity")), [
        each["technique"] for each in longest.get("evidence", []) if not each["took_effect"]
    ]  # fmt: skip
    learns = f"; parity {parity['verdict']}" if parity else ""
    life = longest.get("life")
    words_of = "" if life is None else "ok" if life["verdict"] == "ok" else life_words(life).rstrip(".")
    lived = f"; short life {words_of}" if words_of else ""
    return learns + lived + (f"; no trace of {', '.join(idle)}" if idle else "")


def _rate(rung: RungRecord) -> str:
    speed = rung.get("tokens_per_s")
    return f"{formatting.si(speed['median'])} tokens/s" if speed else rung["verdict"]
