"""Batch size: from memory-bound to compute-bound with one linear layer.

Whatever the batch, the layer's weights are fetched once. With one row each weight is used for one
multiplication; with many rows for many. So the arithmetic per byte grows with the batch, and with it the rate,
until the arithmetic units are the limit. The weight is chosen larger than the last cache: otherwise it would
never have to come from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from rush.explain import units
from rush.explain.clock import stat, timed
from rush.explain.topic import Data, ExplainSettings, Topic, TopicTable
from rush.report.panels import Curve, Curves, Dot, Mark, Panel, dot

FREE = 1.5
"""A batch that takes no longer than this times a smaller one is called nearly free."""


def measure(settings: ExplainSettings) -> Data:
    import torch

    cuda = settings.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    if settings.quick:
        inner, outer, batches = (4096, 4096, [1, 8, 64, 512]) if cuda else (512, 1024, [1, 4, 16, 64])
    else:
        inner, outer = (8192, 8192) if cuda else (2048, 8192)
        batches = [2**k for k in range(14 if cuda else 10)]
    generator = torch.Generator(settings.device).manual_seed(0)
    weight = torch.randn(outer, inner, device=settings.device, generator=generator).to(dtype)
    rows = []
    for done, batch in enumerate(batches):
        settings.progress(f"a linear layer with {batch} rows", done, len(batches) + 1)
        x = torch.randn(batch, inner, device=settings.device, generator=generator).to(dtype)
        out = torch.empty(batch, outer, device=settings.device, dtype=dtype)
        budget = 0.1 if settings.quick else 0.8
        matmul = partial(torch.mm, x, weight.t(), out=out)
        found = timed(matmul, settings.device, budget_s=budget, most=15, cold=True)
        rows.append({"batch": batch, "seconds": found})
    settings.progress("the roofs", len(batches), len(batches) + 1)
    data = {
        "kind": settings.device,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes_each": dtype.itemsize,
        "inner": inner,
        "outer": outer,
        "rows": rows,
    }
    data["read_bytes_per_s"] = max(_read_rate(weight, settings), *(_bandwidth(data, row) for row in rows))
    return data


def _read_rate(weight: Any, settings: ExplainSettings) -> float:
    """How fast the weight alone can be read, looking for its largest number."""
    import torch

    work = weight.view(torch.int32).amax if weight.element_size() == 2 else weight.amax
    found = timed(work, settings.device, budget_s=0.1 if settings.quick else 0.5, most=15, cold=True)
    return float(weight.numel() * weight.element_size() / found["median"])


def flops(data: Data, batch: int) -> float:
    # As floats: an untrusted record may have a string in place of a number, and a string times an int is a long string.
    return float(2.0 * batch * data["inner"] * data["outer"])


def traffic(data: Data, batch: int) -> float:
    """Bytes by formula: the weight, the rows in and the rows out, each once."""
    inner, outer = float(data["inner"]), float(data["outer"])
    return float(data["bytes_each"] * (inner * outer + batch * (inner + outer)))


def intensity(data: Data, batch: int) -> float:
    return flops(data, batch) / traffic(data, batch)


def _bandwidth(data: Data, row: Data) -> float:
    return float(traffic(data, row["batch"]) / row["seconds"]["median"])


def _rate(data: Data, row: Data) -> float:
    return float(flops(data, row["batch"]) / row["seconds"]["median"])


def words(data: Data) -> list[str]:
    rows = data["rows"]
    first, last = rows[0], rows[-1]
    best = max(rows, key=lambda row: _rate(data, row))
    slow, fast = _rate(data, first), _rate(data, best)
    gain = units.speedup(
        stat([s * best["batch"] / first["batch"] for s in first["seconds"]["samples"]]), best["seconds"]
    )
    head = f"With {_rows(first['batch'])} the layer reaches {units.flops(slow)}, with {_rows(best['batch'])} {units.flops(fast)}"
    if gain.faster and gain.ratio > 1.3:
        sentences = [f"{head}: {units.times(gain.ratio)} as much work per second from the same weights."]
    else:
        sentences = [f"{head}: the batch makes no difference that is worth the name here."]
    weight = data["bytes_each"] * float(data["inner"]) * data["outer"]
    sentences.append(
        f"Every batch fetches the same {units.size(weight)} of weights, so the arithmetic per byte grows from "
        f"{units.si(intensity(data, first['batch']))} to {units.si(intensity(data, last['batch']))} FLOP per byte."
    )
    sentences.append(_free_words(data))
    sentences.append(_bandwidth_words(data, weight))
    sentences.append(_ridge_words(data, fast))
    return sentences


def free_range(rows: Sequence[Data]) -> Sequence[Data]:
    """The longest run of batches of which none takes longer than `FREE` times the first of them."""
    best: Sequence[Data] = rows[:1]
    for start, first in enumerate(rows):
        end = start
        while end < len(rows) and rows[end]["seconds"]["median"] <= FREE * first["seconds"]["median"]:
            end += 1
        if end - start > len(best):
            best = rows[start:end]
    return best


def _free_words(data: Data) -> str:
    rows = data["rows"]
    found = free_range(rows)
    first, last = found[0], found[-1]
    if len(found) < 2:
        steps = max(b["seconds"]["median"] / a["seconds"]["median"] for a, b in pairwise(rows))
        return f"Nothing is free here: more rows always take longer, up to {units.times(steps)} from one size to the next."
    description = (
        f"From {_rows(first['batch'])} to {_rows(last['batch'])} the time grows by {units.times(last['seconds']['median'] / first['seconds']['median'])} "
        f"only ({units.duration(first['seconds']['median'])} to {units.duration(last['seconds']['median'])}): there the further rows "
        f"are nearly free, {_why_free(data, first)}."
    )
    if first is rows[0]:
        return description
    apart = first["seconds"]["median"] / rows[0]["seconds"]["median"]
    return f"{description} ({_rows(rows[0]['batch'])} alone {'is' if rows[0]['batch'] == 1 else 'are'} {units.times(apart)} faster than {_rows(first['batch'])}: another kernel, made for it.)"


def _why_free(data: Data, first: Data) -> str:
    """Only what the bytes per second bear out."""
    got = _bandwidth(data, first)
    if got > 0.6 * data["read_bytes_per_s"]:
        return f"because the time goes into fetching weights (at {units.bandwidth(got)})"
    return (
        f"though the weights flow at {units.bandwidth(got)} only: the kernel does something with each of them that does not "
        "depend on the rows"
    )


def _bandwidth_words(data: Data, weight: float) -> str:
    first = data["rows"][0]
    got = _bandwidth(data, first)
    part = got / data["read_bytes_per_s"]
    head = f"With {_rows(first['batch'])}, bytes flow at {units.bandwidth(got)}"
    top = units.bandwidth(data["read_bytes_per_s"])
    if part > 0.6:
        return f"{head}, {units.share(part)} of the {top} at which the weights can merely be read: memory is the limit there."
    return f"{head}, only {units.share(part)} of the {top} at which the weights can merely be read: something else (the call, a kernel not made for so few rows) holds it back as well."


def ridge(data: Data) -> float:
    """The batch at which the two roofs meet, by formula: intensity × bandwidth = the best rate measured."""
    wanted = max(_rate(data, row) for row in data["rows"]) / data["read_bytes_per_s"]
    # intensity(b) = 2·b·i·o / (e·(i·o + b·(i + o))), solved for b.
    i, o, e = data["inner"], data["outer"], data["bytes_each"]
    below = 2 * i * o - wanted * e * (i + o)
    return float(wanted * e * i * o / below) if below > 0 else float("inf")


def _ridge_words(data: Data, fast: float) -> str:
    at = ridge(data)
    reached = next(row["batch"] for row in data["rows"] if _rate(data, row) >= 0.5 * fast)
    if at == float("inf"):
        return "By the formula this layer never leaves the slope of the memory at any batch."
    turn = f"By the formula the two roofs meet at about {_rows(round(max(at, 1)))}"
    return f"{turn}; measured, half of the best rate is reached at {_rows(reached)}."


def _rows(batch: int) -> str:
    return "1 row" if batch == 1 else f"{units.plain_number(batch)} rows"


def picture(data: Data) -> list[Panel]:
    rows = data["rows"]
    speed = [dot(row["batch"], row["seconds"], flops(data, row["batch"])) for row in rows]
    best = max(_rate(data, row) for row in rows)
    slope = [
        Dot(row["batch"], min(best, intensity(data, row["batch"]) * data["read_bytes_per_s"])) for row in rows
    ]
    turn = ridge(data)
    marks = [Mark(turn, "the roofs meet")] if rows[0]["batch"] < turn < rows[-1]["batch"] else []
    return [
        Curves(
            "Rate against batch size",
            "rows in the batch",
            "FLOP per second",
            "",
            "FLOP/s",
            [Curve("measured", speed, 1), Curve("roof: memory, then the best rate", slope, 6, "formula")],
            marks=marks,
        ),
        Curves(
            "Time against batch size",
            "rows in the batch",
            "time",
            "",
            "s",
            [Curve("measured", [dot(row["batch"], row["seconds"]) for row in rows], 2)],
            marks=marks,
        ),
    ]


def table(data: Data) -> TopicTable:
    rows = [
        [
            units.plain_number(row["batch"]),
            units.si(intensity(data, row["batch"])),
            units.span(row["seconds"]),
            units.flops(_rate(data, row)),
            units.bandwidth(_bandwidth(data, row)),
        ]
        for row in data["rows"]
    ]
    return TopicTable(("rows", "FLOP per byte", "time (95 % interval)", "rate", "bandwidth"), rows)


topic = Topic(
    name="batch",
    title="Why a batch of one wastes the machine",
    about="one linear layer: arithmetic per byte and achieved rate against batch size, from memory-bound to compute-bound",
    idea=(
        "A linear layer multiplies every row of the batch with the same weights. The weights have to come from memory once per "
        "call, however many rows there are. With a single row, each weight that was fetched is used for one multiplication "
        "and one addition and is then thrown away: the arithmetic units wait for the memory.",
        "With more rows, each fetched weight serves them all. The work per byte (the arithmetic intensity) grows with the batch "
        "and the rate with it, while the time hardly changes: the extra rows ride along for free. At some batch the "
        "arithmetic units are busy all the time; from there on, twice the rows take twice the time.",
        "The turning point lies where intensity times bandwidth equals the arithmetic rate. It is the reason why training in "
        "larger micro batches is faster up to a point and not beyond it, and why generating text one token at a time is slow.",
    ),
    method=(
        ("FLOP", "2 · rows · inner · outer"),
        (
            "bytes",
            "bytes per number · (inner · outer + rows · (inner + outer)): weights, inputs and outputs once each",
        ),
        (
            "roof",
            "the lesser of intensity × the rate of reading the weights (alone, or in a matmul where that was faster), and the best rate measured",
        ),
        ("time", "median of repeated matmuls; on CUDA by events, the cache emptied before each"),
        ("intervals", "95 %, from resampling the samples of this one process"),
    ),
    measure=measure,
    words=words,
    picture=picture,
    table=table,
)
