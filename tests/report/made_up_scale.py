"""Made-up studies of scale to draw in tests. NOT MEASUREMENTS: every number here is invented."""

from __future__ import annotations

from typing import Any

from tests.report.made_up import HOSTILE
from tests.report.made_up_benches import MACHINE

Table = dict[str, Any]
LOSSES = [7.6, 7.4, 7.1, 6.9]


def measured(value: float) -> Table:
    samples = [value * factor for factor in (0.98, 1.0, 1.01, 1.02)]
    return {
        "median": value,
        "ci95": [samples[0], samples[-1]],
        "n": 4,
        "samples": samples,
        "processes": [samples],
    }


def point(layout: str, devices: int, rate: float | None, verdict: str = "equal", **rest: Any) -> Table:
    share = rate / (1000.0 * devices) if rate else 0.0
    status = {"baseline": "ok", "equal": "ok", "different": "ok", "shared device": "ok"}.get(
        verdict, verdict.replace(" ", "_")
    )
    scalings = ["strong", "weak"] if devices == 4 else ["strong"]
    return {
        "layout": layout,
        "sizes": {layout: devices},
        "devices": devices,
        "scalings": scalings,
        "peer_to_peer": True,
        "shared": False,
        "status": status,
        "reason": None if status == "ok" else "it does not divide",
        "verdict": verdict,
        "recipe": 'about = "made up"\n',
        "digest": "d",
        "techniques": [layout],
        "step_tokens": 4096,
        "tokens_per_s": measured(rate) if rate else None,
        "step_ms": measured(4096 / rate * 1000) if rate else None,
        "efficiency": {
            kind: {"ratio": share, "ci95": [share * 0.96, share * 1.05], "over": "one device"} for kind in scalings
        }
        if verdict == "equal"
        else {},
        "exposed": {"share": 0.2, "exposed_ms": 2.0, "exchange_ms": 5.0, "step_ms": 10.0, "ranks": [0.1, 0.2]}
        if rate and devices > 1
        else None,
        "memory_bytes": [2**30 + 2**26 * rank for rank in range(devices)] if rate else None,
        "evidence": [{"technique": layout, "took_effect": True, "what": "12 all-gathers"}] if rate else [],
        "parity": {"verdict": "different" if verdict == "different" else "equal", "losses": LOSSES,
                   "reference_losses": LOSSES, "steps": 4, "why": "the loss of step 3 is off by 1.0e-07"},
        "predicted_tokens_per_s": None,
        "compile_s": 1.0,
        "warmup_s": 2.0,
        "environment": {},
        **rest,
    }  # fmt: skip


def link(operation: str, factor: float, peers: bool = True) -> Table:
    rates = [1e8 * 2**k for k in range(6)]
    sizes = [
        {
            "bytes": 2.0 ** (10 + 3 * k),
            "seconds": [1.0, 1.1, 1.3],
            "bytes_per_s": rate,
            "bus_bytes_per_s": factor * rate,
        }
        for k, rate in enumerate(rates)
    ]
    return {
        "operation": operation,
        "backend": "nccl",
        "ranks": 4,
        "peer_to_peer": peers,
        "sizes": sizes,
        "reason": None,
    }


def scale() -> Table:
    no_peers = point("zero3", 4, 1500.0, peer_to_peer=False)
    return {
        "format": 1,
        "name": "made-up",
        "started": "2026-11-15T02:44:00+00:00",
        "finished": "2026-11-15T02:47:00+00:00",
        "machine": MACHINE,
        "base": {"recipe": "", "digest": "d"},
        "devices": [1, 2, 4],
        "layouts": ["ddp", "zero2", "zero3", "tp", "pp", "cp"],
        "step_tokens": 4096,
        "tokens_per_device": 1024.0,
        "threads_per_rank": None,
        "counted": "processed",
        "formulas": {"efficiency": "tokens per second and device over those of one device"},
        "points": [
            point("one device", 1, 1000.0, "baseline"),
            point("ddp", 2, 1900.0),
            point("zero3", 2, 1700.0),
            point("ddp", 4, 3600.0, predicted_tokens_per_s=3800.0),
            point("zero2", 4, 3300.0),
            point("zero3", 4, 3000.0),
            no_peers,
            point("tp", 4, 3900.0, "different"),
            point("pp", 4, None, "unsupported"),
            point("cp", 4, None, "out of memory"),
            point("ddp8", 8, None, "shared device", shared=True),
        ],
        "comparisons": [
            {"what": "ZeRO-2 against ZeRO-3", "first": "zero2 on 4", "second": "zero3 on 4", "devices": 4,
             "scalings": ["strong", "weak"], "speed": {"ratio": 0.91, "ci95": [0.9, 0.93], "over": "zero2 on 4"},
             "real": True, "memory": 0.6},
        ],
        "links": [
            link("all_reduce", 1.5), link("all_gather", 0.75), link("reduce_scatter", 0.75), link("send", 1.0),
            link("all_reduce", 0.5, peers=False),
            {"operation": "none", "backend": "none", "ranks": 8, "peer_to_peer": True, "sizes": [],
             "reason": "ranks that share a device measure their waiting for each other."},
        ],
        "drift": {"first": 1000.0, "again": 990.0, "ratio": 0.99, "ci95": [0.97, 1.01], "flagged": False, "restless": False},
    }  # fmt: skip


def hostile_scale() -> Table:
    record = scale()
    record["name"] = HOSTILE
    record["formulas"] = {HOSTILE: HOSTILE}
    for found in record["points"]:
        found |= {"layout": HOSTILE + found["layout"], "reason": HOSTILE, "recipe": HOSTILE}
        found["evidence"] = [{"technique": HOSTILE, "took_effect": True, "what": HOSTILE}]
        found["parity"] = {**found["parity"], "why": HOSTILE}
    for found in record["comparisons"]:
        found |= {"what": HOSTILE, "first": HOSTILE, "second": HOSTILE}
    for found in record["links"]:
        found |= {"operation": HOSTILE, "backend": HOSTILE, "reason": HOSTILE if not found["sizes"] else None}
    return record


def empty_scale() -> Table:
    return {**scale(), "points": [], "comparisons": [], "links": [], "drift": None, "finished": None}
