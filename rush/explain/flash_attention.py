"""From plain attention to FlashAttention 1 to 2: the same sums in another order, and why the approximations lost.

`attention_orders` measures and counts bytes; this file describes and draws.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from rush.explain import units
from rush.explain.attention_orders import (
    KEPT,
    TILE,
    WAYS,
    linformer_flops,
    matmul_flops,
    measure,
    other_flops,
    traffic,
)
from rush.explain.topic import INTERVALS, Data, Topic, TopicTable
from rush.report.panels import Curve, Curves, Dot, Mark, Panel, dot

NAMES = {
    "plain": "plain: scores in memory",
    "first": "FlashAttention 1: keys outside",
    "second": "FlashAttention 2: queries outside",
}
SHORT = {"plain": "plain", "first": "FlashAttention 1's order", "second": "FlashAttention 2's"}
COLORS = {"plain": 2, "first": 3, "second": 1}
TOKENS = "tokens in the sequence"
MODELS = (("GPT-2 124M", 768, 1024), ("Llama 3.1 8B", 4096, 8192))
"""Name, hidden size, context it is trained with."""


def _of(data: Data, way: str) -> list[Data]:
    return [row for row in data["rows"] if row["way"] == way]


def _longest(data: Data) -> int:
    """The longest sequence that all orders were timed at."""
    return int(max(set.intersection(*({row["length"] for row in _of(data, way)} for way in WAYS))))


def _at(data: Data, way: str, length: int) -> Any:
    return next(row["seconds"] for row in _of(data, way) if row["length"] == length)


def words(data: Data) -> list[str]:
    if data["missing"]:
        first = [
            f"The three orders were not measured: {data['missing']}. They need a few lines of machine code."
        ]
    else:
        first = [_order_words(data), _byte_words(data), _sharing_words(data)]
    return [*first, _linformer_words(data), _exact_words(data)]


def _compared(slow: Any, fast: Any, name: str) -> str:
    ratio = units.speedup(slow, fast)
    if ratio.faster:
        return f"{units.interval(ratio)} faster than {name}"
    if ratio.slower:
        return f"slower than {name} ({units.interval(ratio)})"
    return f"not significantly faster than {name} ({units.interval(ratio)})"


def _order_words(data: Data) -> str:
    length = _longest(data)
    plain, first, second = (_at(data, way, length) for way in WAYS)
    where = "on one core" if data["kind"] == "cpu" else "on the GPU"
    heads = "one head" if data["heads"] == 1 else f"{data['heads']} heads"
    return (
        f"{heads[0].upper()}{heads[1:]} with {units.plain_number(length)} tokens {where}, with the same matmuls: plain takes "
        f"{units.duration(plain['median'])}, FlashAttention 1's order {units.duration(first['median'])}, FlashAttention 2's "
        f"{units.duration(second['median'])}. The first is {_compared(plain, first, 'plain')}, the second {_compared(first, second, 'the first')}."
    )


def _byte_words(data: Data) -> str:
    length = _longest(data)
    moved = {way: traffic(way, length, data) for way in WAYS}
    extra = {way: other_flops(way, length, data) / matmul_flops(length, data) for way in WAYS}
    text = (
        f"By arithmetic one head then moves {units.size(moved['plain'])} plain, {units.size(moved['first'])} in the first order and "
        f"{units.size(moved['second'])} in the second: outputs in fp32 no longer come and go with every tile of keys. Beside the matmuls "
        f"it does {units.share(extra['first'])} and {units.share(extra['second'])} of their FLOPs"
    )
    if data["kind"] == "cpu":
        return f"{text}. What a CPU's caches hold of this need not come from memory, so the bytes are an upper bound here."
    return f"{text}, and these do not run on the matrix units."


def _sharing(data: Data, way: str, heads: int) -> Any:
    return next(row["seconds"] for row in data["sharing"] if (row["way"], row["heads"]) == (way, heads))


def _sharing_words(data: Data) -> str:
    counts = sorted({row["heads"] for row in data["sharing"]})
    few, many = counts[0], counts[-1]
    workers = "multiprocessors" if data["kind"] == "cuda" else "cores"
    ratio = units.speedup(_sharing(data, "first", few), _sharing(data, "second", few))
    later = units.speedup(_sharing(data, "first", many), _sharing(data, "second", many))
    one = "one head" if few == 1 else f"{few} heads"
    head = (
        f"With {one} of {units.plain_number(data['sharing_length'])} tokens and {data['cores']} {workers} the second order is "
        f"{_speed(ratio)}, with {many} heads {_speed(later)}"
    )
    if ratio.faster and ratio.ratio > 1.3 * later.ratio:
        return (
            f"{head}: the first order keeps a head on one of them, because every tile of keys changes the same outputs; in the "
            "second, tiles of queries need nothing of each other."
        )
    return f"{head}: here sharing a head among {workers} makes no difference, perhaps because others compute on them."


def _speed(ratio: Any) -> str:
    if ratio.faster:
        return f"{units.interval(ratio)} faster"
    return f"{'slower' if ratio.slower else 'no faster'} ({units.interval(ratio)})"


def crossing(data: Data) -> float | None:
    """From how many tokens on Linformer is the faster one, between two measured lengths; None where it never is."""
    gaps = [(row["length"], row["linformer"]["median"] / row["exact"]["median"]) for row in data["linformer"]]
    if gaps[0][1] <= 1:
        return float(gaps[0][0])
    for (low, above), (high, below) in pairwise(gaps):
        if above > 1 >= below:
            return float((low * high) ** 0.5)
    return None


def _linformer_words(data: Data) -> str:
    rows, at = data["linformer"], crossing(data)
    last = rows[-1]
    ratio = units.speedup(last["exact"], last["linformer"])
    head = (
        f"Linformer mixes keys and values into {data['kept']} rows, so its work is O(n · k): {units.flops_of(linformer_flops(last['length'], data))} "
        f"a head at {units.plain_number(last['length'])} tokens against {units.flops_of(2.0 * last['length'] ** 2 * data['head_dim'])} for exact causal "
        f"attention; by arithmetic they are equal at {units.plain_number(4 * data['kept'])}"
    )
    if at is None:
        return f"{head}. Measured, exact attention is faster at every length up to {units.plain_number(last['length'])}."
    where = (
        f"at every length from {units.plain_number(round(at))}"
        if at == rows[0]["length"]
        else f"from about {units.plain_number(int(float(f'{at:.2g}')))} tokens"
    )
    return f"{head}. Measured, it wins {where}, {_speed(ratio)} at the longest."


def share_of_model(hidden: int, length: int) -> float:
    """Causal attention's part of a block's matmul FLOPs: 2 · n · h a token of 24 · h² + 2 · n · h."""
    return 2 * length * hidden / (24 * hidden**2 + 2 * length * hidden)


def _exact_words(data: Data) -> str:
    parts = [
        f"{units.share(share_of_model(hidden, length))} for {name} at {units.plain_number(length)} tokens"
        for name, hidden, length in MODELS
    ]
    return (
        f"Exact won all the same: attention's matmuls are {units.listed(parts)} of a model's, which bounds what any replacement can "
        "gain; Linformer computes another function, mixes later tokens into earlier ones, so that it cannot generate text, and "
        "has a matrix as long as the sequence to learn; and flash attention took away the memory that had been the reason for it."
    )


def picture(data: Data) -> list[Panel]:
    panels: list[Panel] = []
    if data["rows"]:
        heads = "one head" if data["heads"] == 1 else f"{data['heads']} heads"
        panels.append(
            Curves(f"Time of a causal forward pass, {heads}", TOKENS, "time", "", "s",
                   [Curve(NAMES[way], [dot(row["length"], row["seconds"]) for row in _of(data, way)], COLORS[way]) for way in WAYS])
        )  # fmt: skip
        lengths = sorted({row["length"] for row in data["rows"]})
        panels.append(
            Curves("Bytes moved by one head, by arithmetic", TOKENS, "bytes", "", "B",
                   [Curve(NAMES[way], [Dot(n, traffic(way, n, data)) for n in lengths], COLORS[way], "formula") for way in WAYS])
        )  # fmt: skip
        workers = "multiprocessors" if data["kind"] == "cuda" else "cores"
        last = max(row["heads"] for row in data["sharing"])
        marks = [Mark(data["cores"], f"{data['cores']} {workers}")] if 1 < data["cores"] < last else []
        panels.append(
            Curves(f"Heads shared among {data['cores']} {workers}, {units.plain_number(data['sharing_length'])} tokens", "heads", "time", "", "s",
                   [Curve(NAMES[way], [dot(row["heads"], row["seconds"]) for row in data["sharing"] if row["way"] == way], COLORS[way])
                    for way in WAYS[1:]], marks=marks)
        )  # fmt: skip
    panels.append(
        Curves("Linformer against exact attention", TOKENS, "time", "", "s",
               [Curve("exact, causal (torch's flash operator)", [dot(row["length"], row["exact"]) for row in data["linformer"]], 1),
                Curve(f"Linformer, k = {data['kept']}", [dot(row["length"], row["linformer"]) for row in data["linformer"]], 4)])
    )  # fmt: skip
    return panels


def table(data: Data) -> TopicTable:
    rows = [
        [f"{SHORT[row['way']]}, {units.plain_number(row['length'])} tokens", units.span(row["seconds"]),
         units.size(traffic(row["way"], row["length"], data)), units.share(other_flops(row["way"], row["length"], data) / matmul_flops(row["length"], data))]
        for row in data["rows"]
    ]  # fmt: skip
    rows += [
        [f"{SHORT[row['way']]}, {row['heads']} head{'' if row['heads'] == 1 else 's'} of {units.plain_number(data['sharing_length'])} tokens on all {data['cores']}",
         units.span(row["seconds"]), "–", "–"]
        for row in data["sharing"]
    ]  # fmt: skip
    for row in data["linformer"]:
        for way, name in (("exact", "exact, torch's flash operator"), ("linformer", "Linformer")):
            rows.append(
                [f"{name}, {row['heads']} heads, {units.plain_number(row['length'])} tokens", units.span(row[way]), "–", "–"]
            )  # fmt: skip
    return TopicTable(("what", "time (95 % interval)", "bytes of a head", "FLOPs beside matmuls"), rows)


topic = Topic(
    name="flash-attention",
    title="From plain attention to FlashAttention 1 and 2",
    about="what FlashAttention 1 and 2 reordered: time, bytes and cores of each order; Linformer, and why exact attention won",
    idea=(
        "Every order computes the same sums. Plain attention writes the score of every pair of tokens to memory, reads it for the softmax, "
        "writes the weights and reads them again. FlashAttention 1 (2022) never writes them: a tile of queries meets a tile of keys, "
        "the scores live and die near the arithmetic units, and a running maximum and sum keep the softmax right.",
        "Its outer loop goes over the keys. A tile of keys and values is loaded once, and all tiles of queries pass by. But each of them "
        "has an output so far, which is read, rescaled, divided and written again for every tile of keys, and no two tiles of keys can work "
        "at once, for both would change the same outputs: only different heads run in parallel.",
        "FlashAttention 2 (2023) swaps the loops. A tile of queries keeps its output near until it has seen all keys, and divides once. "
        "Outputs move once; fewer FLOPs fall outside the matmuls, where a GPU is slow; and tiles of queries are independent, so that one long sequence "
        "fills the device as well as many short ones. (It costs reading the keys again for every tile of queries, which a cache helps with.)",
        "In the years before, approximations tried to do less: Linformer mixes keys and values into k rows by a learned matrix, "
        "so that n tokens cost n · k instead of n² / 2 pairs. Fewer FLOPs, more speed on paper; the measured speed is above.",
    ),
    method=(
        ("orders, CPU", f"C through ctypes: one head of dim 64, tiles of {TILE}, fp32, one core; the same matmul of tiles in each, nothing above the diagonal computed"),
        ("orders, GPU", "plain: this project's PlainAttention, which computes the whole square; first: a Triton kernel in FlashAttention 1's order (rush/kernels/flash_attention/first_order.py); second: our kernel; bf16"),
        ("time", "forward only; contenders take turns; CUDA by events, CPU by the clock"),
        ("heads on all cores", "first: one head a core at a time; second: tiles of queries dealt out to all"),
        ("bytes, by arithmetic", "every array as often as its loops visit it; a cache that holds one saves the rest"),
        ("FLOPs beside matmuls", "four a score, and the rescaling of outputs: three an element and pair of tiles in the first order, one in the second"),
        ("Linformer", f"softmax(q (E k)ᵀ / √d) (F v), random E and F with k = {KEPT} rows, in plain torch; beside it torch's flash operator, causal; 8 · n · k · d FLOPs against 2 · n² · d"),
        INTERVALS,
    ),
    measure=measure,
    words=words,
    picture=picture,
    table=table,
)  # fmt: skip
