"""Latency against throughput: why a CPU answers sooner and a GPU does more, and what a branch costs on each.

The same multiply-add, as a chain in which every step waits for the one before, then as ever more chains that need
nothing of each other. A core is built to finish one chain soon, a GPU to have very many in flight. `latency_throughput`
measures; this file describes and draws.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from rush.explain import units
from rush.explain.latency_throughput import WAYS, measure
from rush.explain.topic import INTERVALS, Data, Topic, TopicTable
from rush.report.panels import Curve, Curves, Dot, Mark, Panel, dot

NAMES = {"cpu": "CPU", "cuda": "GPU"}
ALIKE = 1.5
"""A branch that differs per element and costs less than so many times a sorted one is called free."""


def flops(row: Data) -> float:
    """FLOPs of a row of chains: a multiplication and an addition a step."""
    return 2.0 * float(row["chains"]) * float(row["rounds"])


def rate(row: Data) -> float:
    return flops(row) / float(row["seconds"]["median"])


def step_s(row: Data) -> float:
    """Seconds of one step of a chain."""
    return float(row["seconds"]["median"]) / float(row["rounds"])


def words(data: Data) -> list[str]:
    sentences = [_host_words(data)] if data["host_chains"] else []
    if data["device_chains"]:
        sentences.append(_device_words(data))
    sentences.append(_operation_words(data))
    if data["branches"]:
        sentences += _branch_words(data)
    if data["missing"]:
        sentences.append(
            f"Chains and branches on the CPU were not measured: {data['missing']}. They need a few lines of machine code."
        )
    if data["ways"]:
        sentences.append(_ways_words(data))
    if data["no_gpu"]:
        sentences.append(
            f"Not measured, because {data['no_gpu']}: the latency of a launch, chains in flight on a GPU, and warps whose "
            f"lanes take up to {WAYS[-1]} ways; rush explain cpu-gpu measures them where there is one."
        )
    return sentences


def _host_words(data: Data) -> str:
    rows = data["host_chains"]
    one = rows[0]
    scalar = max((row for row in rows if row["how"] == "scalar"), key=rate)
    core = max((row for row in rows if row["how"] != "all cores"), key=rate)
    best = max(rows, key=rate)
    text = (
        f"One chain of multiply-adds, in which each step waits for the one before, takes {units.duration(step_s(one))} a step "
        f"on a core: {units.flops(rate(one))}. {_plural(scalar['chains'], 'chain')} that need nothing of each other reach "
        f"{units.times(rate(scalar) / rate(one))} of that in the same instructions, {core['chains']} chains in vectors of "
        f"{data['lanes']} reach {units.times(rate(core) / rate(one))}"
    )
    if best["how"] == "all cores":
        return f"{text}, all {data['cores']} cores {units.times(rate(best) / rate(one))} ({units.flops(rate(best))})."
    more = "" if data["cores"] < 2 else "; more cores added nothing here, perhaps because others compute"
    return f"{text} ({units.flops(rate(core))}){more}."


def _plural(number: int, what: str) -> str:
    return f"{units.plain_number(number)} {what}{'' if number == 1 else 's'}"


def _device_words(data: Data) -> str:
    rows = data["device_chains"]
    warp, best = rows[0], max(rows, key=rate)
    half = next(row for row in rows if rate(row) >= 0.5 * rate(best))
    text = (
        f"On the GPU a step takes {units.duration(step_s(warp))} with one warp of {warp['chains']} threads in flight "
        f"({units.flops(rate(warp))}), and the rate grows to {units.flops(rate(best))} with {_plural(best['chains'], 'thread')}; "
        f"half of it takes {_plural(half['chains'], 'thread')}"
    )
    if not data["host_chains"]:
        return f"{text}."
    host = data["host_chains"]
    apart = step_s(warp) / step_s(host[0])
    slower = f"{units.times(apart)} as long as" if apart > 1.1 else "no longer than"
    ratio = rate(best) / max(rate(row) for row in host)
    return f"{text}: a step takes {slower} on the CPU, and the whole device does {units.times(ratio)} the CPU's work."


def saturation(rows: list[Data]) -> int:
    """The fewest numbers with which an operation reaches half of its best rate."""
    top = max(row["numbers"] / row["seconds"]["median"] for row in rows)
    return int(next(row["numbers"] for row in rows if row["numbers"] / row["seconds"]["median"] >= top / 2))


def crossing(data: Data) -> float | None:
    """How many numbers it takes until the GPU's operation is the quicker one; None where they do not cross."""
    cpu, gpu = (_of(data, where) for where in ("cpu", "cuda"))
    gaps = [
        (c["numbers"], g["seconds"]["median"] / c["seconds"]["median"])
        for c, g in zip(cpu, gpu, strict=False)
        if c["numbers"] == g["numbers"]
    ]
    for (low, above), (high, below) in pairwise(gaps):
        if above > 1 >= below:
            return float((low * high) ** 0.5)
    return None


def _of(data: Data, where: str) -> list[Data]:
    return [row for row in data["operation"] if row["where"] == where]


def _operation_words(data: Data) -> str:
    cpu, gpu = _of(data, "cpu"), _of(data, "cuda")
    parts = []
    for rows in (cpu, gpu):
        if rows:
            first, last = rows[0], rows[-1]
            parts.append(
                f"one addition of torch's takes {units.duration(first['seconds']['median'])} on the {NAMES[rows[0]['where']]} "
                f"for 1 number and {units.duration(last['seconds']['median'])} for {units.plain_number(last['numbers'])}, and half of "
                f"its best rate at {units.plain_number(saturation(rows))}"
            )
    text = units.listed(parts)
    text = text[0].upper() + text[1:]
    if not gpu:
        return f"{text}: below that the call is what takes the time."
    trip = data["round_trip"]
    waited = (
        f" A launch that the host waits for takes {units.duration(trip['median'])}."
        if trip is not None
        else ""
    )
    cross = crossing(data)
    if cross is None:
        return f"{text}; they do not cross at these sizes.{waited}"
    return f"{text}; from about {units.plain_number(round(cross))} numbers on the GPU is quicker.{waited}"


def _branch(data: Data, way: str, order: str, share: float) -> Any:
    return next(
        row["seconds"]
        for row in data["branches"]
        if (row["way"], row["order"], row["share"]) == (way, order, share)
    )


def _branch_words(data: Data) -> list[str]:
    random, ordered = (_branch(data, "branch", order, 0.5) for order in ("random", "sorted"))
    select = _branch(data, "select", "random", 0.5)
    ratio = units.speedup(random, ordered)
    head = (
        f"A branch that half of the elements take costs {units.duration(random['median'])} an element in random order and "
        f"{units.duration(ordered['median'])} when the same elements are sorted"
    )
    if ratio.faster and ratio.ratio > ALIKE:
        # Half of random outcomes are guessed wrong.
        wrong = 2 * (random["median"] - ordered["median"])
        text = (
            f"{head}, {units.interval(ratio)}: the processor runs ahead on a guess, and one of two guesses is wrong, which "
            f"costs {units.duration(wrong)} each time."
        )
    else:
        text = f"{head}: here the order makes little difference ({units.interval(ratio)})."
    gain = units.speedup(random, select)
    how = f"A select, which computes both sides and keeps one, takes {units.duration(select['median'])} in any order"
    if gain.faster:
        end = f"twice the arithmetic and {units.interval(gain)} faster, because nothing is guessed and vectors can do it."
    else:
        end = f"not faster than the branch ({units.interval(gain)})."
    return [f"{text} {how}: {end}"]


def _way(data: Data, number: int, whole: bool) -> Any:
    return next(
        row["seconds"] for row in data["ways"] if row["ways"] == number and row["whole_warps"] is whole
    )


def _ways_words(data: Data) -> str:
    one, apart, together = _way(data, 1, False), _way(data, WAYS[-1], False), _way(data, WAYS[-1], True)
    cost, none = units.speedup(apart, one), units.speedup(together, one)
    text = (
        f"A warp whose {WAYS[-1]} lanes take as many ways needs {units.interval(cost)} the time of one whose lanes agree "
        f"({units.duration(apart['median'])} against {units.duration(one['median'])})"
    )
    if not cost.faster:
        return f"{text}: no divergence shows here."
    if none.faster and none.ratio > ALIKE:
        return f"{text}; whole warps on as many ways need {units.interval(none)}."
    return (
        f"{text}, for the same arithmetic a lane: a warp has one program counter at a time and takes the ways one after another. "
        f"Whole warps on as many ways cost {'nothing' if not none.faster else units.interval(none)}."
    )


def picture(data: Data) -> list[Panel]:
    panels: list[Panel] = []
    chains = [
        Curve("CPU", [_chain_dot(row) for row in data["host_chains"]], 1),
        Curve("GPU", [_chain_dot(row) for row in data["device_chains"]], 2),
    ]
    if shown := [curve for curve in chains if curve.dots]:
        panels.append(
            Curves("Chains in flight", "chains that need nothing of each other", "FLOP per second", "", "FLOP/s", shown, marks=_marks(data))
        )  # fmt: skip
    lines = [
        Curve(NAMES[where], [dot(row["numbers"], row["seconds"]) for row in rows], color)
        for where, color in (("cpu", 1), ("cuda", 2))
        if (rows := _of(data, where))
    ]
    panels.append(Curves("One operation over ever more numbers", "numbers", "time of a call", "", "s", lines))
    if data["branches"]:
        names = {("branch", "random"): ("branch, random order", 2), ("branch", "sorted"): ("branch, sorted", 3),
                 ("select", "random"): ("select, any order", 1)}  # fmt: skip
        branches = [
            Curve(
                name,
                [
                    dot(100 * row["share"], row["seconds"])
                    for row in data["branches"]
                    if (row["way"], row["order"]) == key
                ],
                color,
            )
            for key, (name, color) in names.items()
        ]
        panels.append(Curves("A branch that differs per element, on the CPU", "percent of the elements that take it", "time of an element", "", "s", branches, x_log=False, y_log=False))  # fmt: skip
    if data["ways"]:
        ways = [
            Curve(
                name,
                [dot(row["ways"], row["seconds"]) for row in data["ways"] if row["whole_warps"] is whole],
                color,
            )
            for name, whole, color in (("lanes of a warp differ", False, 2), ("whole warps differ", True, 1))
        ]
        panels.append(Curves("Ways through a program, on the GPU", "ways", "time", "", "s", ways))
    return panels


def _chain_dot(row: Data) -> Dot:
    return dot(row["chains"], row["seconds"], flops(row), note=row["how"])


def _marks(data: Data) -> list[Mark]:
    if not data["host_chains"]:
        return []
    return [Mark(data["lanes"], f"a vector: {data['lanes']}")]


def table(data: Data) -> TopicTable:
    rows = [
        [f"{place}: {_plural(row['chains'], 'chain')} ({row['how']})", units.duration(step_s(row)), units.flops(rate(row))]
        for place, key in (("CPU", "host_chains"), ("GPU", "device_chains"))
        for row in data[key]
    ]  # fmt: skip
    rows += [
        [f"{NAMES[row['where']]}: an addition of {_plural(row['numbers'], 'number')}", units.span(row["seconds"]),
         units.si(row["numbers"] / row["seconds"]["median"], "/s")]
        for row in data["operation"]
    ]  # fmt: skip
    rows += [
        [f"{row['way']} taken by {units.share(row['share'])}, {row['order']} order", units.span(row["seconds"]), "–"]
        for row in data["branches"]
    ]  # fmt: skip
    rows += [
        [f"{_plural(row['ways'], 'way')}, {'whole warps' if row['whole_warps'] else 'lanes of a warp'}", units.span(row["seconds"]), "–"]
        for row in data["ways"]
    ]  # fmt: skip
    return TopicTable(("what", "time of a step, a call, an element", "rate"), rows)


topic = Topic(
    name="cpu-gpu",
    title="A CPU answers soon, a GPU does much",
    about="latency against throughput: chains in flight, one operation over ever more numbers, branches, warps that diverge",
    idea=(
        "There are two ways to be fast. A core of a CPU is built to finish one piece of work soon: it runs at a high clock, "
        "looks ahead in the program, guesses where branches lead and keeps what it may need in large caches. A GPU spends "
        "the same transistors on thousands of simple lanes, none of them quick. It hides the wait of one piece of work "
        "behind the others: while some threads wait, others compute. That needs very many threads.",
        "So a GPU loses where one step waits for another, or where there is little to do: a launch costs microseconds "
        "whatever it computes. It wins where the same is done to millions of numbers. Training is of the second kind, "
        "as long as batches are large; generating one token at a time, or an optimizer step over many small tensors, "
        "comes near the first.",
        "The lanes of a GPU are not independent. Thirty-two of them form a warp and share one instruction at a time (SIMT: "
        "single instruction, multiple threads). Where they disagree about a branch, the warp takes one side after "
        "the other, with the lanes of the other side idle: it diverges. A CPU's vectors are of the same kind (SIMD), but there the compiler "
        "computes both sides and selects; and a branch of a single core costs time only where its guess was wrong.",
    ),
    method=(
        (
            "chains",
            "x ← x · a + b again and again, in registers; CPU: C through ctypes, scalar and in vectors as wide as the registers, one thread a core for all of them; GPU: Triton, one chain a thread",
        ),
        ("FLOP", "2 · chains · steps"),
        ("one operation", "torch.add of a number to a tensor, into a tensor that is there already; calls one after another"),
        (
            "branch, select",
            "one of two cubic polynomials for each of 65 536 elements, chosen by a byte beside it; a branch jumps (the compiler is kept from replacing it), a select computes both",
        ),
        ("a wrong guess", "2 · (time in random order − time sorted), half of the elements on either side"),
        (
            "ways",
            "a Triton kernel with PTX inside: up to 32 loops of multiply-adds, of which each thread runs one; the way is that of the thread's lane, or of its warp",
        ),
        ("a launch that is waited for", "an addition to one number and a synchronization, by the clock"),
        INTERVALS,
    ),
    measure=measure,
    words=words,
    picture=picture,
    table=table,
)  # fmt: skip
