"""Made-up ladders to draw in tests. NOT MEASUREMENTS: every number here is invented.

The shape is that of a real `ladder.json`, with every status, a batch curve, interactions and raw samples.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

Table = dict[str, Any]

HOSTILE = "</script><img src=x onerror=alert(1)>\"'`{{7*7}}&lt;"
PLAIN = "made-up plain"

_FLOPS_PER_TOKEN = 7.8e9
_PEAK, _CEILING = 989.4e12, 742e12

# name, title, what it adds, tokens/s, GiB, micro, parity class, worst difference, claim
_STEPS: list[tuple[str, str, Any, float, float, int, str, float, Table | None]] = [
    ("plain", "Plain fp32", [], 5_120, 25.1, 1, "EXACT", 0.0, None),
    ("tf32", "TF32 matmuls", ["tf32"], 14_350, 25.1, 1, "CLOSE", 4e-5, {"metric": "matmul rate", "gain": 7.0, "regime": "fp32 matmuls on an A100", "source": "invented for this test"}),
    ("amp_bf16", "Mixed precision bf16", ["amp_bf16"], 19_800, 22.4, 1, "CLOSE", 8e-4, {"metric": "tokens_per_s", "gain": 2.5, "regime": "1B model, sequence 2048, batch 1, one A100", "source": "invented for this test"}),
    ("flash_attention", "FlashAttention", ["flash_attention"], 27_700, 20.2, 1, "CLOSE", 9e-4, {"metric": "tokens_per_s", "gain": 0.75, "regime": "after mixed precision, one A100", "source": "invented for this test"}),
    ("fused_adamw", "Fused AdamW", ["fused_adamw"], 33_900, 20.2, 1, "CLOSE", 9e-4, {"metric": "tokens_per_s", "gain": 0.10, "regime": "after FlashAttention, one A100", "source": "invented for this test"}),
    ("compile", "torch.compile", [{"name": "compile", "mode": "default"}], 42_100, 18.8, 1, "CLOSE", 1.1e-3, {"metric": "tokens_per_s", "gain": 0.20, "regime": "after fused AdamW, one A100", "source": "invented for this test"}),
    ("batch-8", "Batch of 8 rows", {"batch.micro": 8, "batch.total_tokens": 16384}, 71_400, 61.7, 8, "CLOSE", 1.0e-3, {"metric": "tokens_per_s", "gain": 0.67, "regime": "batch 1 to 8, one A100", "source": "invented for this test"}),
    ("chunked_loss", "Chunked loss", ["chunked_loss"], 70_900, 44.0, 8, "CLOSE", 1.0e-3, {"metric": "peak_memory_bytes", "gain": -0.4, "regime": "vocabulary 128k", "source": "invented for this test"}),
    ("pin_memory", "Pinned memory", ["pin_memory"], 71_050, 44.0, 8, "EXACT", 0.0, {"metric": "tokens_per_s", "gain": 0.03, "regime": "when copies to the device are waited for", "source": "invented for this test"}),
    ("pure_bf16", "Pure bf16 weights", ["pure_bf16"], 83_600, 27.3, 8, "STATISTICAL", 0.21, {"metric": "model state bytes", "gain": -0.5, "regime": "two bytes instead of four", "source": "invented for this test"}),
    ("checkpoint_full", "Full checkpointing", ["checkpoint_full"], 55_300, 21.5, 8, "EXACT", 0.0, {"metric": "tokens_per_s", "gain": -0.25, "regime": "one more forward pass", "source": "invented for this test"}),
]  # fmt: skip

_VERDICTS = {
    "plain": "baseline",
    "chunked_loss": "equal and smaller",
    "pin_memory": "no gain",
    "pure_bf16": "faster but different",
    "checkpoint_full": "slower",
}

_FAILED = [
    ("cuda_graph", "CUDA graph", "no_effect", "No graph replay was seen in the profile: the step ran eagerly."),
    ("adam8bit", "8-bit Adam", "unsupported", "It needs torchao or bitsandbytes, and neither is installed."),
    ("batch-64", "Batch of 64 rows", "out_of_memory", "The device ran out of memory: 139.8 GiB are there, 4.2 GiB more were asked for."),
    ("amp_fp16", "Mixed precision fp16", "diverged", "The loss stopped being a finite number at step 14."),
    ("flex_attention", "FlexAttention", "crashed", "The process died with signal 11."),
    ("offload_activations", "Offloaded activations", "timed_out", "It was stopped after 300 s without a steady step."),
]  # fmt: skip


def made_up_ladder(seed: int = 1, speed_factor: float = 1.0) -> Table:
    """A full ladder of invented numbers: every status, every section."""
    draw = random.Random(seed)
    rungs: list[Table] = []
    for name, title, adds, speed, memory, micro, promise, worst, claim in _STEPS:
        rungs.append(
            _ok_rung(
                draw, rungs, name, title, adds, speed * speed_factor, memory, micro, promise, worst, claim
            )
        )
    for name, title, status, reason in _FAILED:
        rungs.append(_failed_rung(draw, rungs, name, title, status, reason))
    return {
        "format": 1,
        "name": "made-up 1B (test data, not a measurement)",
        "view": "cumulative",
        "started": "2026-01-02T09:00:00+00:00",
        "finished": "2026-01-02T09:47:12+00:00",
        "machine": made_up_machine(),
        "ceilings": {
            "matmul": {"float32": 51.2e12, "tf32": 392e12, "bfloat16": _CEILING, "float16": 731e12},
            "copy_bytes_per_s": 4.02e12,
            "transfers_bytes_per_s": {"to_device_pinned": 55.1e9, "to_device": 11.3e9},
            "collectives": [],
            "measured_at": "2026-01-02T08:59:00+00:00",
        },
        "peaks": {"float32": 67e12, "tf32": 494.7e12, "bfloat16": _PEAK, "float16": _PEAK},
        "base": {"recipe": _recipe([], 1), "digest": "0" * 64},
        "formulas": {
            "flops_per_token": "6·(matmul parameters) + 6·layers·hidden·sequence",
            "mfu": "flops_per_token · tokens_per_s / datasheet dense peak of the dtype",
            "hfu": "as mfu, with the recomputed forward passes counted",
            "ceiling_fraction": "flops_per_token · tokens_per_s / matmul rate measured here",
        },
        "rungs": rungs,
        "drift": {"first": 5120.0, "again": 5131.0, "ratio": 1.002, "ci95": [0.997, 1.006], "flagged": False},
        "batch_curve": _batch_curve(draw),
        "batch_stops_paying_at": 16,
        "sequence_limits": [
            {"techniques": ["amp_bf16"], "longest": 8192, "ended_by": "memory", "peak_memory_bytes": (131 * 2**30),
             "tried": [{"sequence": 8192, "status": "ok"}, {"sequence": 9216, "status": "out_of_memory"}]},
            {"techniques": ["amp_bf16", "flash_attention"], "longest": 65536, "peak_memory_bytes": (128 * 2**30)},
        ],
        "interactions": [
            {"technique": "flash_attention", "alone": 1.12, "in_ladder": 1.40, "left_out": 1.63, "sentence": "FlashAttention alone gains 12 %; with bf16 matmuls out of the way attention is what is left, and it gains 40 %."},
            {"technique": "fused_adamw", "alone": 1.03, "in_ladder": 1.22, "left_out": None, "sentence": None},
        ],
    }  # fmt: skip


def made_up_machine() -> Table:
    return {
        "device": "cuda",
        "devices": [{"name": "Made-up GPU 9000", "memory_bytes": 150_000_000_000, "capability": [9, 0], "num_multiprocessors": 132, "num_nvlinks": 0}],
        "links": [],
        "cpu": {"model": "Made-up CPU", "num_cores": 16, "num_threads": 16, "features": ["avx2", "avx512f", "amx_bf16"]},
        "ram_bytes": 137_438_953_472,
        "os": "Linux 6.1",
        "python": "3.12.3",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "cuda": "13.0",
        "hip": None,
        "driver": "580.1",
    }  # fmt: skip


def one_rung() -> Table:
    """The poorest ladder that can be: one rung, no ceilings, no parity, not finished."""
    full = made_up_ladder()
    rung = {**full["rungs"][0], "parity": None, "mfu": None, "hfu": None, "breakdown_ms": None, "claim": None}
    empty = {"ceilings": None, "peaks": None, "drift": None, "batch_curve": None, "batch_stops_paying_at": None,
             "sequence_limits": None, "interactions": None, "finished": None}  # fmt: skip
    return {**full, **empty, "rungs": [rung]}


def sixty_rungs() -> Table:
    full = made_up_ladder()
    rungs = []
    for at in range(60):
        rung = dict(full["rungs"][at % len(full["rungs"])])
        rungs.append({**rung, "name": f"{rung['name']}-{at}", "title": f"{rung['title']} {at}"})
    return {**full, "rungs": rungs}


def hostile_ladder() -> Table:
    """The full ladder with an attack in every string and every free key."""
    return _poisoned(made_up_ladder())


def write(folder: Path, ladder: Table) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ladder.json"
    path.write_text(json.dumps(ladder, allow_nan=False), encoding="utf-8")
    return path


_CONTROL = {"format", "view", "status", "verdict", "started", "finished", "device"}
_FREE_KEYS = {"formulas", "breakdown_ms", "tokens_kind", "matmul", "peaks", "environment", "machine"}


def _poisoned(value: Any, key: str = "") -> Any:
    """Attacks everywhere, but for the words that decide which sections are drawn."""
    if isinstance(value, dict):
        poison = {f"{HOSTILE} {key}": 1.0} if key in _FREE_KEYS else {}
        return {name: _poisoned(part, name) for name, part in value.items()} | poison
    if isinstance(value, list):
        return [_poisoned(part, key) for part in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) and key not in _CONTROL else value


def _measure(draw: random.Random, center: float, processes: int = 2, each: int = 12) -> Table:
    rows = [[center * draw.gauss(1, 0.006) for _ in range(each)] for _ in range(processes)]
    samples = [value for row in rows for value in row]
    median = statistics.median(samples)
    half = 1.96 * statistics.stdev(samples) / math.sqrt(len(samples)) * 1.25
    return {"median": median, "ci95": [median - half, median + half], "n": len(samples), "samples": samples,
            "processes": rows}  # fmt: skip


def _ok_rung(
    draw: random.Random,
    before: list[Table],
    name: str,
    title: str,
    adds: Any,
    speed: float,
    memory: float,
    micro: int,
    promise: str,
    worst: float,
    claim: Table | None,
) -> Table:
    measured = _measure(draw, speed)
    step_tokens = 2048 * micro
    step_ms = step_tokens / measured["median"] * 1000
    used = [item for rung in before for item in (rung["adds"] if isinstance(rung["adds"], list) else [])]
    used += adds if isinstance(adds, list) else []
    over = before[-1] if before else None
    ratio = measured["median"] / over["tokens_per_s"]["median"] if over else 1.0
    total = measured["median"] / before[0]["tokens_per_s"]["median"] if before else 1.0
    real = not ratio * 0.994 <= 1 <= ratio * 1.006
    achieved = _FLOPS_PER_TOKEN * measured["median"]
    return {
        "name": name, "title": title, "adds": adds, "techniques": used, "recipe": _recipe(used, micro),
        "digest": f"{abs(hash_of(name)):064x}"[:64], "status": "ok", "reason": None,
        "tokens_per_s": measured,
        "step_ms": {"median": step_ms, "ci95": [step_ms * 0.995, step_ms * 1.005], "n": 24,
                    "samples": [step_tokens / v * 1000 for v in measured["samples"]]},
        "tokens_kind": {"processed": measured["median"], "real": measured["median"], "trained": measured["median"] * 0.999},
        "mfu": achieved / _PEAK, "hfu": achieved / _PEAK * (1.3 if name == "checkpoint_full" else 1.0),
        "ceiling_fraction": achieved / _CEILING, "flops_per_token": _FLOPS_PER_TOKEN,
        "step_tokens": step_tokens, "micro": micro, "sequence": 2048,
        "peak_memory_bytes": int(memory * 2**30), "compile_s": 41.2 if "compile" in str(used) else 0.0,
        "warmup_s": 6.4, "warmup_steps": 12, "data_wait_ms": 0.4,
        "evidence": [{"technique": str(item), "took_effect": True, "what": "its kernel ran 32 times in the profiled step"} for item in (adds if isinstance(adds, list) else [])],
        "parity": _parity(draw, promise, worst),
        "gain": {"over": over["name"], "ratio": ratio, "ci95": [ratio * 0.994, ratio * 1.006], "real": real} if over else None,
        "total_gain": {"ratio": total, "ci95": [total * 0.992, total * 1.008]} if over else None,
        "claim": claim, "verdict": _VERDICTS.get(name, "equal and faster"),
        "breakdown_ms": _breakdown(name, len(before), step_ms),
        "longest": [
            {"name": "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "kind": "matmul", "ms": step_ms * 0.2, "calls": 96.0},
            {"name": "triton_per_fused_native_layer_norm_3", "kind": "norm_elementwise", "ms": step_ms * 0.05, "calls": 32.5},
        ],
        "environment": {"clock_mhz": 1980, "temperature_c": 52 + len(before), "throttle": [], "foreign_processes": 0, "load": 1.2},
    }  # fmt: skip


def _failed_rung(
    draw: random.Random, before: list[Table], name: str, title: str, status: str, reason: str
) -> Table:
    measured = _measure(draw, 70_800.0) if status == "no_effect" else None
    empty = ("step_ms", "tokens_kind", "mfu", "hfu", "ceiling_fraction", "compile_s", "warmup_s", "warmup_steps",
             "data_wait_ms", "parity", "gain", "total_gain", "claim", "breakdown_ms", "longest")  # fmt: skip
    return dict.fromkeys(empty) | {
        "name": name, "title": title, "adds": [name], "techniques": [name], "recipe": _recipe([name], 8),
        "digest": f"{abs(hash_of(name)):064x}"[:64], "status": status, "reason": reason,
        "tokens_per_s": measured, "flops_per_token": _FLOPS_PER_TOKEN, "step_tokens": 16384, "micro": 8, "sequence": 2048,
        "peak_memory_bytes": (44 * 2**30) if measured else None,
        "evidence": [{"technique": name, "took_effect": False, "what": "no trace in the profile"}] if measured else [],
        "verdict": status.replace("_", " "), "environment": {},
    }  # fmt: skip


def _parity(draw: random.Random, promise: str, worst: float) -> Table:
    reference = [7.0 * math.exp(-step / 18) + 3.6 + draw.gauss(0, 0.04) for step in range(40)]
    losses = [
        value + worst * math.sin(step / 3) * (step / 40) * 4 + draw.gauss(0, worst / 3)
        for step, value in enumerate(reference)
    ]
    norms = [2.5 * math.exp(-step / 25) + 0.8 for step in range(40)]
    equal = worst < 0.05
    return {
        "verdict": "equal" if equal else "different",
        "class": promise,
        "tolerance": 0.02,
        "worst": max(abs(a - b) for a, b in zip(losses, reference, strict=True)),
        "steps": 40,
        "losses": losses,
        "reference_losses": reference,
        "grad_norms": [value * (1 + worst / 5) for value in norms],
        "reference_grad_norms": norms,
        "worst_tensor": {"name": "blocks.3.mlp.down.weight", "relative_error": worst / 4},
        "why": "Every loss lies within the tolerance of its class."
        if equal
        else "The losses part after step 12.",
    }


def _breakdown(name: str, depth: int, step_ms: float) -> Table:
    attention = 0.34 if depth < 3 else 0.12
    shares = {
        "attention": attention,
        "matmul": 0.30 + 0.04 * depth,
        "norm_elementwise": 0.16 if depth < 5 else 0.07,
        "loss": 0.06,
        "optimizer": 0.15 if depth < 4 else 0.05,
        "data": 0.004,
        "other": 0.02,
    }
    total = sum(shares.values())
    idle = max(0.02, 0.12 - 0.012 * depth)
    return {kind: share / total * (1 - idle) * step_ms for kind, share in shares.items()} | {
        "idle": idle * step_ms
    }


def _batch_curve(draw: random.Random) -> list[Table]:
    points = []
    for micro in (1, 2, 4, 8, 16, 32):
        speed = 82_000 * (1 - math.exp(-micro / 4.5)) + 30_000 * math.exp(-micro / 2)
        points.append(
            {
                "micro": micro,
                "tokens_per_s": _measure(draw, speed),
                "peak_memory_bytes": int((14 + 3.7 * micro) * 2**30),
                "status": "ok",
            }
        )
    points.append({"micro": 64, "tokens_per_s": None, "peak_memory_bytes": None, "status": "out_of_memory"})
    return points


def _recipe(techniques: list[Any], micro: int) -> str:
    names = [
        f'"{item}"' if isinstance(item, str) else '{ name = "compile", mode = "default" }'
        for item in techniques
    ]
    listed = "".join(f"  {name},\n" for name in names)
    return (
        f'# made-up test recipe\n[model]\nname = "llama-3.2-1b"\n\n[batch]\nmicro = {micro}\nsequence = 2048\n'
        f"total_tokens = {micro * 2048}\n\n[optimizer]\nlr = 3e-4\n\ntechniques = [\n{listed}]\n"
    )  # fmt: skip


def hash_of(name: str) -> int:
    """A stand-in for a digest that is the same in every process."""
    return sum((at + 1) * ord(letter) ** 7 for at, letter in enumerate(name))


def odd_ladder() -> Table:
    """Numbers and names of odd sizes: huge, tiny, very long, right to left."""
    full = made_up_ladder()
    long_word = "averylongtechniquename" * 8
    for at, rung in enumerate(full["rungs"]):
        rung["title"] = (long_word, "אופטימיזציה \u202etxet", "短い名前", "a b " * 60)[at % 4]
        rung["reason"] = long_word if rung["reason"] else None
        if rung["tokens_per_s"]:
            factor = (1e-12, 1.0, 1e250, 1e6)[at % 4]
            rung["tokens_per_s"] = _measure(random.Random(at), 3.21 * factor)
            rung["peak_memory_bytes"] = (1, 10**6, 10**24, 10**200)[at % 4]
    return {**full, "name": long_word, "drift": {**full["drift"], "flagged": True}}
