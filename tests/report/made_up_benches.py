"""Made-up benches to draw in tests. NOT MEASUREMENTS: every number here is invented."""

from __future__ import annotations

from typing import Any

from tests.report.made_up import HOSTILE

Table = dict[str, Any]

MACHINE = {"device": "cuda", "devices": [{"name": "Made-up GPU", "memory_bytes": 80 * 2**30}], "torch": "2.0"}
CONTENDERS = (
    ("rush", "ours", 1.0),
    ("plain torch", "plain", 3.1),
    ("compiled torch", "compiled", 1.2),
    ("Liger", "baseline", 1.1),
)


def timed(milliseconds: float) -> Table:
    samples = [milliseconds * factor for factor in (0.98, 1.0, 1.01, 1.03)]
    return {"median": milliseconds, "ci95": [samples[0], samples[-1]], "n": 4, "samples": samples}


def row(contender: str, kind: str, columns: int, step: str, slower: float, series: str = "") -> Table:
    moved = 5 * 16384 * columns * 2.0
    milliseconds = slower * moved / 4e12 * 1000 / 0.9
    return {
        "size": f"16k × {columns}",
        "dims": {"rows": 16384, "columns": columns},
        "series": series,
        "contender": contender,
        "kind": kind,
        "step": step,
        "status": "ok",
        "reason": None,
        "time_ms": timed(milliseconds),
        "bytes": moved,
        "flops": 0.0,
        "bytes_per_s": moved / milliseconds * 1000,
        "flops_per_s": None,
        "ceiling_fraction": moved / milliseconds * 1000 / 4e12,
        "peak_extra_bytes": 3 * 2**26,
        "beyond_results_bytes": 2**20,
        "correctness": {
            "verdict": "equal",
            "error": 1.6e-3,
            "allowed": 3e-3,
            "worst": "the result",
            "why": "fine",
        },
        "first_call_s": 1.5,
    }


def untimed(found: Table, status: str, reason: str) -> Table:
    nothing = dict.fromkeys(("time_ms", "bytes_per_s", "flops_per_s", "ceiling_fraction", "peak_extra_bytes",
                             "beyond_results_bytes", "correctness"))  # fmt: skip
    return {**found, **nothing, "status": status, "reason": reason}


def op(name: str) -> Table:
    rows = [
        row(who, kind, columns, step, slower)
        for columns in (2048, 4096, 8192)
        for who, kind, slower in CONTENDERS
        for step in ("forward", "both")
    ]
    rows += [
        untimed(row("flash-attn", "baseline", 2048, "both", 1.0), "absent", "flash_attn is not installed")
    ]
    rows += [
        untimed(row("broken", "baseline", 2048, "both", 1.0), "out_of_memory", "OutOfMemoryError: 20 GiB")
    ]
    target = {"metric": "speed", "step": "both", "at_least": 1.0, "at_most": None, "size": "16k × 2048", "why": None,
              "what": "at least 1× as fast as Liger"}  # fmt: skip
    targets = [
        {**target, "reached": 1.1, "ci95": [1.05, 1.15], "verdict": "reached"},
        {**target, "reached": 0.97, "ci95": [0.95, 0.99], "verdict": "missed"},
        {**target, "reached": None, "ci95": None, "verdict": "not measured", "why": "Liger: not installed"},
        {**target, "metric": "ceiling", "at_least": 0.85, "what": "at least 85 % of the measured ceiling", "reached": 0.9, "ci95": None,
         "verdict": "reached"},
    ]  # fmt: skip
    return {"op": name, "key": "k", "about": "Scales each row.", "bound": "memory", "axis": "columns", "dtype": "bfloat16",
            "status": "ok", "reason": None, "complete": True, "seconds": 2.0, "rows": rows, "targets": targets}  # fmt: skip


def kernels() -> Table:
    lost = {
        **op("gelu"),
        "status": "crashed",
        "reason": "the process died of SIGSEGV",
        "rows": [],
        "targets": [],
    }
    wrong = op("rope")
    wrong["rows"][2]["correctness"] = {
        **wrong["rows"][2]["correctness"],
        "verdict": "different",
        "error": 0.3,
    }
    return {
        "format": 1,
        "started": "2026-11-15T02:44:00+00:00",
        "finished": "2026-11-15T02:47:00+00:00",
        "quick": False,
        "interpreted": False,
        "machine": MACHINE,
        "ceilings": {"copy_bytes_per_s": 4e12, "matmul": {"bfloat16": 7.7e14, "float8": None}},
        "packages": {"triton": "3.6"},
        "environment": {},
        "formulas": {"ci95": "bootstrap"},
        "ops": [op("rmsnorm"), wrong, lost],
    }


def interpreted_kernels() -> Table:
    """As on a machine without a GPU: ours is not timed, and one size is all there is."""
    record = kernels()
    rows = [found for found in op("swiglu")["rows"] if found["dims"]["columns"] == 2048]
    rows = [untimed(r, "untimed", "interpreted: not a speed") if r["kind"] == "ours" else r for r in rows]
    for found in rows:
        found["ceiling_fraction"] = None
    return {
        **record,
        "interpreted": True,
        "ceilings": None,
        "ops": [{**op("swiglu"), "rows": rows, "targets": []}],
    }


def hostile_kernels() -> Table:
    record = kernels()
    for found in record["ops"]:
        found |= {"op": HOSTILE, "about": HOSTILE, "reason": HOSTILE, "axis": "columns"}
        for line in found["rows"]:
            line |= {
                "size": HOSTILE + line["size"],
                "contender": HOSTILE + line["contender"],
                "series": HOSTILE,
            }
    record["formulas"] = {HOSTILE: HOSTILE}
    record["packages"] = {HOSTILE: HOSTILE}
    return record


def rung(name: str, speed: float | None, **rest: Any) -> Table:
    measured = None if speed is None else {"median": speed, "ci95": [speed * 0.99, speed * 1.01], "n": 4,
                                           "samples": [speed * 0.99, speed, speed, speed * 1.01]}  # fmt: skip
    return {"name": name, "title": name, "techniques": ["compile"], "recipe": "", "status": "ok" if speed else "crashed",
            "reason": None if speed else "it died", "verdict": "equal and faster" if speed else "crashed",
            "tokens_per_s": measured, "peak_memory_bytes": 40 * 2**30 if speed else None, "evidence": [],
            "parity": {"verdict": "equal", "steps": 10, "why": "within"}, **rest}  # fmt: skip


def models() -> Table:
    evidence = [{"technique": "compile", "took_effect": True, "what": "12 calls"}]
    reached = {"at_least": 1.2, "reached": 1.25, "ci95": [1.24, 1.26], "verdict": "reached", "why": None}
    missed = {
        "at_least": 1.35,
        "reached": 1.2,
        "ci95": [1.19, 1.21],
        "verdict": "missed",
        "why": "1.2× is less than 1.35×",
    }
    lost = {"at_least": 1.1, "reached": None, "ci95": None, "verdict": "not measured", "why": "it died"}
    return {
        "format": 1,
        "started": "2026-11-15T02:44:00+00:00",
        "finished": "2026-11-15T03:47:00+00:00",
        "machine": MACHINE,
        "ceilings": None,
        "peaks": None,
        "formulas": {"gain": "a quotient"},
        "workloads": [
            {"name": "gpt2-124m", "about": "GPT-2 124M, 64 × 1024 tokens a step", "micro": 64, "sequence": 1024,
             "rival_kind": "nanogpt", "rival_versions": {"transformers": "5"},
             "rival": rung("nanoGPT's setting", 545_000.0, parity=None),
             "ours": [{"rung": rung("gpt2-124m-fast", 681_250.0, evidence=evidence), "target": reached},
                      {"rung": rung("gpt2-124m-other", 654_000.0), "target": missed},
                      {"rung": rung("gpt2-124m-lost", None, parity=None), "target": lost}]},
        ],
    }  # fmt: skip


def finetuning() -> Table:
    """As fine-tuning records itself: a target of memory, a variant beside it, and lengths that were tried."""
    record = models()
    small = {"at_most": 0.9, "reached": 0.85, "verdict": "reached", "why": None}
    large = {"at_most": 0.9, "reached": 1.1, "verdict": "missed", "why": "1.100× is more than 0.9×"}
    fast = {"at_least": 1.15, "reached": 1.2, "ci95": [1.19, 1.21], "verdict": "reached", "why": None}
    against = {"verdict": "equal", "steps": 8, "why": "within", "against": "plain fp32 with lora"}
    fits = {"sequence": 150_528, "status": "ok", "reason": None, "tokens_per_s": 2100.0, "step_s": 71.7,
            "peak_memory_bytes": 77 * 10**9}  # fmt: skip
    lost = {**fits, "sequence": 158_720, "status": "out_of_memory", "reason": "memory ran out",
            "tokens_per_s": None, "step_s": None, "peak_memory_bytes": None}  # fmt: skip
    record["workloads"] = [
        {"name": "lora-8b", "about": "LoRA, 2 × 4096", "micro": 2, "sequence": 4096, "rival_kind": "transformers",
         "rival_versions": {"peft": "0.21"}, "rival_weights": "trained: 42 float32; frozen: 8 bfloat16",
         "rival": rung("PEFT", 12_900.0, parity=None),
         "ours": [{"rung": rung("lora", 15_480.0, parity=against), "target": {**fast, "memory": small}, "primary": True},
                  {"rung": rung("lora-other", 15_480.0), "target": {**fast, "memory": large}, "primary": False}],
         "took": [{"who": "PEFT", "wall_s": 41.0, "parts": {"build": 6.0, "timing": 20.0}}]},
        {"name": "qlora-8b-long", "about": "the longest context in 80 GB", "micro": 1, "sequence": 150_528,
         "longest": {"techniques": ["qlora"], "recipe": "", "limit_bytes": 80 * 10**9, "published": 342_733,
                     "source": "somebody", "found": fits, "fails_at": 158_720, "tried": [fits, lost]},
         "took": []},
    ]  # fmt: skip
    return record


def hostile_models() -> Table:
    record = models()
    workload = record["workloads"][0]
    workload |= {"name": HOSTILE, "about": HOSTILE, "rival_versions": {HOSTILE: HOSTILE}}
    workload["rival"]["title"] = HOSTILE
    for ours in workload["ours"]:
        ours["rung"] |= {"title": HOSTILE, "reason": HOSTILE, "techniques": [HOSTILE]}
        ours["target"]["why"] = HOSTILE
    return record
