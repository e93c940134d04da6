"""The memory hierarchy: latency and bandwidth against the size of what is in use.

Latency comes from pointer chasing (each load needs the one before), bandwidth from reading in order. On a CPU
both walks are a few lines of C, because a step of the interpreter takes longer than a visit to the cache; on
a GPU they are Triton kernels, and the link to the host is timed as well.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rush.errors import MachineError
from rush.explain import units
from rush.explain.clock import byte_rate, stat, timed
from rush.explain.topic import Data, ExplainSettings, Topic, TopicTable
from rush.hardware.stopwatch import Work, time_calls
from rush.report.panels import Bars, Curve, Curves, Mark, Panel, bar, dot

KIB, MIB, GIB = 2**10, 2**20, 2**30
SAMPLE_S = 2e-3


def measure(settings: ExplainSettings) -> Data:
    return _on_device(settings) if settings.device == "cuda" else _on_host(settings)


def _on_host(settings: ExplainSettings) -> Data:
    from rush.explain.native.host import compile_walks

    levels = caches()
    line = levels[0]["line_bytes"] if levels else 64
    largest = _largest(levels, settings)
    sizes = _sizes(8 * KIB, largest, settings.quick)
    walks = compile_walks()
    data = _nothing_yet("cpu", line, levels)
    if isinstance(walks, str):
        data["missing"] = walks
        data["bandwidth"] = _bandwidth_by_calls(sizes, settings)
        return data
    samples = 5 if settings.quick else 11
    for done, size in enumerate(sizes):
        settings.progress(f"memory, {units.size(size)} in use", done, len(sizes))
        data["latency"].append({"bytes": size, "seconds": _hop(walks, size, line, samples)})
        data["bandwidth"].append({"bytes": size, "moved": size, "seconds": _pass(walks, size, samples)})
    data["together"] = _all_cores(walks, largest, settings.machine.cpu.num_threads, samples)
    return data


def _nothing_yet(kind: str, line_bytes: int, levels: Sequence[Data]) -> Data:
    found: Data = {"kind": kind, "line_bytes": line_bytes, "levels": levels, "missing": None}
    return {**found, "latency": [], "bandwidth": [], "together": None, "links": [], "fetch": None}


def _sizes(first: int, last: int, quick: bool) -> list[int]:
    """Powers of two and, when there is time, the sizes half-way between."""
    sizes, size = [], first
    while size <= last:
        sizes += [size] if quick else [size, size * 3 // 2]
        size *= 4 if quick else 2
    return [size for size in sizes if size <= last]


def _largest(levels: Sequence[dict[str, Any]], settings: ExplainSettings) -> int:
    """Well beyond the last cache, but never more than a sixteenth of the memory."""
    beyond = 4 * max([level["bytes"] for level in levels], default=16 * MIB)
    wanted = min(max(64 * MIB, beyond), 256 * MIB if not settings.quick else 64 * MIB)
    allowed = settings.machine.ram_bytes // 16
    return int(max(16 * MIB, min(wanted, allowed)))


def _hop(walks: Any, size: int, line: int, samples: int) -> dict[str, Any]:
    """Seconds of one hop of the chase in a chain of this size."""
    from rush.explain.native.host import chain

    block = chain(size, line)
    # Once around (where that is quick) brings into the caches what fits there.
    place = walks.chase(block.ctypes.data, max(1, min(size // line, 2**20) // 16))
    sixteens = 256
    while True:
        began = time.perf_counter()
        place = walks.chase(place, sixteens)
        if (took := time.perf_counter() - began) > SAMPLE_S / 2:
            break
        sixteens *= max(2, min(8, int(SAMPLE_S / max(took, 1e-6))))

    def walk() -> None:
        # From where the last one ended: starting over would find its own lines in the cache.
        nonlocal place
        place = walks.chase(place, sixteens)

    return _sampled(walk, samples, 16 * sixteens)


def _sampled(work: Work, samples: int, parts: int) -> dict[str, Any]:
    """Seconds of a part of the work, of which a call does `parts`; after one call to warm up."""
    seconds = time_calls(work, "cpu", budget_s=0.0, least=samples, most=samples, window_s=0.0)
    return stat([each / parts for each in seconds])


def _pass(walks: Any, size: int, samples: int) -> dict[str, Any]:
    """Seconds of one pass in order over a block of this size."""
    from rush.explain.native.host import block

    found = block(size)
    repeats = max(1, round(SAMPLE_S * 2e10 / size))
    return _sampled(lambda: walks.read(found, repeats), samples, repeats)


def _all_cores(walks: Any, size: int, workers: int, samples: int) -> Data | None:
    """Every core reads its own part of the largest block at the same time."""
    from rush.explain.native.host import block

    if workers < 2:
        return None
    part = size // workers // 512 * 512
    blocks = [block(part, seed) for seed in range(workers)]
    repeats = max(1, round(2e8 / part))
    with ThreadPoolExecutor(workers) as pool:
        found = _sampled(lambda: walks.read_together(pool, blocks, repeats), samples, repeats)
    return {"workers": workers, "moved": part * workers, "seconds": found}


def _bandwidth_by_calls(sizes: Sequence[int], settings: ExplainSettings) -> list[Data]:
    """Without a C compiler: torch adds up tensors; below some size the call itself is what takes the time."""
    import torch

    rows = []
    for done, size in enumerate(sizes):
        settings.progress(f"memory, {units.size(size)} in use", done, len(sizes))
        x = torch.rand(size // 4)
        rows.append({"bytes": size, "moved": size, "seconds": timed(x.sum, "cpu", budget_s=0.05)})
    return rows


def caches() -> list[dict[str, Any]]:
    """Data caches of the first core as the system reports them, smallest first; empty where it does not."""
    found = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        facts = {
            name: (index / name).read_text().strip()
            for name in ("type", "level", "size")
            if (index / name).exists()
        }
        if facts.get("type") in ("Data", "Unified") and facts.get("size", "").endswith("K"):
            line = index / "coherency_line_size"
            width = int(line.read_text()) if line.exists() else 64
            found[int(facts["level"])] = (int(facts["size"][:-1]) * KIB, width)
    if not found:
        for level, name in (
            (1, "SC_LEVEL1_DCACHE_SIZE"),
            (2, "SC_LEVEL2_CACHE_SIZE"),
            (3, "SC_LEVEL3_CACHE_SIZE"),
        ):
            if name in os.sysconf_names and (size := os.sysconf(name)) > 0:
                found[level] = (size, 64)
    return [
        {"name": f"L{level}", "bytes": size, "line_bytes": line}
        for level, (size, line) in sorted(found.items())
    ]


def _on_device(settings: ExplainSettings) -> Data:
    import torch

    try:
        from rush.explain.native.device import Chase, DeviceStream
    except ImportError as error:
        raise MachineError(
            f"the walks through a GPU's memory are Triton kernels, and Triton is not here ({error}); install it with pip install triton."
        ) from None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    cache = int(getattr(properties, "L2_cache_size", 0) or 0)
    free, _ = torch.cuda.mem_get_info()
    largest = int(min(4 * GIB if not settings.quick else GIB, free // 8))
    levels = [{"name": "L2", "bytes": cache, "line_bytes": 128}] if cache else []
    data = _nothing_yet("cuda", 128, levels)
    chases = _sizes(32 * KIB, largest, settings.quick)[:: 1 if settings.quick else 2]
    streams = [size for size in _sizes(MIB, largest, settings.quick) if size % (16 * KIB) == 0]
    parts, hops = len(chases) + len(streams) + 4, 4000
    budget = 0.02 if settings.quick else 0.1
    for done, size in enumerate(chases):
        settings.progress(f"latency, {units.size(size)} in use", done, parts)
        walk = Chase(size, 128, hops)
        # Once around, where that is quick, so that what fits into a cache is there.
        walk(min(size // 128, 200_000))
        found = timed(walk, "cuda", budget_s=budget, most=11)
        per_hop = stat([sample / hops for sample in found["samples"]])
        data["latency"].append({"bytes": size, "seconds": per_hop})
    for done, size in enumerate(streams, start=len(chases)):
        settings.progress(f"bandwidth, {units.size(size)} in use", done, parts)
        stream = DeviceStream(size, properties.multi_processor_count, max(size, GIB))
        found = timed(stream, "cuda", budget_s=budget, most=11)
        data["bandwidth"].append({"bytes": size, "moved": stream.moved_bytes, "seconds": found})
        del stream
    data["links"] = _links(settings, parts, budget)
    one = torch.ones(1, device="cuda")
    data["fetch"] = timed(one.item, "cpu", budget_s=budget)
    return data


def _links(settings: ExplainSettings, parts: int, budget: float) -> list[Data]:
    """Copies between host and device, from ordinary and from page-locked memory."""
    import torch

    size = 64 * MIB if settings.quick else 256 * MIB
    card = torch.empty(size, dtype=torch.uint8, device="cuda")
    plain = torch.randint(0, 256, (MIB,), dtype=torch.uint8).repeat(size // MIB)
    pinned = plain.pin_memory()
    rows = []
    cases = (
        ("host to device, page-locked", pinned, card),
        ("device to host, page-locked", card, pinned),
        ("host to device, ordinary", plain, card),
        ("device to host, ordinary", card, plain),
    )
    for done, (name, source, target) in enumerate(cases):
        settings.progress(name, parts - 4 + done, parts)
        copy = partial(target.copy_, source, non_blocking=True)
        found = timed(copy, "cuda", budget_s=budget, most=9)
        rows.append({"name": name, "moved": size, "seconds": found})
    return rows


def words(data: Data) -> list[str]:
    sentences = []
    latency, speed = data["latency"], data["bandwidth"]
    if latency:
        sentences += _latency_words(data)
    first, last = speed[0], speed[-1]
    fast, slow = byte_rate(first), byte_rate(last)
    who = "the device" if data["kind"] == "cuda" else "one core" if latency else "torch"
    best = max(speed, key=byte_rate)
    shape = (
        f"{units.times(byte_rate(best) / slow)} less than at best ({units.bandwidth(byte_rate(best))} with {units.size(best['bytes'])})"
        if byte_rate(best) / slow > 1.2
        else "hardly less than at best"
    )
    sentences.append(
        f"Reading in order, {who} gets {units.bandwidth(fast)} from {units.size(first['bytes'])} and "
        f"{units.bandwidth(slow)} from {units.size(last['bytes'])}: {shape}."
    )
    if data["missing"]:
        sentences.append(
            f"Latency was not measured: {data['missing']}. It needs a few lines of machine code."
        )
        needed = first["bytes"] / byte_rate(best) / first["seconds"]["median"]
        sentences.append(
            f"Of the {units.duration(first['seconds']['median'])} that adding up {units.size(first['bytes'])} took, {units.share(needed)} "
            "would be enough at the best rate seen; the rest is the call, so small caches do not show."
        )
    if latency:
        sentences.append(_order_words(data))
    if data["together"]:
        both = byte_rate(data["together"])
        gain = both / slow
        more = (
            f"{units.times(gain)} one core"
            if gain > 1.1
            else "no more than one core alone: they share the memory, or other programs took a part of it"
        )
        sentences.append(
            f"All {data['together']['workers']} cores reading together get {units.bandwidth(both)}, {more}."
        )
    if data["links"]:
        sentences.append(_link_words(data, slow))
    return sentences


def _latency_words(data: Data) -> list[str]:
    latency = data["latency"]
    first, last = latency[0], latency[-1]
    ratio = units.speedup(last["seconds"], first["seconds"])
    opening = f"A visit to a random place takes {units.duration(first['seconds']['median'])} when {units.size(first['bytes'])} are in use"
    if not ratio.faster or ratio.ratio < 1.3:
        return [
            f"{opening} and {units.duration(last['seconds']['median'])} when {units.size(last['bytes'])} are: "
            "no hierarchy shows at these sizes."
        ]
    sentences = [
        f"{opening} and {units.duration(last['seconds']['median'])} when {units.size(last['bytes'])} are: "
        f"{units.times(ratio.ratio)} longer, for the same instruction."
    ]
    climbs = steps(latency)
    known = [f"{level['name']} {units.size(level['bytes'])}" for level in data["levels"]]
    reported = (
        f"; the system reports caches of {units.listed(known)}"
        if known
        else "; the system reports no cache sizes"
    )
    if climbs:
        places = units.listed(
            [f"{units.size(low)} and {units.size(high)} ({units.times(rise)})" for low, high, rise in climbs]
        )
        sentences.append(f"It climbs between {places}{reported}.")
    return sentences


def steps(latency: Sequence[Data]) -> list[tuple[int, int, float]]:
    """The climbs of a latency curve: neighbors that differ by a fifth, joined; the three largest, in order."""
    climbs: list[tuple[int, int, float]] = []
    open_at: tuple[int, float] | None = None
    for low, high in itertools.pairwise(latency):
        if high["seconds"]["median"] > 1.2 * low["seconds"]["median"]:
            start, base = open_at or (low["bytes"], low["seconds"]["median"])
            open_at = (start, base)
            joined = (start, high["bytes"], high["seconds"]["median"] / base)
            if climbs and climbs[-1][0] == start:
                climbs[-1] = joined
            else:
                climbs.append(joined)
        else:
            open_at = None
    largest = sorted(climbs, key=lambda climb: -climb[2])[:3]
    return sorted(largest)


def _order_words(data: Data) -> str:
    """In order against at random, at the largest size: both in bytes of a cache line per second."""
    last = data["latency"][-1]
    random = data["line_bytes"] / last["seconds"]["median"]
    ordered = byte_rate(data["bandwidth"][-1])
    gain = ordered / random
    head = (
        f"From {units.size(last['bytes'])}, one random visit after another brings {units.bandwidth(random)}"
    )
    if gain < 1.5:
        return f"{head}, about what reading in order brings."
    return (
        f"{head} in lines of {data['line_bytes']} bytes, reading in order {units.times(gain)} as much: the next lines are "
        "fetched before they are asked for, so order hides the latency."
    )


def _link_words(data: Data, own: float) -> str:
    best = max(data["links"], key=byte_rate)
    ratio = own / byte_rate(best)
    than = (
        f"{units.times(ratio)} slower than the device's own memory"
        if ratio > 1.1
        else "as fast as the device's own memory"
    )
    fetch = (
        f" Fetching a single number takes {units.duration(data['fetch']['median'])}." if data["fetch"] else ""
    )
    return f"The link to the host carries at best {units.bandwidth(byte_rate(best))} ({best['name']}), {than}.{fetch}"


def picture(data: Data) -> list[Panel]:
    marks = [
        Mark(level["bytes"], f"{level['name']} {units.size(level['bytes'])}") for level in data["levels"]
    ]
    panels: list[Panel] = []
    if data["latency"]:
        line = Curve(
            "random visits, one after another", [dot(r["bytes"], r["seconds"]) for r in data["latency"]], 2
        )
        panels.append(Curves("Latency", "bytes in use", "time of one visit", "B", "s", [line], marks=marks))
    line = Curve(
        "reading in order", [dot(r["bytes"], r["seconds"], r["moved"]) for r in data["bandwidth"]], 1
    )
    panels.append(Curves("Bandwidth", "bytes in use", "bytes per second", "B", "B/s", [line], marks=marks))
    if data["links"]:
        own = data["bandwidth"][-1]
        rows = [bar(row["name"], row["seconds"], 3, row["moved"]) for row in data["links"]]
        rows.append(bar("the device's own memory", own["seconds"], 1, own["moved"]))
        panels.append(Bars("The link to the host", "B/s", rows, log=True))
    return panels


def table(data: Data) -> TopicTable:
    visits = {row["bytes"]: units.span(row["seconds"]) for row in data["latency"]}
    speed = {row["bytes"]: units.bandwidth(byte_rate(row)) for row in data["bandwidth"]}
    rows = [
        [units.size(size), visits.get(size, "–"), speed.get(size, "–")] for size in sorted({*visits, *speed})
    ]
    rows += [[row["name"], "–", units.bandwidth(byte_rate(row))] for row in data["links"]]
    return TopicTable(("bytes in use", "one random visit (95 % interval)", "in order"), rows)


topic = Topic(
    name="memory",
    title="Memory is a ladder of ever larger, ever slower stores",
    about="how long a visit takes and how many bytes flow, from the nearest cache to the farthest memory",
    idea=(
        "Arithmetic is cheap; fetching the numbers is what takes time. A store can be small and near, or large and far, "
        "not both, so a machine has several: a few tens of kilobytes that answer at once, then larger ones, each several "
        "times slower, and at last the main memory. What was used lately is kept in the near ones.",
        "Two figures describe a store. Latency is how long one visit takes when nothing can be prepared; bandwidth is how "
        "much flows when the next bytes are asked for before the last have come. A program that hops about feels the "
        "first, one that walks in order the second.",
        "Nearly every optimization in training comes down to this picture: tiles that stay in a near store "
        "(FlashAttention, matmuls), several operations in one pass (fusion), fewer bytes per number (precision), "
        "more work per byte fetched (batch size).",
    ),
    method=(
        (
            "latency",
            "a cycle through all cache lines in random order, each holding the address of the next; time per hop, translation of addresses included",
        ),
        (
            "bandwidth",
            "all bytes read in order and added up; on a CPU by one core, on a GPU by all multiprocessors, past their own caches",
        ),
        ("link", "copies of one large block between host and device, timed on the device"),
        ("intervals", "95 %, from resampling the samples of this one process"),
    ),
    measure=measure,
    words=words,
    picture=picture,
    table=table,
)
