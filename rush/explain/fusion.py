"""Fusion: a chain of elementwise operations as separate kernels, and as one.

Separate kernels read and write the whole tensor each time; one kernel reads it once and writes it once. The
chain grows from one operation to several: the time of the separate ones grows with it, the fused one's should
not. Buffers are made beforehand, so that no time goes into asking the system for memory. On a CPU the same
separate operations are also run on slices that fit into the cache: no compiler, fewer trips to memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rush.explain import units
from rush.explain.clock import byte_rate, timed
from rush.explain.topic import INTERVALS, Data, ExplainSettings, Topic, TopicTable
from rush.report.panels import Bar, Bars, Curve, Curves, Panel, dot

if TYPE_CHECKING:
    from torch import Tensor

SLICE = 2**16
"""Numbers in a slice for each thread: with its result 512 KiB of fp32, which many a core's own cache can hold."""
NAMES = {
    "separate": "separate kernels",
    "fused": "one compiled kernel",
    "sliced": "separate, in cache-sized slices",
}
COLORS = {"separate": 2, "fused": 1, "sliced": 3}


def measure(settings: ExplainSettings) -> Data:
    import torch

    # Chains compiled earlier in this process must not count against the limit of recompiles.
    torch.compiler.reset()
    cuda = settings.device == "cuda"
    number = 2**22 if settings.quick else 2**26 if cuda else 2**24
    lengths = (1, 4) if settings.quick else (1, 2, 4, 8)
    generator = torch.Generator(settings.device).manual_seed(0)
    x = torch.randn(number, device=settings.device, generator=generator)
    out = torch.empty_like(x)
    budget = 0.1 if settings.quick else 0.6
    # A slice per call of a kernel would cost a GPU more in launches than it saves in traffic.
    ways = ("separate", "fused") if cuda else ("separate", "sliced", "fused")
    rows: list[Data] = []
    compile_s, missing = 0.0, None
    parts = len(ways) * len(lengths)
    for way in ways:
        for length in lengths:
            settings.progress(f"fusion: {NAMES[way]}, {operations(length)}", len(rows), parts)
            if way == "fused":
                began = time.perf_counter()
                built = _compiled(length, x, out)
                compile_s += time.perf_counter() - began
                if isinstance(built, str):
                    missing = built
                    break
                work = built
            else:
                work = _separate(length, x, out) if way == "separate" else _sliced(length, x, out)
            found = timed(work, settings.device, budget_s=budget, most=15, cold=True)
            rows.append({"way": way, "length": length, "moved": moved(way, length, number), "seconds": found})
    return {
        "kind": settings.device,
        "numbers": number,
        "bytes_each": 4,
        "rows": rows,
        "compile_s": round(compile_s, 1),
        "missing": missing,
        "agrees": _agrees(rows, x, out),
    }


def chain(x: Tensor, length: int) -> Tensor:
    """`length` cheap operations in a row: scale, shift, clip, square, over and over."""
    y = x
    for step in range(length):
        kind = step % 4
        y = y * 0.5 if kind == 0 else y + 0.25 if kind == 1 else y.clamp(-2.0, 2.0) if kind == 2 else y * y
    return y


def _separate(length: int, x: Tensor, out: Tensor) -> Callable[[], object]:
    """The chain, one call of torch for each operation, into buffers that exist."""
    import torch

    def work() -> None:
        source = x
        for step in range(length):
            kind = step % 4
            if kind == 0:
                torch.mul(source, 0.5, out=out)
            elif kind == 1:
                torch.add(source, 0.25, out=out)
            elif kind == 2:
                torch.clamp(source, -2.0, 2.0, out=out)
            else:
                torch.mul(source, source, out=out)
            source = out

    return work


def _sliced(length: int, x: Tensor, out: Tensor) -> Callable[[], object]:
    # As many slices at once as there are threads: torch divides each operation among them.
    import torch

    size = SLICE * torch.get_num_threads()
    pieces = [
        _separate(length, a, b) for a, b in zip(torch.split(x, size), torch.split(out, size), strict=True)
    ]

    def work() -> None:
        for piece in pieces:
            piece()

    return work


def _compiled(length: int, x: Tensor, out: Tensor) -> Callable[[], object] | str:
    """The chain as one kernel by torch.compile, warmed up; or why there is none."""
    import torch

    def run(source: Tensor, target: Tensor) -> None:
        target.copy_(chain(source, length))

    # Whole, or an error: never quietly the separate kernels.
    built = torch.compile(run, dynamic=False, fullgraph=True)
    try:
        built(x, out)
    except (RuntimeError, OSError, ImportError) as error:
        return f"torch.compile failed here ({str(error).strip().splitlines()[0][:160]})"
    return lambda: built(x, out)


def _agrees(rows: list[Data], x: Tensor, out: Tensor) -> bool | None:
    """Whether the last thing measured (the compiled chain, where there is one) computes the chain."""
    import torch

    wanted = chain(x[: 2**16].double(), rows[-1]["length"])
    return bool(torch.allclose(out[: 2**16].double(), wanted, rtol=1e-5, atol=1e-6))


def moved(way: str, length: int, number: int) -> int:
    """Bytes to and from memory by formula: one read and one write for every pass over the tensor."""
    passes = length if way == "separate" else 1
    return 2 * 4 * number * passes


def operations(length: int) -> str:
    return "1 operation" if length == 1 else f"{length} operations"


def words(data: Data) -> list[str]:
    separate = _of(data, "separate")
    longest = separate[-1]
    best = _best(data)
    sentences = []
    if best is None:
        sentences.append(f"Nothing could be fused here: {data['missing'] or 'no fused chain was measured'}.")
    else:
        sentences.append(_gain_words(longest, best))
    sentences.append(
        f"As separate kernels, {operations(longest['length'])} on {units.size(data['numbers'] * data['bytes_each'])} move "
        f"{units.size(longest['moved'])} and take {units.duration(longest['seconds']['median'])}: {units.bandwidth(byte_rate(longest))}."
    )
    if best is not None:
        sentences.append(_traffic_words(longest, best))
        sentences.append(_growth_words(separate, _of(data, best["way"])))
    sliced, fused = _of(data, "sliced"), _of(data, "fused")
    if best is not None and sliced and sliced[-1] is not best:
        ratio = units.speedup(longest["seconds"], sliced[-1]["seconds"])
        effect = (
            f"{units.times(ratio.ratio)} faster than over the whole tensor: the cache alone does part of it"
            if ratio.faster
            else "no faster than over the whole tensor"
        )
        sentences.append(
            f"The same separate kernels on slices that fit into the cache take {units.duration(sliced[-1]['seconds']['median'])}, {effect}."
        )
    if fused:
        sentences.append(f"Compiling took {units.duration(data['compile_s'])} total, once.")
    elif data["missing"] and best is not None:
        sentences.append(f"The compiled chain is missing: {data['missing']}.")
    return sentences


def _gain_words(longest: Data, best: Data) -> str:
    ratio = units.speedup(longest["seconds"], best["seconds"])
    how = {"fused": "as one compiled kernel", "sliced": "in slices that fit into the cache"}[best["way"]]
    head = f"{operations(longest['length'])} {how} take {units.duration(best['seconds']['median'])} instead of {units.duration(longest['seconds']['median'])}"
    if ratio.faster:
        return f"{head}: {units.interval(ratio)} faster."
    if ratio.slower:
        return f"{head}: slower, {units.interval(ratio)}. Fusion does not pay here."
    return f"{head}: no gain beyond noise, {units.interval(ratio)}."


def _traffic_words(longest: Data, best: Data) -> str:
    less = longest["moved"] / best["moved"]
    gain = longest["seconds"]["median"] / best["seconds"]["median"]
    head = f"The bytes fell by {units.times(less)}, to {units.size(best['moved'])}"
    if gain < 1.05:
        return f"{head}, but the time did not: here it does not hang on this traffic."
    head = f"{head}, and the time by {units.times(gain)}"
    if gain > 0.75 * less:
        return f"{head}: the time follows the bytes, as it does when memory is the limit."
    return (
        f"{head}: less than the bytes, so at {units.bandwidth(byte_rate(best))} something else than this traffic has become "
        "the limit (the arithmetic itself, the launches, or a cache that had already caught part of it)."
    )


def _growth_words(separate: list[Data], fused: list[Data]) -> str:
    def growth(rows: list[Data]) -> float:
        ratio: float = rows[-1]["seconds"]["median"] / rows[0]["seconds"]["median"]
        return ratio

    first, last = separate[0]["length"], separate[-1]["length"]
    apart, joined = growth(separate), growth(fused)
    contrast = (
        "a further operation is nearly free once the number is there"
        if joined < 1.5 and apart > 1.5 * joined
        else "the difference between the two grows little with the chain"
        if apart < 1.3 * joined
        else "so a further operation costs much less inside a fused pass"
    )
    return f"From {operations(first)} to {last}, the separate kernels' time grows by {units.times(apart)}, the other's by {units.times(joined)}: {contrast}."


def _of(data: Data, way: str) -> list[Data]:
    return [row for row in data["rows"] if row["way"] == way]


def _best(data: Data) -> Data | None:
    """The longest chain in the fastest joined form: compiled, or in slices."""
    ends = [rows[-1] for way in ("fused", "sliced") if (rows := _of(data, way))]
    return min(ends, key=lambda row: row["seconds"]["median"], default=None)


def picture(data: Data) -> list[Panel]:
    ways = [way for way in NAMES if _of(data, way)]
    lines = [
        Curve(NAMES[way], [dot(r["length"], r["seconds"]) for r in _of(data, way)], COLORS[way])
        for way in ways
    ]
    bars = []
    for way in ways:
        last = _of(data, way)[-1]
        bars.append(
            Bar(NAMES[way], last["moved"], color=COLORS[way], note=f"at {units.bandwidth(byte_rate(last))}")
        )
    length = operations(_of(data, "separate")[-1]["length"])
    return [
        Curves(
            "Time of a chain of operations",
            "operations in the chain",
            "time",
            "",
            "s",
            lines,
            x_log=False,
            y_log=False,
        ),
        Bars(f"Bytes to and from memory, {length}, by formula", "B", bars),
    ]


def table(data: Data) -> TopicTable:
    rows = [
        [
            NAMES[row["way"]],
            str(row["length"]),
            units.size(row["moved"]),
            units.span(row["seconds"]),
            units.bandwidth(byte_rate(row)),
        ]
        for row in data["rows"]
    ]
    return TopicTable(("how", "operations", "bytes moved", "time (95 % interval)", "bandwidth"), rows)


topic = Topic(
    name="fusion",
    title="One trip to memory instead of many",
    about="a chain of elementwise operations as separate kernels and as one: bytes moved, time",
    idea=(
        "An elementwise operation does one or two additions or multiplications per number. Fetching the number from memory "
        "and putting the result back takes far longer than that arithmetic, so the time of such an operation is the time of "
        "its traffic.",
        "Eight operations as eight kernels make eight round trips with the same tensor. Fused into one kernel, each number is "
        "fetched once, all eight operations happen while it sits in a register, and it is written once: an eighth of the "
        "traffic for the same arithmetic.",
        "This is what torch.compile does to norms, activations, residual additions and optimizer updates, and what hand-written "
        "fused kernels do by hand. It does nothing for an operation that already computes a lot per byte, as a large matmul "
        "does, and little for tensors that stay in a cache anyway.",
    ),
    method=(
        (
            "bytes moved",
            "by formula: one read and one write of the tensor for every pass over it (separate: one pass per operation)",
        ),
        (
            "time",
            "median of repeated runs into buffers made beforehand; on CUDA by events, the cache emptied before each",
        ),
        ("bandwidth", "bytes by formula over the measured time"),
        ("compiling", "torch.compile, outside of every timing"),
        INTERVALS,
    ),
    measure=measure,
    words=words,
    picture=picture,
    table=table,
)
