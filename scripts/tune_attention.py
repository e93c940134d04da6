"""Try the ways to cut flash_attention's work that rush/kernels/flash_attention/tiles.py lists, against torch's own kernels.

python scripts/tune_attention.py [--out FILE] [--head-dims 64,128] [--lengths 1024,2048,4096,8192] [--group 1]

On a GPU, about a minute and a half: the kernels are compiled by all cores at once, then each is timed at every
length over 16,384 tokens of 2,048 numbers, causal, bf16. Rates are TFLOP/s of the least work (4·b·h·t²·d/2 forward,
2.5 times that backward), so what a kernel computes twice is not counted twice. The backward pass is two kernels:
their times add up, and the best two make its rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rush.kernels.flash_attention import triton as kernels
from rush.kernels.flash_attention.tiles import HOPPER, PARTS, Part, Tiles

TOKENS, WIDTH = 16384, 2048


def make(
    length: int, head_dim: int, group: int, batch: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and a gradient, as a model lays them out."""
    batch, heads = batch or TOKENS // length, WIDTH // head_dim
    generator = torch.Generator("cuda").manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(batch, length, count, head_dim, device="cuda", dtype=torch.bfloat16, generator=generator)
        .transpose(1, 2)
        .requires_grad_()
        for count in (heads, heads // group, heads // group, heads)
    )


def flops(length: int, part: str) -> float:
    forward = 4 * TOKENS * WIDTH * length / 2
    return forward * {"forward": 1.0, "backward": 2.5}[part]


def milliseconds(call: Callable[[], Any], repeats: int = 12) -> float:
    """The median over calls that wait in a queue behind each other, so that launching them costs the GPU no time."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in itertools.pairwise(marks))


def caller(
    part: Part, tiles: Tiles | None, tensors: tuple[Tensor, Tensor, Tensor, Tensor]
) -> Callable[[], Any]:
    """One part of our kernel, cut this way, as a function without arguments."""
    q, k, v, do = (tensor.detach() for tensor in tensors)
    scale = q.shape[-1] ** -0.5
    if part == "forward":
        return lambda: kernels.forward(q, k, v, None, None, True, scale, tiles)
    o, lse2 = kernels.forward(q, k, v, None, None, True, scale)
    if part == "dq":
        return lambda: kernels.backward_dq(do, q, k, v, o, lse2, None, None, True, scale, tiles)
    delta = (o.float() * do.float()).sum(-1).contiguous()
    return lambda: kernels.backward_dkdv(do, q, k, v, lse2, delta, None, None, True, scale, tiles)


def compile_one(part: Part, tiles: Tiles, head_dim: int, group: int) -> str:
    """In a process of its own: fill Triton's cache with this kernel. What went wrong, or nothing."""
    try:
        caller(part, tiles, make(1024, head_dim, group, batch=2))()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150] if str(error).strip() else ''}"
    return ""


def compile_all(jobs: list[tuple[Part, Tiles, int, int]]) -> dict[tuple[Part, Tiles, int, int], str]:
    workers = min(len(jobs), os.cpu_count() or 1, 12)
    for head_dim, group in {job[2:] for job in jobs}:
        # The backward kernels need what the forward kernel in use gives: it must not be compiled by every worker.
        caller("dq", None, make(1024, head_dim, group, batch=2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = {job: pool.submit(compile_one, *job) for job in jobs}
        problems = {}
        for job, future in futures.items():
            try:
                problems[job] = future.result()
            except Exception as error:  # a worker that died takes the pool with it
                problems[job] = f"worker: {error}"
        return problems


def rivals(tensors: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, dict[str, float]]:
    """Milliseconds of torch's flash and cuDNN operators, forward and backward."""
    q, k, v, do = tensors
    do = do.detach()
    aten = torch.ops.aten
    if q.shape[1] == k.shape[1]:
        wide_k, wide_v = k, v
    else:
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = (t.detach().repeat_interleave(group, 1).requires_grad_() for t in (k, v))
    calls: dict[str, Callable[[], Tensor]] = {
        "SDPA flash": lambda: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0],
        "cuDNN": lambda: aten._scaled_dot_product_cudnn_attention(q, wide_k, wide_v, None, True, 0.0, True)[
            0
        ],
    }
    found: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        leaves = [q, k, v] if name == "SDPA flash" else [q, wide_k, wide_v]
        try:
            o = call()
            found[name] = {
                "forward": milliseconds(call),
                "backward": milliseconds(
                    lambda o=o, leaves=leaves: torch.autograd.grad(o, leaves, do, retain_graph=True)  # type: ignore[misc]
                ),
            }
        except RuntimeError as error:
            say(f"{name} did not run: {str(error).splitlines()[0][:120]}")
    return found


def say(line: str = "") -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def table(head: str, lengths: list[int], rows: list[tuple[str, list[str]]]) -> None:
    say(f"\n{head:34}" + "".join(f"{length:>12}" for length in lengths))
    for name, cells in rows:
        say(f"{name:34}" + "".join(f"{cell:>12}" for cell in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tune_attention.json"))
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--lengths", default="1024,2048,4096,8192")
    parser.add_argument("--group", type=int, default=1, help="query heads that share a key/value head")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("There is no CUDA device here; nothing can be timed.\n")
        return 4
    head_dims = [int(word) for word in options.head_dims.split(",")]
    lengths = [int(word) for word in options.lengths.split(",")]
    jobs = [
        (part, tiles, head_dim, options.group)
        for head_dim in head_dims
        for part in PARTS
        for tiles in HOPPER[part, head_dim]
    ]
    problems = compile_all(jobs)
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {len(jobs)} kernels compiled")
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "group": options.group, "head_dims": {}}
    for head_dim in head_dims:
        record["head_dims"][head_dim] = measure(head_dim, lengths, options.group, problems)
        options.out.write_text(json.dumps(record, indent=1))
    say(f"\nwritten to {options.out}")
    return 0


def measure(
    head_dim: int, lengths: list[int], group: int, problems: dict[tuple[Part, Tiles, int, int], str]
) -> dict[str, Any]:
    ms: dict[str, dict[str, dict[int, float]]] = {part: {} for part in PARTS}
    theirs: dict[str, dict[str, dict[int, float]]] = {}
    failed: dict[str, str] = {}
    for length in lengths:
        tensors = make(length, head_dim, group)
        for name, passes in rivals(tensors).items():
            for which, time in passes.items():
                theirs.setdefault(name, {}).setdefault(which, {})[length] = time
        for part in PARTS:
            for tiles in HOPPER[part, head_dim]:
                label = f"{part} {tiles}"
                if problem := problems[part, tiles, head_dim, group]:
                    failed[label] = problem
                    continue
                ms[part].setdefault(str(tiles), {})[length] = milliseconds(caller(part, tiles, tensors))
    say(f"\n== head dim {head_dim}, group {group}: TFLOP/s forward, ms of each backward kernel ==")
    for name, passes in theirs.items():
        for which, times in passes.items():
            rates = [f"{flops(n, which) / times[n] / 1e9:.0f}" if n in times else "-" for n in lengths]
            table(f"{name} {which}", lengths, [("TFLOP/s", rates)])
    table("forward: TFLOP/s", lengths, [
        (cut, [f"{flops(n, 'forward') / times[n] / 1e9:.0f}" for n in lengths]) for cut, times in ms["forward"].items()
    ])  # fmt: skip
    for part in ("dq", "dkdv"):
        table(f"{part}: ms", lengths, [
            (cut, [f"{times[n]:.3f}" for n in lengths]) for cut, times in ms[part].items()
        ])  # fmt: skip
    best = {
        n: {part: min(times[n] for times in ms[part].values()) for part in PARTS if ms[part]} for n in lengths
    }
    both = [f"{flops(n, 'backward') / (best[n]['dq'] + best[n]['dkdv']) / 1e9:.0f}" for n in lengths]
    table("backward, best of both: TFLOP/s", lengths, [("ours", both)])
    flash = theirs.get("SDPA flash", {})
    if flash:
        table("ours over SDPA flash", lengths, [
            ("forward", [f"{flash['forward'][n] / best[n]['forward']:.2f}" for n in lengths]),
            ("backward", [f"{flash['backward'][n] / (best[n]['dq'] + best[n]['dkdv']):.2f}" for n in lengths]),
        ])  # fmt: skip
    for label, problem in failed.items():
        say(f"failed: {label}: {problem}")
    return {"ms": ms, "rivals_ms": theirs, "failed": failed}


if __name__ == "__main__":
    sys.exit(main())
