"""Filling the machine: equal tasks on a number of workers, sizes at and beside powers of two, a padded vocabulary.

A machine finishes tasks in waves of as many as it has workers (cores, or multiprocessors); one task more than
fits into a wave costs a whole further wave. Matmuls are cut into tiles of fixed size, so a size that is
no multiple of the tile pays for the part that sticks out. Whether and how much that shows here is measured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Barrier
from typing import Any

from rush.errors import MachineError
from rush.explain import units
from rush.explain.clock import timed
from rush.explain.topic import INTERVALS, Data, ExplainSettings, Topic, TopicTable
from rush.report.panels import Bars, Curve, Curves, Mark, Panel, bar, dot

VOCABULARIES = (50257, 50304)
"""GPT-2's vocabulary, and the next multiple of 128."""
MATMULS = ("logits", "gradient of the input", "gradient of the weight")


def measure(settings: ExplainSettings) -> Data:
    import torch

    cuda = settings.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    workers, counts, run = _device_tasks(settings) if cuda else _host_tasks(settings)
    budget = 0.02 if settings.quick else 0.2
    parts = len(counts) + 2 * len(MATMULS) + 5
    tasks: list[Data] = []
    for number in counts:
        settings.progress(f"{number} equal tasks on {workers} workers", len(tasks), parts)
        found = timed(partial(run, number), settings.device, budget_s=budget, most=15)
        tasks.append({"tasks": number, "seconds": found})
    sizes = _sizes(settings, dtype, len(counts), parts)
    vocabulary = _vocabulary(settings, dtype, len(counts) + 5, parts)
    return {
        "kind": settings.device,
        "dtype": str(dtype).removeprefix("torch."),
        "workers": workers,
        "tasks": tasks,
        "sizes": sizes,
        **vocabulary,
    }


Run = Callable[[int], object]


def _host_tasks(settings: ExplainSettings) -> tuple[int, list[int], Run]:
    """Tasks on the CPU: running sums, which torch cannot divide among threads; one Python thread per core."""
    import torch

    workers = settings.machine.cpu.num_threads
    counts = list(range(1, 3 * workers + 2)) if workers <= 8 else _around(workers, settings.quick)
    x = torch.rand(2**16)
    rounds = 4 if settings.quick else 100
    outs = [torch.empty_like(x) for _ in range(counts[-1])]
    pool = ThreadPoolExecutor(workers, initializer=_own_core(workers))
    # All threads are made now, each on its core: they wait for one another before the first task.
    meeting = Barrier(workers)
    list(pool.map(lambda _: meeting.wait(), range(workers)))

    def task(index: int) -> None:
        for _ in range(rounds):
            torch.cumsum(x, 0, out=outs[index])

    def run(number: int) -> None:
        list(pool.map(task, range(number)))

    return workers, counts, run


def _own_core(workers: int) -> Callable[[], None]:
    """What a thread does first: stay on a core of its own, where the system lets it choose."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    free = SimpleQueue[int]()
    for core in cores[:workers]:
        free.put(core)

    def settle() -> None:
        # Two threads that wake on one core would stay there for a while, and show a wave that is none.
        if cores:
            os.sched_setaffinity(0, {free.get()})

    return settle


def _around(workers: int, quick: bool) -> list[int]:
    """Numbers of tasks that show the waves: whole ones, half ones, and one task more than a whole one."""
    halves = [workers // 2, workers - 1, workers, workers + 1, 3 * workers // 2, 2 * workers, 2 * workers + 1]
    if not quick:
        halves += [
            1,
            workers // 4,
            3 * workers // 4,
            5 * workers // 2,
            3 * workers,
            3 * workers + 1,
            4 * workers,
        ]
    return sorted({count for count in halves if count > 0})


def _device_tasks(settings: ExplainSettings) -> tuple[int, list[int], Run]:
    """Tasks on the GPU: programs of 1024 threads, each of which keeps a multiprocessor's units busy."""
    import torch

    try:
        from rush.explain.native.device import Tasks
    except ImportError as error:
        raise MachineError(
            f"the equal tasks are Triton programs, and Triton is not here ({error}); install it with pip install triton."
        ) from None
    workers = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    counts = _around(workers, settings.quick)
    tasks = Tasks(counts[-1], 20_000)
    return workers, counts, tasks


def _sizes(settings: ExplainSettings, dtype: Any, done: int, parts: int) -> list[Data]:
    """Square matmuls at a power of two, beside it, and at multiples of smaller powers."""
    import torch

    base = (
        (2048 if settings.quick else 4096) if settings.device == "cuda" else (256 if settings.quick else 1024)
    )
    generator = torch.Generator(settings.device).manual_seed(0)
    rows = []
    for step, size in enumerate((base - 1, base, base + 1, base + 8, base + 64)):
        settings.progress(f"matmuls of {size}", done + step, parts)
        a, b = (
            torch.randn(size, size, device=settings.device, generator=generator).to(dtype) for _ in range(2)
        )
        out = torch.empty(size, size, device=settings.device, dtype=dtype)
        budget = 0.05 if settings.quick else 1.0
        found = timed(partial(torch.mm, a, b, out=out), settings.device, budget_s=budget, most=21)
        rows.append({"size": size, "flops": 2.0 * size**3, "seconds": found})
    return rows


def _vocabulary(settings: ExplainSettings, dtype: Any, done: int, parts: int) -> Data:
    """The head of GPT-2 with its own vocabulary and with a padded one: the matmul and its two gradients."""
    import torch

    cuda = settings.device == "cuda"
    tokens, hidden = (8192, 768) if cuda else (64, 768)
    if settings.quick:
        tokens, hidden = (2048, 768) if cuda else (16, 64)
    generator = torch.Generator(settings.device).manual_seed(0)

    def drawn(*dims: int) -> Any:
        return torch.randn(*dims, device=settings.device, generator=generator).to(dtype)

    rows: list[Data] = []
    x = drawn(tokens, hidden)
    for size in VOCABULARIES:
        weight, slope = drawn(size, hidden), drawn(tokens, size)
        works: Sequence[Callable[[], object]] = (
            partial(torch.mm, x, weight.t()),
            partial(torch.mm, slope, weight),
            partial(torch.mm, slope.t(), x),
        )
        for name, work in zip(MATMULS, works, strict=True):
            settings.progress(f"vocabulary {size}: {name}", done + len(rows), parts)
            found = timed(work, settings.device, budget_s=0.05 if settings.quick else 1.2, most=15)
            rows.append({"vocabulary": size, "product": name, "seconds": found})
    return {"tokens": tokens, "hidden": hidden, "vocabulary": rows}


def words(data: Data) -> list[str]:
    return [_vocabulary_words(data), _wave_words(data), _step_words(data), _size_words(data), _advice(data)]


def _total(data: Data, size: int) -> list[float]:
    """Samples of the three matmuls together: the sums of their samples, in order of size."""
    rows = [sorted(row["seconds"]["samples"]) for row in data["vocabulary"] if row["vocabulary"] == size]
    least = min(map(len, rows))
    # Samples are not paired, so equal ranks are added: quantiles of the sum, as if all were slow together.
    picked = [[row[round(k * (len(row) - 1) / max(1, least - 1))] for k in range(least)] for row in rows]
    return [sum(values) for values in zip(*picked, strict=True)]


def padding(data: Data) -> Any:
    """How much faster the padded vocabulary is, over the three matmuls, with its interval."""
    odd, padded = (_total(data, size) for size in VOCABULARIES)
    return units.speedup({"samples": odd}, {"samples": padded})


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _vocabulary_words(data: Data) -> str:
    odd, padded = (_median(_total(data, size)) for size in VOCABULARIES)
    ratio = padding(data)
    head = (
        f"GPT-2's head and its gradients take {units.duration(odd)} with a vocabulary of {VOCABULARIES[0]} and "
        f"{units.duration(padded)} with {VOCABULARIES[1]}, which is {units.share(VOCABULARIES[1] / VOCABULARIES[0] - 1)} larger"
    )
    if ratio.faster:
        return f"{head}: the larger one is {units.interval(ratio)} faster."
    if ratio.slower:
        return f"{head}: here padding costs time, {units.interval(ratio)}."
    return f"{head}: on this device padding makes no significant difference, {units.interval(ratio)}."


def step(data: Data) -> Any:
    """How much longer one task more than a full wave takes than the full wave."""
    found = {row["tasks"]: row["seconds"] for row in data["tasks"]}
    return units.speedup(found[data["workers"] + 1], found[data["workers"]])


def _wave_words(data: Data) -> str:
    workers, found = data["workers"], {row["tasks"]: row["seconds"] for row in data["tasks"]}
    ratio = step(data)
    kind = "multiprocessors" if data["kind"] == "cuda" else "cores" if workers > 1 else "core"
    head = f"{workers} equal tasks on {workers} {kind} take {units.duration(found[workers]['median'])}, {workers + 1} take {units.duration(found[workers + 1]['median'])}"
    if ratio.faster and ratio.ratio > 1.3:
        return f"{head}: one task more costs {units.times(ratio.ratio)}, because it needs a second wave in which the others have nothing to do."
    return f"{head}: no step shows between one wave and the next ({units.interval(ratio)})."


def _step_words(data: Data) -> str:
    """The share of the machine in use, from the time of each count against perfect division."""
    found = {row["tasks"]: row["seconds"]["median"] for row in data["tasks"]}
    best = min(seconds / tasks for tasks, seconds in found.items())
    use = {tasks: best * tasks / seconds for tasks, seconds in found.items()}
    full = [tasks for tasks in use if tasks >= data["workers"]]
    worst = min(full, key=lambda tasks: use[tasks])
    predicted = worst / (math.ceil(worst / data["workers"]) * data["workers"])
    return (
        f"With at least a full wave, the machine is used worst with {worst} tasks: {units.share(use[worst])} of the best, where "
        f"whole waves would give {units.share(predicted)}."
    )


def _rate(row: Data) -> float:
    return float(row["flops"] / row["seconds"]["median"])


def _size_words(data: Data) -> str:
    rows = data["sizes"]
    base = rows[1]
    worst = min((row for row in rows if row is not base), key=_rate)
    # Per operation, since the sizes differ: seconds divided by FLOPs.
    ratio = units.speedup(
        {"samples": [s / worst["flops"] for s in worst["seconds"]["samples"]]},
        {"samples": [s / base["flops"] for s in base["seconds"]["samples"]]},
    )
    head = f"A matmul of size {base['size']} runs at {units.flops(_rate(base))}, of size {worst['size']} at {units.flops(_rate(worst))}"
    if ratio.faster:
        return f"{head}: beside the power of two the rate is down to {units.share(1 / ratio.ratio)}."
    if ratio.slower:
        return f"{head}: here even the slowest of its neighbors is faster than the power of two, by {units.times(1 / ratio.ratio)} (rows a power of two apart can fall onto the same places of a cache)."
    return f"{head}: no significant difference."


def _advice(data: Data) -> str:
    pays = [
        name
        for name, gain in (
            ("pad the vocabulary", padding(data).faster),
            ("fill whole waves", step(data).faster and step(data).ratio > 1.3),
        )
        if gain
    ]
    return (
        f"On this device it pays to {units.listed(pays)}."
        if pays
        else "On this device neither padding the vocabulary nor filling whole waves shows a gain in these measurements."
    )


def picture(data: Data) -> list[Panel]:
    workers = data["workers"]
    waves = [Mark(workers * k, f"{k} wave{'s' if k > 1 else ''}") for k in range(1, 5)]
    line = Curve("equal tasks", [dot(row["tasks"], row["seconds"]) for row in data["tasks"]], 1)
    last = max(row["tasks"] for row in data["tasks"])
    marks = [mark for mark in waves if mark.x <= last]
    vocabulary = [
        bar(
            f"{row['vocabulary']}, {row['product']}",
            row["seconds"],
            2 if row["vocabulary"] == VOCABULARIES[0] else 1,
        )
        for product in MATMULS
        for row in data["vocabulary"]
        if row["product"] == product
    ]
    sizes = [
        bar(f"{row['size']} × {row['size']}", row["seconds"], 1 if index == 1 else 2, row["flops"])
        for index, row in enumerate(data["sizes"])
    ]
    head = f"{data['tokens']} tokens, hidden size {data['hidden']}, {data['dtype']}"
    return [
        Curves(
            f"Equal tasks on {workers} workers",
            "tasks",
            "time until all are done",
            "",
            "s",
            [line],
            x_log=False,
            y_log=False,
            marks=marks,
        ),
        Bars(f"Vocabulary {VOCABULARIES[0]} against {VOCABULARIES[1]}: {head}", "s", vocabulary),
        Bars("Square matmuls at and beside a power of two", "FLOP/s", sizes),
    ]


def table(data: Data) -> TopicTable:
    rows = [
        [f"{row['tasks']} task{'s' if row['tasks'] > 1 else ''}", units.span(row["seconds"]), "–"]
        for row in data["tasks"]
    ]
    rows += [
        [
            f"vocabulary {row['vocabulary']}: {row['product']}",
            units.span(row["seconds"]),
            units.flops(_head_flops(data, row) / row["seconds"]["median"]),
        ]
        for row in data["vocabulary"]
    ]
    rows += [
        [f"matmul of size {row['size']}", units.span(row["seconds"]), units.flops(_rate(row))]
        for row in data["sizes"]
    ]
    return TopicTable(("what", "time (95 % interval)", "rate"), rows)


def _head_flops(data: Data, row: Data) -> float:
    return float(2 * data["tokens"] * data["hidden"] * row["vocabulary"])


topic = Topic(
    name="occupancy",
    title="Full waves and even tiles",
    about="why sizes in powers of two pay, or do not: waves of equal tasks, vocabulary 50257 against 50304, odd sizes",
    idea=(
        "A processor works on as many tasks at once as it has workers: the cores of a CPU, the multiprocessors of a GPU. Equal tasks "
        "therefore finish in waves. One task more than fits into a wave takes a whole further wave, during which the other "
        "workers are idle. The fewer waves there are, the more the last, half-empty one matters.",
        "A matmul is cut into tiles, and each tile is such a task. Tiles have fixed sizes, mostly multiples of 64 or 128; a matrix "
        "that is no multiple of them has tiles that stick out and compute nothing useful. Odd sizes cost more than that: a row that "
        "does not begin at a multiple of 16 bytes cannot be loaded by the widest instructions or by the matrix units' own loader.",
        "GPT-2 has 50257 tokens in its vocabulary, an odd number. Padding it to 50304, a multiple of 128, adds rows that no token uses. "
        "Whether the larger matrix is the faster one depends on the device: on a GPU's matrix units it usually matters, on a CPU, "
        "whose libraries rearrange their tiles anyway, often not. The numbers above are what this device does.",
    ),
    method=(
        (
            "equal tasks",
            "CPU: running sums over a vector, which cannot be divided, one thread per core; GPU: programs of 1024 threads with a fixed amount of arithmetic",
        ),
        ("vocabulary", "logits = x · Wᵀ, and the gradients of x and of W, as in training"),
        ("use of the machine", "the best time per task of all counts, over the time per task of this count"),
        INTERVALS,
    ),
    measure=measure,
    words=words,
    picture=picture,
    table=table,
)
