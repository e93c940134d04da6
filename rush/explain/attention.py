"""Attention, plain against flash: time and memory against the length of the sequence.

Plain is this project's own core, which writes the whole score matrix; flash is torch's flash operator for the
device, called by name so that nothing else can take its place. Forward and backward, causal, as in training.
Where plain no longer fits on a GPU it is tried and fails for real. On a CPU running out of memory would take
the machine down with it, so there the length is extrapolated from what was measured, and the sentences state it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rush.explain import units
from rush.explain.clock import timed
from rush.explain.topic import INTERVALS, Data, ExplainSettings, Topic, TopicTable
from rush.report.panels import Curve, Curves, Dot, Mark, Panel, dot

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIM = 64
TOKENS = "tokens in the sequence"
NAMES = {"plain": "plain", "flash": "flash"}
COLORS = {"plain": 2, "flash": 1}
TOO_LONG_S = 2.5
"""A call longer than this is not made: one more doubling would take four times as long."""


def measure(settings: ExplainSettings) -> Data:
    cuda = settings.device == "cuda"
    heads = 16 if cuda else 4
    if settings.quick:
        lengths = [256, 512, 1024] if cuda else [64, 128, 256]
    else:
        lengths = [2**k for k in (range(9, 18) if cuda else range(7, 13))]
    rows: list[Data] = []
    for way in ("plain", "flash"):
        for length in lengths:
            settings.progress(f"attention: {way}, {length} tokens", len(rows), 2 * len(lengths))
            row = measured_row(way, length, heads, settings)
            rows.append(row)
            if row["status"] != "ok":
                break
    return {
        "kind": settings.device,
        "dtype": "bfloat16" if cuda else "float32",
        "heads": heads,
        "head_dim": HEAD_DIM,
        "memory_bytes": settings.machine.memory_bytes,
        "rows": rows,
    }


def measured_row(way: str, length: int, heads: int, settings: ExplainSettings) -> Data:
    """One length: status, seconds and peak bytes of a forward and backward pass."""
    import torch

    empty: Data = {"way": way, "length": length, "status": "ok", "why": None}
    empty |= {"seconds": None, "peak_bytes": None}
    try:
        # Once to warm up; on CUDA this is also where memory runs out, if it does.
        run = one_pass(way, length, heads, settings.device)
        run()
        peak = peak_of(run, settings.device)
        budget = 0.1 if settings.quick else 0.3 if settings.device == "cuda" else 1.5
        found = timed(run, settings.device, budget_s=budget, least=3, most=11)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {**empty, "status": "out of memory", "why": "the device had no room for it"}
    except RuntimeError as error:
        return {**empty, "status": "unsupported", "why": str(error).strip().splitlines()[0][:160]}
    status = "ok" if found["median"] < TOO_LONG_S else "slow"
    return {**empty, "status": status, "seconds": found, "peak_bytes": peak}


def one_pass(way: str, length: int, heads: int, device: str) -> Callable[[], object]:
    """A forward and a backward pass over random queries, keys and values."""
    import torch

    from rush.models.layers import PlainAttention
    from rush.techniques.attention.flash_attention import FlashCore

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(length)

    def drawn() -> Tensor:
        return torch.randn(1, heads, length, HEAD_DIM, device=device, generator=generator).to(dtype)

    q, k, v, slope = drawn().requires_grad_(), drawn().requires_grad_(), drawn().requires_grad_(), drawn()
    core = PlainAttention() if way == "plain" else FlashCore(longest=length)

    def run() -> None:
        out = core(q, k, v)
        torch.autograd.grad(out, (q, k, v), slope)

    return run


def peak_of(run: Callable[[], object], device: str) -> int | None:
    """The most bytes of tensors that a call had at once, on top of its inputs."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return allocated_peak(run)


def allocated_peak(run: Callable[[], object]) -> int | None:
    """The same on a CPU, from the profiler's list of every allocation; None where it keeps none."""
    import torch

    # Without acc_events the profiler warns on its first use in a process.
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
    results = profile.profiler.kineto_results if profile.profiler is not None else None
    events: list[Any] = results.events() if results is not None else []
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    if not changes:
        return None
    now = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        now += change
        most = max(most, now)
    return most


def words(data: Data) -> list[str]:
    plain, flash = _measured(data, "plain"), _measured(data, "flash")
    if not flash or not plain:
        why = next(
            (row["why"] for row in data["rows"] if row["status"] not in ("ok", "slow")),
            "nothing was measured",
        )
        return [f"{'Flash' if not flash else 'Plain'} attention could not be measured here: {why}."]
    length = min(plain[-1]["length"], flash[-1]["length"])
    a, b = _at(plain, length), _at(flash, length)
    ratio = units.speedup(a["seconds"], b["seconds"])
    head = f"At {units.plain_number(length)} tokens plain attention takes {units.duration(a['seconds']['median'])} and flash {units.duration(b['seconds']['median'])}"
    if ratio.faster:
        sentences = [f"{head}: flash is {units.interval(ratio)} faster."]
    elif ratio.slower:
        sentences = [f"{head}: flash is slower here, {units.interval(ratio)}."]
    else:
        sentences = [f"{head}: no significant difference, {units.interval(ratio)}."]
    if a["peak_bytes"] and b["peak_bytes"]:
        sentences.append(_memory_words(data, plain, flash, length))
    if len(plain) > 1 and len(flash) > 1:
        sentences.append(_time_words(plain, flash))
    sentences.append(_limit_words(data, plain, flash))
    short_a, short_b = _at(plain, plain[0]["length"]), _at(flash, plain[0]["length"])
    if short_b is not None and plain[0]["length"] < length:
        small = units.speedup(short_a["seconds"], short_b["seconds"])
        how = (
            f"{units.times(small.ratio)} faster"
            if small.faster
            else f"slower ({units.times(small.ratio)})"
            if small.slower
            else "not faster"
        )
        sentences.append(f"At {plain[0]['length']} tokens flash is {how}: {_short_reason(small, ratio)}.")
    return sentences


def _short_reason(small: Any, large: Any) -> str:
    if large.ratio > 1.3 * small.ratio:
        return "less than at the longest length, as is to be expected where a short score matrix fits into a cache"
    if small.ratio > 1.3 * large.ratio:
        return "more than at the longest length, perhaps because plain is many small steps, each with its own call"
    return "about the same as at the longest length"


def _memory_words(data: Data, plain: list[Data], flash: list[Data], length: int) -> str:
    a, b = _at(plain, length), _at(flash, length)
    scores = data["heads"] * length * length * (2 if data["dtype"] == "bfloat16" else 4)
    text = (
        f"For that plain needs {units.size(a['peak_bytes'])} ({units.times(a['peak_bytes'] / scores)} one score matrix of "
        f"{units.size(scores)}), flash {units.size(b['peak_bytes'])}: {units.times(a['peak_bytes'] / b['peak_bytes'])} "
        f"{'less' if a['peak_bytes'] > b['peak_bytes'] else 'as little, no saving'}."
    )
    growth_a, growth_b = _growth(plain, "peak_bytes"), _growth(flash, "peak_bytes")
    if growth_a is None or growth_b is None:
        return text
    return (
        f"{text} Per doubling of the sequence plain's memory grows {units.times(growth_a)} ({_law(growth_a)}), "
        f"flash's {units.times(growth_b)} ({_law(growth_b)})."
    )


def _law(growth: float) -> str:
    """What a growth per doubling looks like: ×2 is linear, ×4 quadratic."""
    if growth < 1.4:
        return "hardly at all"
    if growth < 2.6:
        return "linear"
    return "between linear and quadratic" if growth < 3.3 else "quadratic"


def _growth(rows: list[Data], key: str) -> float | None:
    """How much a figure grows per doubling of the length, between the last two lengths."""
    if len(rows) < 2 or not rows[-1][key] or not rows[-2][key]:
        return None
    last, before = (row[key]["median"] if key == "seconds" else row[key] for row in (rows[-1], rows[-2]))
    doublings = math.log2(rows[-1]["length"] / rows[-2]["length"])
    return float((last / before) ** (1 / doublings))


def _time_words(plain: list[Data], flash: list[Data]) -> str:
    a, b = _growth(plain, "seconds"), _growth(flash, "seconds")
    assert a is not None
    assert b is not None
    head = f"Time grows {units.times(a)} per doubling for plain and {units.times(b)} for flash"
    if b > 2.6:
        return f"{head}: every pair of tokens is still compared, so flash saves traffic and memory, not arithmetic."
    return f"{head}: at these lengths the matmuls over all pairs are not yet most of flash's time."


def limit(data: Data) -> tuple[int | None, bool]:
    """The longest power-of-two length whose plain pass fits, and whether that was measured.

    Extrapolated, the peak grows with the square of the length from the longest that was measured.
    """
    failed = [row for row in data["rows"] if row["way"] == "plain" and row["status"] == "out of memory"]
    plain = _measured(data, "plain")
    if failed:
        return (plain[-1]["length"] if plain else None), True
    if not plain or not plain[-1]["peak_bytes"]:
        return None, False
    length, peak = plain[-1]["length"], plain[-1]["peak_bytes"]
    while peak * 4 <= data["memory_bytes"]:
        length, peak = length * 2, peak * 4
    return length, False


def _limit_words(data: Data, plain: list[Data], flash: list[Data]) -> str:
    length, measured = limit(data)
    room = units.size(data["memory_bytes"])
    if length is None:
        return "Where plain runs out of memory is not known: its memory was not measured."
    if measured:
        longest = flash[-1]
        return (
            f"Measured: plain runs out of the device's {room} at {units.plain_number(2 * length)} tokens; flash still runs at "
            f"{units.plain_number(longest['length'])}, with {units.size(longest['peak_bytes'])}."
        )
    needed = plain[-1]["peak_bytes"] * (2 * length / plain[-1]["length"]) ** 2
    return (
        f"Extrapolated, not measured: by the square of the length, plain would run out of this machine's {room} at "
        f"{units.plain_number(2 * length)} tokens, where it would need {units.size(needed)} for this one layer."
    )


def _measured(data: Data, way: str) -> list[Data]:
    return [row for row in data["rows"] if row["way"] == way and row["seconds"] is not None]


def _at(rows: list[Data], length: int) -> Any:
    return next((row for row in rows if row["length"] == length), None)


def picture(data: Data) -> list[Panel]:
    speed = [
        Curve(NAMES[way], [dot(row["length"], row["seconds"]) for row in rows], COLORS[way])
        for way in NAMES
        if (rows := _measured(data, way))
    ]
    panels: list[Panel] = [
        Curves("Time, forward and backward", TOKENS, "time", "", "s", speed, marks=_failed(data))
    ]
    memory = [
        Curve(NAMES[way], [Dot(row["length"], row["peak_bytes"]) for row in rows], COLORS[way])
        for way in NAMES
        if (rows := [row for row in _measured(data, way) if row["peak_bytes"]])
    ]
    if memory:
        length, measured = limit(data)
        if length is not None and not measured:
            memory.append(_beyond(data, length))
        room = Curve(
            "memory of this machine", [Dot(x, data["memory_bytes"]) for x in _ends(memory)], 6, "formula"
        )
        lines, title = [*memory, room], "Memory on top of the inputs"
        panels.append(Curves(title, TOKENS, "peak bytes", "", "B", lines, marks=_failed(data)))
    return panels


def _failed(data: Data) -> list[Mark]:
    return [
        Mark(row["length"], f"{row['way']}: {row['status']}")
        for row in data["rows"]
        if row["status"] == "out of memory"
    ]


def _beyond(data: Data, length: int) -> Curve:
    """Plain's memory beyond what was measured, up to the first length that no longer fits."""
    last = _measured(data, "plain")[-1]
    dots, at = [], last["length"]
    while at <= 2 * length:
        dots.append(Dot(at, last["peak_bytes"] * (at / last["length"]) ** 2))
        at *= 2
    return Curve("plain, extrapolated by the square", dots, COLORS["plain"], "extrapolated")


def _ends(lines: list[Curve]) -> tuple[float, float]:
    xs = [point.x for line in lines for point in line.dots]
    return min(xs), max(xs)


def table(data: Data) -> TopicTable:
    rows = [
        [
            row["way"],
            units.plain_number(row["length"]),
            units.span(row["seconds"]) if row["seconds"] else row["status"],
            units.size(row["peak_bytes"]),
        ]
        for row in data["rows"]
    ]
    return TopicTable(("attention", "tokens", "time (95 % interval)", "peak memory"), rows)


topic = Topic(
    name="attention",
    title="Why FlashAttention is fast",
    about="plain attention against flash: time and memory against sequence length, and where plain runs out of memory",
    idea=(
        "Attention compares every token with every token before it. Written down as in the textbook, that is a matrix of scores "
        "with as many rows and columns as the sequence has tokens, for every head: it is written to memory, read for the "
        "masking, written, read for the softmax, written, read for the matmul with the values, and saved for the backward pass.",
        "FlashAttention computes the same numbers tile by tile. A tile of queries meets one tile of keys after another in a "
        "store near the arithmetic units; a running maximum and a running sum let the softmax be completed as it goes. The "
        "score matrix never exists as a whole. The backward pass computes the tiles again instead of reading them.",
        "It does not do less arithmetic (backward even does more): every pair of tokens is still compared, so time keeps "
        "growing with the square of the length. What it removes is the traffic and the memory of the score matrix: memory "
        "grows with the length, not its square. Where the matrix is small enough for a cache there is little to remove.",
    ),
    method=(
        (
            "plain",
            "this project's PlainAttention: scores, mask, softmax and matmul as separate operations, scores saved for the backward pass",
        ),
        ("flash", "torch's flash operator for the device, called by name"),
        ("time", "forward and backward, causal, batch 1, random inputs; CUDA by events, CPU by the clock"),
        (
            "peak memory",
            "the most bytes of tensors at once beyond queries, keys and values; CUDA: the allocator's count, CPU: the profiler's list of allocations",
        ),
        ("extrapolation", "peak(longest measured) × (length / longest measured)²"),
        INTERVALS,
    ),
    measure=measure,
    words=words,
    picture=picture,
    table=table,
)
