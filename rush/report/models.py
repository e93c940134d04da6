"""The end-to-end bench as a page: each workload as bars, the rival beside ours, with the target and every number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rush.files import write_atomic
from rush.records.ladder import Rung
from rush.records.models import ModelRecord, Workload, read_models
from rush.report import bars, findings, words
from rush.report.kernels import TONES
from rush.report.ladder import Measure
from rush.report.page import flattened, render


@dataclass(frozen=True)
class Side:
    """The rival, or one of ours, as a row of the picture."""

    title: str
    rung: Rung
    target: dict[str, Any] | None
    bar: Markup | None
    memory: Markup | None


def write_model_report(folder: Path, html: Path) -> None:
    """Draw the bench recorded in `folder` into one self-contained file."""
    write_atomic(html, model_page(read_models(folder)))


def model_page(record: ModelRecord) -> str:
    targets = [ours["target"] for workload in record["workloads"] for ours in workload["ours"]]
    return render(
        "models.html",
        title="Whole runs",
        record=record,
        machine=findings.machine_name(record["machine"]),
        machine_rows=flattened(record["machine"]) + flattened(record.get("ceilings") or {}, "ceilings"),
        parts=[(workload, sides(workload)) for workload in record["workloads"]],
        reached=sum(target["verdict"] == "reached" for target in targets),
        targets=targets,
        tones=TONES,
    )


def sides(workload: Workload) -> list[Side]:
    """The rival first, then ours, on one scale."""
    every: list[tuple[Rung, dict[str, Any] | None]] = [(workload["rival"], None)]
    every += [(ours["rung"], dict(ours["target"])) for ours in workload["ours"]]
    speeds = [measure_of(rung) for rung, _ in every]
    top = bars.top_speed(speeds)
    memory = max((float(rung.get("peak_memory_bytes") or 0) for rung, _ in every), default=0.0) or None
    return [
        _side(rung, target, speed, top, memory) for (rung, target), speed in zip(every, speeds, strict=True)
    ]


def measure_of(rung: Rung) -> Measure | None:
    speed = rung.get("tokens_per_s")
    if speed is None:
        return None
    low, high = speed["ci95"]
    return Measure(speed["median"], low, high, len(speed["samples"]), tuple(speed["samples"]))


def _side(
    rung: Rung, target: dict[str, Any] | None, speed: Measure | None, top: float | None, memory: float | None
) -> Side:
    title, held = rung["title"], rung.get("peak_memory_bytes")
    ratio = target["reached"] if target else None
    return Side(
        title,
        rung,
        target,
        bars.speed_bar(speed, top, title, total=ratio),
        bars.memory_bar(float(held) if held else None, memory, title),
    )


def table(record: ModelRecord) -> list[Sequence[str]]:
    """Every measured pair as plain words: workload, rival's rate, ours, ratio with interval, memory, verdicts."""
    rows: list[Sequence[str]] = []
    for workload in record["workloads"]:
        rival = workload["rival"]
        for ours in workload["ours"]:
            rung, target = ours["rung"], ours["target"]
            rows.append(
                (
                    workload["about"],
                    f"{rival['title']}: {_rate(rival)}",
                    f"`{rung['name']}`: {_rate(rung)}",
                    ratio_words(dict(target)),
                    f"≥ {target['at_least']:g}×",
                    f"{words.size(rung.get('peak_memory_bytes'))} (rival {words.size(rival.get('peak_memory_bytes'))})",
                    (rung.get("parity") or {}).get("verdict", "not judged"),
                    target["verdict"],
                )
            )
    return rows


def ratio_words(target: dict[str, Any]) -> str:
    """The ratio with its interval."""
    if target.get("reached") is None:
        return words.MISSING
    low, high = target["ci95"]
    return f"{target['reached']:.3f}× ({low:.3f} to {high:.3f})"


def _rate(rung: Rung) -> str:
    speed = rung.get("tokens_per_s")
    return f"{words.si(speed['median'])} tokens/s" if speed else rung["verdict"]
