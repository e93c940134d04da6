"""How fast an H200 trains two models, put together from what was measured there: the truth of a rehearsal.

A step is the sum of its parts, as profiles of single recipes and steps of ladders show them (`results/`). What was measured
only as two speeds (docs/negative-results.md) is here as the milliseconds between them. Nothing comes from the planner: a search
that follows it must be able to go wrong. What nobody measured is said so (`GUESSED`), and does not gain.

Units: milliseconds of a row (one sequence) unless a name says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rush.recipe import Recipe

RESULTS = Path(__file__).parents[2] / "results"
HALF = {"amp_bf16", "amp_fp16", "bf16_master", "pure_bf16"}
KERNELS = ("flash_attention", "cudnn_attention", "flex_attention", "triton_attention")
GUESSED = 1.02
"""What a kernel of ours takes of the time of the compiler's, where nobody measured the two beside each other."""


@cache
def rungs(folder: str) -> dict[str, dict[str, Any]]:
    return {
        rung["name"]: rung for rung in json.loads((RESULTS / folder / "ladder.json").read_text())["rungs"]
    }


@cache
def workloads() -> dict[str, Any]:
    records = [
        json.loads((RESULTS / folder / "models.json").read_text())
        for folder in ("models-h200", "models-fp8-h200")
    ]
    return {"machine": records[0], **{row["name"]: row for record in records for row in record["workloads"]}}


def fast(model: str) -> dict[str, Any]:
    """The hand-made recipe as it was measured."""
    rung: dict[str, Any] = workloads()[model]["ours"][0]["rung"]
    return rung


def eight_bits() -> dict[str, Any]:
    """The blocks, with the MLP in kernels of ours."""
    rungs = {ours["rung"]["name"]: ours["rung"] for ours in workloads()["llama-3.2-1b-fp8"]["ours"]}
    rung: dict[str, Any] = rungs["llama-3.2-1b-fp8"]
    return rung


def row_ms(rung: Mapping[str, Any], *parts: str) -> float:
    """Of a profile."""
    return float(sum(rung["breakdown_ms"][part] for part in parts) / rung["micro"])


def step_ms(rung: Mapping[str, Any]) -> float:
    return float(1000 * rung["micro"] * rung["sequence"] / rung["tokens_per_s"]["median"])


@dataclass(frozen=True)
class Step:
    """Of one recipe."""

    row: float
    """Milliseconds of a row on the device."""
    a_pass: float
    """Of each pass besides."""
    host_pass: float
    """What the host needs to launch one."""
    update: float
    """Of a step, with what the host makes the device wait."""
    gib_row: float
    gib: float


def tokens_per_s(recipe: Recipe, step_tokens: int | None = None) -> float:
    """The truth."""
    step, sequence = step_of(recipe), recipe.batch.sequence
    passes = (step_tokens or recipe.step_tokens) / (recipe.micro * sequence)
    one = max(recipe.micro * step.row + step.a_pass, step.host_pass)
    return 1000 * (step_tokens or recipe.step_tokens) / (passes * one + step.update)


def memory_gib(recipe: Recipe) -> float:
    step = step_of(recipe)
    return step.gib + recipe.micro * step.gib_row


def step_of(recipe: Recipe) -> Step:
    uses = dict(recipe.technique_uses())
    if uses.get("fp8", {}).get("scope") == "head":
        del uses["fp8"]  # never measured, and so no faster
    parts = _gpt2(uses) if recipe.model.name == "gpt2-124m" else _llama(uses)
    return _again(parts, uses)


def _gpt2(uses: Mapping[str, Any]) -> Step:
    ladder, best = rungs("gpt2-124m-ladder-h200"), fast("gpt2-124m")
    left_out, baseline = rungs("gpt2-124m-ladder-h200/left_out"), workloads()["gpt2-124m"]["rival"]
    compiled, pure, kernel = "compile" in uses, "pure_bf16" in uses, _kernel(uses)
    top = left_out["all"]
    if not HALF & set(uses):
        name = "tf32" if "tf32" in uses else "base"
        row = row_ms(ladder[name], "attention", "matmul", "norm_elementwise", "loss")
        row /= (
            rungs("gpt2-124m-ladder-h200/alone")["compile(scope=block)"]["gain"]["ratio"] if compiled else 1
        )
        return Step(row, 0.5, 28.0, sum(_update(uses, 3.8, 1.3)), 1.68, 1.85)
    blocks = row_ms(best, "matmul")
    attention = {
        "flash_attention": row_ms(baseline, "attention"),
        "cudnn_attention": row_ms(best, "attention"),
        "triton_attention": row_ms(best, "attention") + 0.01 * step_ms(best) / 64,
        "flex_attention": row_ms(ladder["flex_attention"], "attention"),
        # Compiled: as much more as leaving cuDNN's kernel out cost.
        "": row_ms(top, "attention") + (step_ms(left_out["without cudnn_attention"]) - step_ms(top)) / 64
        if compiled
        else row_ms(ladder["amp_bf16"], "attention"),
    }[kernel]
    padded, whole = "vocab_pad" in uses, compiled and uses["compile"].get("scope", "model") == "model"
    odd = (step_ms(left_out["without vocab_pad"]) - step_ms(top)) / 64
    if "fused_loss" in uses:
        head = row_ms(best, "loss") + {16384: 0.0, 8192: 0.2, 4096: 0.9}.get(_chunk(uses), 0.9) / 64
    elif compiled:
        head = row_ms(baseline if whole else top, "matmul", "loss") - blocks + (0.0 if padded else odd)
    else:
        source = left_out["without compile(scope=block)"] if padded else ladder["fused_adamw"]
        head = row_ms(source, "matmul", "loss") - blocks
    if "chunked_loss" in uses:
        head += (step_ms(ladder["chunked_loss(chunk_tokens=4096)"]) - step_ms(ladder["loader_workers"])) / 16
    between = row_ms(baseline if compiled else ladder["fused_adamw"], "norm_elementwise")
    if compiled and pure:
        between *= row_ms(ladder["pure_bf16"], "norm_elementwise") / row_ms(top, "norm_elementwise")
    if "fused_bias" in uses:
        # The fast recipe has it; with it and one graph 550k tokens/s became 566k, a kernel of it then 1.7 ms faster.
        between = row_ms(best, "norm_elementwise") if compiled and pure else 0.76 * between
    between *= GUESSED ** len({"fused_norm", "fused_mlp"} & set(uses)) if compiled else 1.0
    if "fp8" in uses:  # never measured: 768 columns, products half as long, casts as many as of Llama's width
        blocks, between = 0.62 * blocks, between + 0.38 * blocks
    if "amp_fp16" in uses:
        blocks *= row_ms(ladder["amp_fp16"], "matmul") / row_ms(ladder["amp_bf16"], "matmul")
    row = attention + blocks + head + between
    host = (30.0 if not whole else 12.0) if compiled else 28.0
    if "cuda_graph" in uses:
        host, row = 3.0, row + 1.6 / 64  # the fast recipe: 552k tokens/s without, 544k with
    device = row_ms(best, "attention", "matmul", "loss", "norm_elementwise")
    idle = step_ms(best) - 64 * device - best["breakdown_ms"]["optimizer"]
    gib_row = 0.31 if "fused_loss" in uses else 0.42 if padded else 0.57
    gib_row = gib_row if compiled else 0.88 if kernel else 1.68
    update, wait = _update(uses, 3.8, 1.4)
    return Step(row, 0.5, host, update + wait + idle - 0.5, gib_row, 1.0 if pure else 1.85)


def _llama(uses: Mapping[str, Any]) -> Step:
    ladder, best = rungs("llama-3.2-1b-h200"), fast("llama-3.2-1b")
    compiled, pure, kernel = "compile" in uses, "pure_bf16" in uses, _kernel(uses)
    if not HALF & set(uses):
        name = "tf32" if "tf32" in uses else "base"
        row = row_ms(ladder[name], "attention", "matmul", "norm_elementwise", "loss")
        return Step(row - (12.0 if compiled else 0.0), 0.5, 58.0, sum(_update(uses, 28.0, 14.0)), 14.6, 18.4)
    # A step that is timed is longer than the sum of its profile: all of it runs hotter.
    parts = ("attention", "matmul", "loss", "norm_elementwise")
    idle = 5.0
    hot = (step_ms(best) - idle) / (16 * row_ms(best, *parts) + best["breakdown_ms"]["optimizer"])
    blocks, between = row_ms(best, "matmul"), row_ms(best, "norm_elementwise")
    attention = {
        "flash_attention": row_ms(ladder["batch.micro=8"], "attention"),
        "cudnn_attention": row_ms(best, "attention"),
        "triton_attention": 1.1 * row_ms(best, "attention"),
        "flex_attention": row_ms(ladder["flex_attention"], "attention"),
        "": row_ms(ladder["amp_bf16"], "attention"),
    }[kernel]
    grouped = kernel == "triton_attention" or uses.get("cudnn_attention", {}).get("heads") == "grouped"
    a_pass = 0.5
    if compiled:
        # Grouped heads: 70.2k tokens/s became 70.9k.
        between += 0.0 if grouped else 32_768 * (1000 / 70_200 - 1000 / 70_900) / 16
        if not pure:
            amp, far = ladder["cudnn_attention"], ladder["batch.micro=32"]
            extra = (row_ms(far, "norm_elementwise") * 32 - row_ms(amp, "norm_elementwise") * 8) / 24
            between += extra - row_ms(ladder["pure_bf16"], "norm_elementwise")
            a_pass += 4.2  # weights are cast
        between *= GUESSED ** len({"fused_norm", "fused_mlp", "fused_rope", "liger"} & set(uses))
    else:
        between = row_ms(ladder["fused_adamw"], "norm_elementwise")
        for name, less in (("fused_norm", 5.0), ("fused_rope", 3.0), ("fused_mlp", 2.0), ("liger", 9.0)):
            between -= less if name in uses else 0.0
    if "fp8" in uses:
        joined, eight = "fused_projections" in uses, eight_bits()
        far = ladder["fp8"]
        blocks = row_ms(eight, "matmul") if joined else row_ms(far, "matmul") - row_ms(best, "loss")
        casts = row_ms(eight, "norm_elementwise") - row_ms(best, "norm_elementwise")
        between += casts * (1.0 if compiled else 2.0)
        if uses["fp8"].get("mlp") != "kernel":  # 88.1k tokens/s before that kernel
            between += 32_768 * (1000 / 88_149 - 1000 / eight["tokens_per_s"]["median"]) / 16
        elif uses["fp8"].get("fast") != "all":  # with it 92.8k became 95.2k
            between += 32_768 * (1000 / 92_800 - 1000 / 95_200) / 16
    elif "fused_projections" in uses:
        between += 32_768 * (1000 / 69_200 - 1000 / 70_100) / 16
    if "amp_fp16" in uses:
        blocks *= row_ms(ladder["amp_fp16"], "matmul") / row_ms(ladder["amp_bf16"], "matmul")
    row = attention + blocks + between + _llama_head(uses, compiled)
    host = (37.0 if uses["compile"].get("scope") == "block" else 20.0) if compiled else 58.0
    host = 3.0 if "cuda_graph" in uses else host
    gib_row = 2.47 if "fused_loss" in uses else 2.9
    gib_row = (gib_row if compiled else 6.3 if kernel else 14.6) * (0.77 if "fp8" in uses else 1.0)
    update, wait = _update(uses, 28.0, 14.0)
    return Step(hot * row, hot * a_pass, host, hot * update + wait + idle, gib_row, 9.2 if pure else 20.7)


def _llama_head(uses: Mapping[str, Any], compiled: bool) -> float:
    """By itself, 32,768 tokens: 80.4 ms in chunks of 16,384, 82.6 of 2,048; compiled full logits 82.2 before the kernel's gradient
    in place became 2.4 ms faster."""
    ladder, head = rungs("llama-3.2-1b-h200"), row_ms(fast("llama-3.2-1b"), "loss")
    if "fused_loss" in uses:
        return head + {16384: 0.0, 8192: 0.5}.get(_chunk(uses), 2.2) / 16
    full = head + 4.6 / 16
    if not compiled:
        full += row_ms(ladder["cuda_graph"], "matmul", "loss") - row_ms(
            ladder["compile(scope=block)"], "matmul", "loss"
        )
    if "chunked_loss" in uses:
        full += (step_ms(ladder["chunked_loss(chunk_tokens=4096)"]) - step_ms(ladder["cudnn_attention"])) / 8
    return full


def _kernel(uses: Mapping[str, Any]) -> str:
    return next((name for name in KERNELS if name in uses), "")


def _chunk(uses: Mapping[str, Any]) -> int:
    return int(uses["fused_loss"].get("chunk_tokens", 0))


def _update(uses: Mapping[str, Any], plain: float, fused: float) -> tuple[float, float]:
    """Milliseconds on the device, and those that the device waits: 17 where many small operations are launched (GPT-2's step
    without the fused update)."""
    share = 0.66 if "pure_bf16" in uses else 1.0
    if "fused_update" in uses:
        return fused * 0.37 if uses["fused_update"].get("state") == "bfloat16" else fused * share, 0.0
    if "fused_adamw" in uses:
        return fused * share, 0.0
    if "adam8bit" in uses:
        ours = uses["adam8bit"].get("backend") == "rush"
        return (fused * 0.6, 0.0) if ours else (1.3 * plain, 17.0)
    return plain * share, 17.0


def _again(step: Step, uses: Mapping[str, Any]) -> Step:
    """What saves memory, as it did on the ladders; what the host does besides."""
    ladder = rungs("llama-3.2-1b-h200")
    row, gib_row = step.row, step.gib_row
    for name, kept in (
        ("checkpoint_selective", 0.6),
        ("checkpoint_full", 0.12),
        ("offload_activations", 0.8),
    ):
        if name in uses:
            row, gib_row = row / ladder[name]["gain"]["ratio"], kept * gib_row
    if "loader_workers" not in uses:
        row *= 1.002
    return Step(row, step.a_pass, step.host_pass, step.update, gib_row, step.gib)
