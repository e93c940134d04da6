"""Links: what a message costs by its size, between memories, processes and devices.

Measured here: copies in memory, between host and device where there is one, and collectives (between GPUs, or between
two processes of this CPU). Links that this machine does not have come from the catalog and are marked as such.
`link_speeds` measures and fits; this file describes and draws.
"""

from __future__ import annotations

from typing import Any

from rush.explain import units
from rush.explain.link_speeds import (
    GRADIENT_BYTES,
    HIDING,
    HOST,
    RANKS,
    AlphaBeta,
    fit,
    gradient_bytes,
    hiding_tokens,
    measure,
)
from rush.explain.topic import INTERVALS, Data, Topic, TopicTable
from rush.report.panels import Bar, Bars, Curve, Curves, Dot, Panel, dot

OPERATIONS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "send": "send and receive",
}
SHORT = {"gpt2-124m": "GPT-2 124M", "llama-3.2-1b": "Llama 3.2 1B", "llama-3.1-8b": "Llama 3.1 8B"}
CATALOG = "from the catalog, not measured here"


def byte_rate(row: Data) -> float:
    return float(row["bytes"] / row["seconds"]["median"])


def line_of(rows: list[Data]) -> AlphaBeta:
    return fit([(row["bytes"], row["seconds"]["median"]) for row in rows])


def collective(data: Data, operation: str) -> list[Data]:
    return [row for row in data["collectives"]["rows"] if row["operation"] == operation]


def words(data: Data) -> list[str]:
    return [
        _collective_words(data),
        _gradient_words(data),
        *(_copy_words(data)),
        _catalog_words(data),
        _hiding_words(data),
    ]


def between(data: Data) -> str:
    found = data["collectives"]
    if found["backend"] == "nccl":
        return f"{found['ranks']} GPUs (NCCL)"
    return f"{found['ranks']} processes of this CPU (gloo over loopback)"


def _collective_words(data: Data) -> str:
    rows = collective(data, "all_reduce")
    line = line_of(rows)
    first, last = rows[0], rows[-1]
    alone = data["kind"] == "cuda" and data["collectives"]["backend"] != "nccl"
    lacking = " Collectives between GPUs were not measured: they need two, and there is one." if alone else ""
    text = (
        f"Measured between {between(data)}: an all-reduce of {units.size(first['bytes'])} takes "
        f"{units.duration(first['seconds']['median'])}, of {units.size(last['bytes'])} {units.duration(last['seconds']['median'])}: "
        f"{units.times(last['seconds']['median'] / first['seconds']['median'])} the time for "
        f"{units.times(last['bytes'] / first['bytes'])} the bytes."
    )
    if line.half_bytes < first["bytes"]:
        return f"{text} No latency shows at these sizes: bytes flow at {units.bandwidth(line.bytes_per_s)}.{lacking}"
    return (
        f"{text} As a latency and a bandwidth that is {units.duration(line.latency_s)} and {units.bandwidth(line.bytes_per_s)} "
        f"(off by {units.share(line.worst)} at worst): below {units.size(line.half_bytes)} most of the time is latency, "
        f"which is why gradients travel in buckets and not one tensor at a time.{lacking}"
    )


def _gradient_words(data: Data) -> str:
    line = line_of(collective(data, "all_reduce"))
    parts = [
        f"{units.duration(line.seconds(gradient_bytes(model)))} for {SHORT.get(model['name'], model['name'])} "
        f"({units.size(gradient_bytes(model))})"
        for model in data["models"]
    ]
    return f"By that line, extrapolated, the all-reduce of a model's fp32 gradients would take {units.listed(parts)} here."


def _copy_words(data: Data) -> list[str]:
    lines = {copy["name"]: line_of(copy["rows"]) for copy in data["copies"]}
    rows = next(copy["rows"] for copy in data["copies"] if copy["name"] == HOST)
    # No line: the smaller copies stay in caches, the larger ones do not.
    best, last = max(rows, key=byte_rate), rows[-1]
    text = (
        f"A copy within host memory, by one core, takes {units.duration(rows[0]['seconds']['median'])} for "
        f"{units.size(rows[0]['bytes'])} and flows at {units.bandwidth(byte_rate(last))} for {units.size(last['bytes'])}"
    )
    if byte_rate(best) > 1.2 * byte_rate(last):
        text += f" (at best {units.bandwidth(byte_rate(best))}, for {units.size(best['bytes'])}, in a cache)"
    there = {name: line for name, line in lines.items() if "host to device" in name}
    if not there:
        return [
            f"{text}. Copies between host and device were not measured: this is a CPU, and what it would copy to is its own memory."
        ]
    locked, ordinary = (there[f"host to device, {kind}"] for kind in ("page-locked", "ordinary"))
    ratio = locked.bytes_per_s / ordinary.bytes_per_s
    gain = (
        f"{units.times(ratio)} as fast from page-locked memory as from ordinary memory"
        if ratio > 1.1
        else "no faster from page-locked memory than from ordinary memory"
    )
    own = lines["within device memory"].bytes_per_s
    return [
        f"{text}; from host to device {units.bandwidth(locked.bytes_per_s)} ({gain}), within the device {units.bandwidth(own)} copied."
    ]


def _link(data: Data, key: str) -> Any:
    return next(row for row in data["links"] if row["key"] == key)


def _catalog_words(data: Data) -> str:
    rows = [_link(data, key) for key in ("ethernet-10", "ib-ndr", "pcie4", "nvlink4")]
    largest = data["models"][-1]
    times = {row["link"]: row["seconds"] for row in data["reduced"] if row["model"] == largest["name"]}
    rates = [f"{units.bandwidth(row['bytes_per_s'])} ({_name(row)})" for row in rows]
    over = [
        f"{units.duration(times[key])} over {_name(_link(data, key))}"
        for key in ("ethernet-10", "pcie4", "nvlink4")
    ]
    return (
        f"By the catalog, not measured here, one way: {units.listed(rates)}. At these rates, by arithmetic, {data['ranks']} ranks "
        f"reduce the gradients of {SHORT.get(largest['name'], largest['name'])} in {units.listed(over)}."
    )


def _hiding_words(data: Data) -> str:
    parts = []
    for key in ("nvlink3", "pcie4", "ethernet-10"):
        link = _link(data, key)
        tokens = hiding_tokens(data, link["bytes_per_s"])
        parts.append(f"{units.plain_number(int(float(f'{tokens:.2g}')))} over {_name(link)}")
    return (
        "An all-reduce overlaps with the backward pass. By arithmetic it hides behind that of an A100 from about so many tokens a "
        f"rank and step on, whatever the size of the model: {units.listed(parts)}. Smaller batches wait for the link."
    )


def _name(link: Data) -> str:
    """A link without what its makers add up."""
    return str(link["what"].partition(" (")[0])


def picture(data: Data) -> list[Panel]:
    found = [
        Curve(name, [dot(row["bytes"], row["seconds"]) for row in rows], color)
        for color, (operation, name) in enumerate(OPERATIONS.items(), start=1)
        if (rows := collective(data, operation))
    ]
    rows = collective(data, "all_reduce")
    line = line_of(rows)
    found.append(
        Curve(
            "all-reduce: latency + bytes / bandwidth",
            [Dot(row["bytes"], line.seconds(row["bytes"])) for row in rows],
            6,
            "formula",
        )
    )
    copies = [
        Curve(copy["name"], [dot(row["bytes"], row["seconds"], row["bytes"]) for row in copy["rows"]], color)
        for color, copy in enumerate(data["copies"], start=1)
    ]
    links = [Bar(_name(row), row["bytes_per_s"], color=_color(row["key"])) for row in data["links"]]
    reduced = [
        Bar(
            f"{SHORT.get(row['model'], row['model'])}, {_name(_link(data, row['link'])).partition(',')[0]}",
            row["seconds"],
            color=_color(row["link"]),
        )
        for row in data["reduced"]
    ]
    return [
        Curves(
            f"Measured: collectives between {between(data)}", "bytes of the buffer", "time", "B", "s", found
        ),
        Curves("Measured: copies", "bytes of the copy", "bytes per second", "B", "B/s", copies),
        Bars(f"Links, one way: {CATALOG}", "B/s", links, log=True),
        Bars(
            f"All-reduce of fp32 gradients between {data['ranks']} ranks: by arithmetic, {CATALOG}",
            "s",
            reduced,
            log=True,
        ),
    ]


def _color(key: str) -> int:
    return {"e": 3, "i": 3, "p": 2, "n": 1}[key[0]]


def table(data: Data) -> TopicTable:
    rows = [
        [f"{OPERATIONS.get(row['operation'], row['operation'])} of {units.size(row['bytes'])}", units.span(row["seconds"]),
         units.bandwidth(byte_rate(row)), "measured"]
        for row in data["collectives"]["rows"]
    ]  # fmt: skip
    rows += [
        [f"copy {copy['name']}, {units.size(row['bytes'])}", units.span(row["seconds"]),
         units.bandwidth(byte_rate(row)), "measured"]
        for copy in data["copies"]
        for row in copy["rows"]
    ]  # fmt: skip
    rows += [[row["what"], "–", units.bandwidth(row["bytes_per_s"]), row["source"]] for row in data["links"]]
    rows += [
        [f"all-reduce of {SHORT.get(row['model'], row['model'])}, {data['ranks']} ranks, {_link(data, row['link'])['what']}",
         units.duration(row["seconds"]), "–", "arithmetic"]
        for row in data["reduced"]
    ]  # fmt: skip
    return TopicTable(("what", "time (95 % interval)", "bytes per second", "source"), rows)


topic = Topic(
    name="links",
    title="What a message costs",
    about="PCIe, NVLink, networks: copies and collectives over the size of the message, and what gradients cost over each link",
    idea=(
        "Between two places of memory lies a link: the memory bus within a processor, PCIe between a processor and a GPU, "
        "NVLink between GPUs of a server, a network between servers. From each to the next the rate falls by about ten. What "
        "a program sends over the slow ones decides how many devices it can use.",
        "A message costs a fixed latency (the call, the protocol, the other side waking up) and a time in proportion to its bytes. "
        "Small messages pay latency, large ones bandwidth; the size at which both are equal separates the two. That is why "
        "many small tensors are put into one buffer before they travel, and why more ranks, whose rings take more steps, "
        "make small messages slower.",
        "Training in parallel sends in a few patterns, the collectives. An all-reduce gives every rank the sum of all ranks' "
        "gradients; as a ring it sends 2 (n − 1)/n of the buffer over each link, so hardly more with many ranks than with few. "
        "All-gather and reduce-scatter, its two halves, are what FSDP uses. If a link is fast enough to end before the "
        "backward pass does, parallel training costs nothing; if not, the devices wait for it.",
    ),
    method=(
        ("collectives", "one process a rank; a repeat begins at a barrier and counts with its slowest rank; bytes are those of the whole buffer"),
        ("copies", "random bytes, calls one after another; within the host by one core (numpy), with a CUDA device by torch's copy_ and events, from page-locked and ordinary (pageable) host memory"),
        ("latency and bandwidth", "time = latency + bytes / bandwidth, by least squares of the relative error over all sizes"),
        ("gradients, by arithmetic", f"a ring of {RANKS} ranks at the link's rate: 2 (n − 1)/n · {GRADIENT_BYTES} bytes · parameters / rate, and 12 µs a step of the ring; real collectives reach less than the link's rate"),
        ("tokens to hide it", f"4 FLOPs · tokens a parameter in the backward pass, at what large bf16 matmuls reach on an {HIDING} by the catalog, against the ring's bytes a parameter"),
        ("catalog", "rates of specifications and datasheets, one way, of one device (rush/hardware/links.py)"),
        INTERVALS,
    ),
    measure=measure,
    words=words,
    picture=picture,
    table=table,
)  # fmt: skip
