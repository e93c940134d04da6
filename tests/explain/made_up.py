"""Made-up measurements: machines that gain and machines that do not, to see whether the words notice."""

from __future__ import annotations

from typing import Any, cast

from rush.explain.clock import stat
from rush.explain.precision import FORMATS, UPDATES
from rush.records.explain import ExplainRecord

Data = dict[str, Any]


def took(seconds: float, n: int = 9) -> Data:
    """Timings around a median, two percent apart."""
    return stat([seconds * (1 + 0.0025 * (k - n // 2)) for k in range(n)])


def record(topic: str, data: Data, device: str = "cpu", **changes: Any) -> ExplainRecord:
    found: Data = {
        "format": "rush explain", "version": 1, "topic": topic, "device": device, "quick": False, "options": {},
        "machine": {"summary": "a made-up machine", "cores": 4, "os": "Linux", "python": "3.11", "torch": "2.11", "cuda": None, "driver": None},
        "measured": "2026-11-15T05:00:00+00:00", "seconds": 1.0, "load": 0.1, "data": data,
    }  # fmt: skip
    return cast(ExplainRecord, {**found, **changes})


def attention(*, gain: float = 4.0, oom: bool = False, saves: bool = True) -> Data:
    """Quadratic times; plain's memory quadratic, flash's linear (or no saving at all)."""
    rows = []
    for way in ("plain", "flash"):
        for length in (512, 1024, 2048, 4096):
            if oom and way == "plain" and length == 4096:
                rows.append({"way": way, "length": length, "status": "out of memory", "why": "no room", "seconds": None, "peak_bytes": None})  # fmt: skip
                break
            seconds = 1e-3 * (length / 512) ** 2 / (gain if way == "flash" else 1.0)
            peak = 8 * 4 * length**2 * 4 if way == "plain" or not saves else 2000 * length
            rows.append({"way": way, "length": length, "status": "ok", "why": None, "seconds": took(seconds), "peak_bytes": peak})  # fmt: skip
    return {
        "kind": "cpu",
        "dtype": "float32",
        "heads": 4,
        "head_dim": 64,
        "memory_bytes": 16 * 2**30,
        "rows": rows,
    }


def memory(*, hierarchy: bool = True, kind: str = "cpu", compiler: bool = True) -> Data:
    sizes = [2**k for k in range(13, 29)]

    def latency(size: int) -> float:
        if not hierarchy:
            return 5e-9
        return 1.5e-9 if size <= 2**16 else 5e-9 if size <= 2**20 else 30e-9 if size <= 2**25 else 110e-9

    def speed(size: int) -> float:
        return 20e9 if not hierarchy else 60e9 if size <= 2**16 else 40e9 if size <= 2**25 else 12e9

    links = [{"name": "host to device, page-locked", "moved": 2**28, "seconds": took(2**28 / 50e9)}] if kind == "cuda" else []  # fmt: skip
    return {
        "kind": kind, "line_bytes": 64, "missing": None if compiler else "no C compiler (cc, gcc or clang) is on the PATH",
        "levels": [{"name": "L1", "bytes": 2**16, "line_bytes": 64}, {"name": "L2", "bytes": 2**20, "line_bytes": 64}],
        "latency": [{"bytes": size, "seconds": took(latency(size))} for size in sizes] if compiler else [],
        "bandwidth": [{"bytes": size, "moved": size, "seconds": took(size / speed(size))} for size in sizes],
        "together": {"workers": 2, "moved": 2**28, "seconds": took(2**28 / 20e9)} if kind == "cpu" and compiler else None,
        "links": links, "fetch": took(9e-6) if kind == "cuda" else None,
    }  # fmt: skip


def fusion(*, gain: float = 6.0, compiled: bool = True, sliced: bool = True) -> Data:
    number = 2**24
    rows = []
    for way in ("separate", "sliced", "fused"):
        if (way == "fused" and not compiled) or (way == "sliced" and not sliced):
            continue
        for length in (1, 2, 4, 8):
            passes = length if way == "separate" else 1
            seconds = 0.01 * length if way == "separate" else 0.08 / gain * (1 if way == "fused" else 1.5)
            rows.append(
                {"way": way, "length": length, "moved": 8 * number * passes, "seconds": took(seconds)}
            )
    missing = None if compiled else "torch.compile failed here (no compiler)"
    return {"kind": "cpu", "numbers": number, "bytes_each": 4, "rows": rows, "compile_s": 9.5, "missing": missing, "agrees": True}  # fmt: skip


def batch(*, memory_bound: bool = True) -> Data:
    inner, outer, peak, bandwidth = 2048, 8192, 70e9, 20e9
    rows = []
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        flops = 2.0 * size * inner * outer
        traffic = 4.0 * (inner * outer + size * (inner + outer))
        seconds = max(flops / peak, traffic / bandwidth) if memory_bound else flops / peak
        rows.append({"batch": size, "seconds": took(seconds)})
    return {"kind": "cpu", "dtype": "float32", "bytes_each": 4, "inner": inner, "outer": outer, "rows": rows, "read_bytes_per_s": bandwidth}  # fmt: skip


def roofline(*, cached: bool = False, flash_gain: float = 2.0) -> Data:
    peak, bandwidth = 70e9, 20e9

    def op(name: str, kind: str, copies: int, flops: float, moved: float, part: float) -> Data:
        roof = min(peak, flops / moved * bandwidth)
        return {"name": name, "kind": kind, "copies": copies, "flops": flops, "bytes": moved, "seconds": took(flops / (roof * part))}  # fmt: skip

    attention = op("plain attention", "attention", 4, 1e9, 1e7, 0.2)
    flash = op("flash attention", "attention", 4, 0.5e9, 1e7, 0.5)
    flash["seconds"] = took(attention["seconds"]["median"] / flash_gain)
    ops = [
        op("qkv", "matmul", 4, 4e9, 2e7, 0.9), op("head", "matmul", 1, 9e9, 5e7, 0.8), attention, flash,
        op("norm", "elementwise", 9, 8e6, 8e6, 3.0 if cached else 0.6), op("optimizer", "optimizer", 1, 15e6, 28e6, 0.3),
    ]  # fmt: skip
    return {"kind": "cpu", "model": "tiny", "parameters": 10**6, "batch": 8, "sequence": 128, "dtype": "float32",
            "matmul_flops": peak, "copy_bytes_per_s": bandwidth, "ops": ops}  # fmt: skip


def precision(*, half_gain: float | None = 2.0) -> Data:
    rows = []
    for name, (_, exponent, fraction) in FORMATS.items():
        eps = 2.0**-fraction
        rate = {"fp32": 1.0, "bf16": half_gain, "fp16": half_gain}.get(name)
        flops = 2e9
        timing = (
            {"case": "1024x1024x1024", "flops": flops, "seconds": [flops / (70e9 * rate)] * 5}
            if rate
            else None
        )
        rows.append({
            "name": name, "exponent_bits": exponent, "fraction_bits": fraction, "largest": 2.0 ** (2 ** (exponent - 1)) / 2,
            "smallest_normal": 2.0 ** (2 - 2 ** (exponent - 1)), "eps": eps, "error_rms": eps / 4, "error_max": eps / 2,
            "adds_up_to": float(min(10_000, 2 ** (fraction + 1))), "moved": [float(step > eps / 2) for step in UPDATES],
            "rate": timing, "why": None if timing else "this device has none",
        })  # fmt: skip
    return {"kind": "cpu", "numbers": 1000, "added": 10_000, "updates": list(UPDATES), "rows": rows}


def occupancy(*, padding: float = 1.6, waves: bool = True, workers: int = 4) -> Data:
    tasks = []
    for number in range(1, 3 * workers + 2):
        full = -(-number // workers) if waves else number / workers
        tasks.append({"tasks": number, "seconds": took(2e-3 * full)})
    vocabulary = [
        {"vocabulary": size, "product": product, "seconds": took(0.05 if size == 50304 else 0.05 * padding)}
        for size in (50257, 50304)
        for product in ("logits", "gradient of the input", "gradient of the weight")
    ]
    sizes = [{"size": size, "flops": 2.0 * size**3, "seconds": took(2.0 * size**3 / (70e9 if size == 1024 else 60e9))}
             for size in (1023, 1024, 1025, 1032, 1088)]  # fmt: skip
    return {"kind": "cpu", "dtype": "float32", "workers": workers, "tasks": tasks, "sizes": sizes, "tokens": 64, "hidden": 768,
            "vocabulary": vocabulary}  # fmt: skip


def cpu_gpu(
    *, kind: str = "cuda", compiler: bool = True, guesses: bool = True, diverges: bool = True
) -> Data:
    """A core with a chain of a nanosecond a step, and a GPU that is four times as slow a chain and has many of them."""
    gpu = kind == "cuda"

    def chains(how: str, number: int, step_s: float) -> Data:
        return {"how": how, "chains": number, "rounds": 1000, "seconds": took(1000 * step_s)}

    host = [chains("scalar", 2**k, 1e-9) for k in range(4)] + [
        chains("vector", 8 * 2**k, 1e-9) for k in range(4)
    ]
    host.append(chains("all cores", 256, 1e-9))
    device = [chains("threads", 32 * 4**k, max(4e-9, 4e-9 * 32 * 4**k / 2**17)) for k in range(8)]
    branches = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        for way, order in (("branch", "random"), ("branch", "sorted"), ("select", "random")):
            wrong = 8e-9 * min(share, 1 - share) if guesses and (way, order) == ("branch", "random") else 0.0
            branches.append({"way": way, "order": order, "share": share, "seconds": took((0.25e-9 if way == "select" else 1e-9) + wrong)})  # fmt: skip
    ways = [
        {"ways": number, "whole_warps": whole, "seconds": took(1e-4 * (1 if whole or not diverges else number))}
        for whole in (False, True) for number in (1, 2, 4, 8, 16, 32)
    ]  # fmt: skip
    operation = [
        {"where": where, "numbers": 4**k, "seconds": took(call + 4**k / rate)}
        for where, call, rate in (("cpu", 1e-6, 1e9), ("cuda", 5e-6, 4e11))[: 2 if gpu else 1] for k in range(13)
    ]  # fmt: skip
    return {
        "kind": kind, "cores": 4, "lanes": 8 if compiler else None, "missing": None if compiler else "no C compiler (cc, gcc or clang) is on the PATH",
        "no_gpu": None if gpu else "torch finds no CUDA device on this machine", "host_chains": host if compiler else [],
        "device_chains": device if gpu else [], "branches": branches if compiler else [], "ways": ways if gpu else [],
        "round_trip": took(15e-6) if gpu else None, "operation": operation,
    }  # fmt: skip


def links(*, kind: str = "cpu", gpus: int = 0, latency_s: float = 100e-6, bytes_per_s: float = 1e9) -> Data:
    """Every message a latency and its bytes at one rate; the catalog's own links."""
    from rush.explain.link_speeds import catalog

    sizes = [2**k for k in range(10, 25, 2)]
    operations = ("all_reduce", "all_gather", "reduce_scatter", "send")
    rows = [
        {"operation": name, "bytes": size, "seconds": took(latency_s + size / bytes_per_s)}
        for name in operations for size in sizes
    ]  # fmt: skip
    rates = {"within host memory": 8e9}
    if kind == "cuda":
        rates |= {"host to device, page-locked": 50e9, "device to host, page-locked": 50e9, "host to device, ordinary": 10e9,
                  "device to host, ordinary": 5e9, "within device memory": 2e12}  # fmt: skip
    copies = [
        {"name": name, "rows": [{"bytes": size, "seconds": took(2e-6 + size / rate)} for size in sizes]}
        for name, rate in rates.items()
    ]
    backend, ranks = ("nccl", gpus) if gpus > 1 else ("gloo", 2)
    found = {"backend": backend, "ranks": ranks, "gpus": gpus, "rows": rows}
    return {"kind": kind, "copies": copies, "collectives": found, **catalog()}


def flash_attention(
    *,
    kind: str = "cuda",
    first: float = 1.5,
    second: float = 2.0,
    shares: bool = True,
    crosses: bool = True,
    compiler: bool = True,
) -> Data:
    """Orders that are so many times as fast as plain; one head keeps a core (or all of them) busy; Linformer from 2048 on."""
    gains = {"plain": 1.0, "first": first, "second": second}
    cores = 132 if kind == "cuda" else 4
    rows = [
        {"way": way, "length": length, "seconds": took(1e-3 * (length / 512) ** 2 / gain)}
        for length in (512, 1024, 2048, 4096) for way, gain in gains.items()
    ]  # fmt: skip
    sharing = [
        {"way": way, "heads": heads, "seconds": took(max(1e-3 if way == "first" and shares else 0.0, 1e-3 * heads / cores))}
        for heads in (1, cores, 4 * cores) for way in ("first", "second")
    ]  # fmt: skip
    linformer = [
        {"length": length, "heads": 4, "exact": took(1e-3 * (length / 512) ** 2), "linformer": took((6e-3 if crosses else 600e-3) * length / 512)}
        for length in (512, 1024, 2048, 4096)
    ]  # fmt: skip
    missing = None if compiler else "no C compiler (cc, gcc or clang) is on the PATH"
    return {
        "kind": kind, "dtype": "bfloat16", "bytes_each": 2, "head_dim": 64, "tile": 64, "kept": 256, "cores": cores, "missing": missing,
        "heads": 16 if kind == "cuda" else 1, "rows": rows if compiler else [], "sharing": sharing if compiler else [],
        "sharing_length": 2048, "linformer": linformer,
    }  # fmt: skip


EVERY = {
    "flash-attention": flash_attention,
    "attention": attention, "cpu-gpu": cpu_gpu, "memory": memory, "fusion": fusion, "batch": batch, "roofline": roofline,
    "precision": precision, "links": links, "occupancy": occupancy,
}  # fmt: skip
"""A plausible measurement of every topic."""
