"""From `ladder.json` to what the pages draw: typed, and forgiving about what is missing.

What a ladder is at all, `rush.records.ladder` decides. Beyond that, a ladder may be unfinished, made on a
machine without a datasheet, or written by a later version, and a report of nine good rungs must not fail
over the tenth. So a part that is missing or is not what it should be reads as None, drawn as a dash.

Text is cleaned once, here: characters that cannot be written as UTF-8 or that would control a terminal
become the replacement sign. Making it harmless in HTML is the template's business, not this one's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

from rush.records import ladder
from rush.records.life import life_words
from rush.report.ladder import (
    BatchPointView,
    ClaimView,
    DriftView,
    EvidenceView,
    GainView,
    InteractionView,
    Json,
    KernelView,
    LadderView,
    LifeView,
    MeasureView,
    ParityView,
    RungView,
)

_DRAWN = ("matmul", "copy_bytes_per_s", "transfers_bytes_per_s")


def read_ladder(path: Path) -> LadderView:
    """The ladder in a file or in a ladder's folder; a DataError when it is something else."""
    return _ladder(ladder.read_ladder(path))


def text(value: Json) -> str | None:
    """A string or a plain number as clean text, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    clean = str(value).encode("utf-8", "replace").decode()
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", clean)


def real(value: Json) -> float | None:
    """A finite number, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value) if math.isfinite(value) else None


def positive(value: Json) -> float | None:
    """A number above 1e-300, so that it can be divided by; None for anything else."""
    found = real(value)
    return found if found is not None and found > 1e-300 else None


def whole(value: Json) -> int | None:
    found = real(value)
    return int(found) if found is not None else None


def measure(raw: Json) -> MeasureView | None:
    """None unless there is a positive median."""
    row = _table(raw)
    median = positive(row.get("median"))
    if median is None:
        return None
    low, high = _pair(row.get("ci95"))
    samples = tuple(v for v in map(real, _list(row.get("samples"))) if v is not None)
    processes = tuple(
        tuple(v for v in map(real, _list(part)) if v is not None) for part in _list(row.get("processes"))
    )
    return MeasureView(median, low, high, whole(row.get("n")), samples, processes)


def shown(value: Json) -> str:
    """Any JSON value as text, for tables of things this version does not know by name."""
    if isinstance(value, str):
        return text(value) or ""
    return text(json.dumps(value, ensure_ascii=False)) or ""


def _ladder(raw: Mapping[str, Json]) -> LadderView:
    ceilings, drift = _table(raw.get("ceilings")), _table(raw.get("drift"))
    return LadderView(
        name=text(raw.get("name")) or "unnamed",
        view=text(raw.get("view")) or "cumulative",
        started=text(raw.get("started")),
        finished=text(raw.get("finished")),
        machine=_table(raw.get("machine")),
        matmul=_rates(ceilings.get("matmul")),
        copy_bytes_per_s=positive(ceilings.get("copy_bytes_per_s")),
        transfers=_rates(ceilings.get("transfers_bytes_per_s")),
        other_ceilings={key: value for key, value in ceilings.items() if key not in _DRAWN and value},
        peaks=_rates(raw.get("peaks")),
        base_recipe=text(_table(raw.get("base")).get("recipe")),
        formulas={text(k) or "": shown(v) for k, v in _table(raw.get("formulas")).items()},
        rungs=tuple(_rung(i, _table(row)) for i, row in enumerate(raw["rungs"], start=1)),
        drift=DriftView(
            positive(drift.get("first")),
            positive(drift.get("again")),
            positive(drift.get("ratio")),
            drift.get("flagged") is True,
            drift.get("restless") is True,
            whole(drift.get("paired")),
            drift.get("uneven") is True,
        )
        if drift
        else None,
        batch_curve=_batch_curve(raw.get("batch_curve")),
        batch_stops_paying_at=whole(raw.get("batch_stops_paying_at")),
        sequence_limits=tuple(map(_table, _list(raw.get("sequence_limits")))),
        trained=raw.get("counted") == "trained",
        interactions=tuple(_interaction(_table(row)) for row in _list(raw.get("interactions"))),
    )


def _rung(index: int, row: Mapping[str, Json]) -> RungView:
    name = text(row.get("name")) or f"rung {index}"
    status = text(row.get("status")) or "unknown"
    return RungView(
        index=index,
        name=name,
        title=text(row.get("title")) or name,
        adds=_adds(row.get("adds")),
        techniques=_adds(row.get("techniques")),
        recipe=text(row.get("recipe")),
        digest=text(row.get("digest")),
        kept=row.get("kept") is not False,
        status=status,
        reason=text(row.get("reason")),
        verdict=text(row.get("verdict")) or status.replace("_", " "),
        speed=measure(row.get("tokens_per_s")),
        step=measure(row.get("step_ms")),
        kinds=_rates(row.get("tokens_kind")),
        mfu=real(row.get("mfu")),
        hfu=real(row.get("hfu")),
        ceiling_fraction=real(row.get("ceiling_fraction")),
        flops_per_token=positive(row.get("flops_per_token")),
        bytes_per_step=positive(row.get("bytes_per_step")),
        step_tokens=whole(row.get("step_tokens")),
        micro=whole(row.get("micro")),
        sequence=whole(row.get("sequence")),
        peak_memory_bytes=positive(row.get("peak_memory_bytes")),
        compile_s=real(row.get("compile_s")),
        warmup_s=real(row.get("warmup_s")),
        warmup_steps=whole(row.get("warmup_steps")),
        data_wait_ms=real(row.get("data_wait_ms")),
        evidence=tuple(
            EvidenceView(
                text(e.get("technique")) or "?", e.get("took_effect") is True, text(e.get("what")) or ""
            )
            for e in map(_table, _list(row.get("evidence")))
        ),
        parity=parity(_table(row.get("parity"))),
        life=_life(_table(row.get("life"))),
        gain=_gain(_table(row.get("gain"))),
        total_gain=_gain(_table(row.get("total_gain"))),
        claim=_claim(_table(row.get("claim"))),
        breakdown=_rates(row.get("breakdown_ms")),
        longest=tuple(
            KernelView(
                text(k.get("name")) or "?", text(k.get("kind")) or "other", ms, real(k.get("calls")) or 0.0
            )
            for k in map(_table, _list(row.get("longest")))
            if (ms := positive(k.get("ms"))) is not None
        ),
        environment=_table(row.get("environment")),
    )


def parity(row: Mapping[str, Json]) -> ParityView | None:
    """None where nothing was judged."""
    if not row:
        return None
    tensor = _table(row.get("worst_tensor"))
    return ParityView(
        verdict=text(row.get("verdict")) or "not judged",
        promise=text(row.get("class")),
        tolerance=real(row.get("tolerance")),
        worst=real(row.get("worst")),
        steps=whole(row.get("steps")),
        losses=_series(row.get("losses")),
        reference_losses=_series(row.get("reference_losses")),
        grad_norms=_series(row.get("grad_norms")),
        reference_grad_norms=_series(row.get("reference_grad_norms")),
        worst_tensor=text(tensor.get("name")),
        worst_tensor_error=real(tensor.get("relative_error")),
        why=text(row.get("why")),
    )


def _life(row: Mapping[str, Json]) -> LifeView | None:
    verdict = text(row.get("verdict"))
    return LifeView(verdict, (text(life_words(row)) or "").rstrip(".")) if verdict is not None else None


def _gain(row: Mapping[str, Json]) -> GainView | None:
    ratio = positive(row.get("ratio"))
    if ratio is None:
        return None
    low, high = _pair(row.get("ci95"))
    judged = row.get("real")
    known = judged if isinstance(judged, bool) else None
    return GainView(ratio, low, high, text(row.get("over")), known, whole(row.get("paired")))


def _claim(row: Mapping[str, Json]) -> ClaimView | None:
    metric = text(row.get("metric"))
    if metric is None:
        return None
    return ClaimView(metric, real(row.get("gain")), text(row.get("regime")), text(row.get("source")))


def _interaction(row: Mapping[str, Json]) -> InteractionView:
    return InteractionView(
        text(row.get("technique")) or "?",
        positive(row.get("alone")),
        positive(row.get("in_ladder")),
        positive(row.get("left_out")),
        text(row.get("sentence")),
    )


def _batch_curve(raw: Json) -> tuple[BatchPointView, ...]:
    points = []
    for row in map(_table, _list(raw)):
        micro = whole(row.get("micro"))
        if micro is not None and micro > 0:
            status = text(row.get("status")) or "ok"
            points.append(
                BatchPointView(
                    micro, status, measure(row.get("tokens_per_s")), positive(row.get("peak_memory_bytes"))
                )
            )
    return tuple(sorted(points, key=lambda point: point.micro))


def _adds(raw: Json) -> tuple[str, ...]:
    """What a rung adds: names, tables of a name with knobs, or a table of overrides."""
    if isinstance(raw, dict):
        return tuple(f"{text(key)} = {shown(value)}" for key, value in raw.items())
    return tuple(_technique(item) for item in _list(raw))


def _technique(item: Json) -> str:
    if not isinstance(item, dict):
        return shown(item)
    knobs = ", ".join(f"{text(key)}={shown(value)}" for key, value in item.items() if key != "name")
    return f"{shown(item.get('name'))}{f' ({knobs})' if knobs else ''}"


def _table(raw: Json) -> Mapping[str, Json]:
    return raw if isinstance(raw, dict) else {}


def _list(raw: Json) -> list[Json]:
    return raw if isinstance(raw, list) else []


def _rates(raw: Json) -> dict[str, float]:
    """The positive numbers of a table."""
    found = {text(key) or "": positive(value) for key, value in _table(raw).items()}
    return {key: value for key, value in found.items() if value is not None}


def _series(raw: Json) -> tuple[float | None, ...]:
    return tuple(map(real, _list(raw)))


def _pair(raw: Json) -> tuple[float | None, float | None]:
    values = [real(value) for value in _list(raw)]
    if len(values) != 2 or values[0] is None or values[1] is None or values[0] > values[1]:
        return None, None
    return values[0], values[1]
