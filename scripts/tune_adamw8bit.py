"""Which launch shape is best for the 8-bit AdamW on this GPU: rows and warps, round-to-nearest and stochastic rounding.

First a check against the kernel's definition, then times beside a copy and torch's fused update. Half a minute.

    python scripts/tune_adamw8bit.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rush.kernels.adamw8bit import adamw8bit_, dynamic_map, quantized_zeros
from rush.kernels.adamw8bit import triton as kernel
from rush.kernels.adamw8bit.reference import adamw8bit_ as reference_

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SIZE = 2**28
BYTES = 6 + 4 + 16 / 256
"""Bytes per bf16 parameter: itself read and written, its gradient, two quantized moments read and written, its share of two
scales."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def median_ms(call: Callable[[], object], times: int = 20) -> float:
    """Launched without waiting, so that the host's work is hidden behind the device's."""
    for _ in range(5):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in pairwise(events))[times // 2]


def check(values: tuple[Tensor, Tensor], dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Four steps beside the definition, each from the same state: codes that differ, and by how much."""
    generator = torch.Generator("cuda").manual_seed(1)

    def draw() -> Tensor:
        spread = 10 ** (3 * torch.rand(shape, device="cuda", generator=generator) - 3)
        return (torch.randn(shape, device="cuda", generator=generator) * spread).to(dtype)

    ours = draw()
    theirs = ours.clone()
    moments = [quantized_zeros(ours, signed) for signed in (True, False)]
    truths = [quantized_zeros(ours, signed) for signed in (True, False)]
    share, apart = 0.0, 0
    for step in range(1, 5):
        gradient = draw()
        adamw8bit_([ours], [gradient], [moments[0]], [moments[1]], values, **SETTINGS, step=step)
        reference_(theirs, gradient, truths[0], truths[1], **SETTINGS, step=step)
        for found, true in zip(moments, truths, strict=True):
            gaps = (found.codes.int() - true.codes.int()).abs()
            share, apart = max(share, float((gaps > 0).double().mean())), max(apart, int(gaps.max()))
            torch.testing.assert_close(found.scales, true.scales, rtol=1e-5, atol=0)
            true.codes.copy_(found.codes)
            true.scales.copy_(found.scales)
        rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-2, 1e-5)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
        theirs.copy_(ours)
    verdict = "right" if apart <= 1 and share < 3e-3 else "WRONG"
    say(f"{dtype}, {shape}: {verdict}; {share:.1e} of the codes differ, by at most {apart}")


def sweep(values: tuple[Tensor, Tensor], copy_bytes_per_s: float, fused_ms: float) -> None:
    p = (torch.randn(SIZE // 4096, 4096, device="cuda") * 0.02).bfloat16()
    g = torch.randn_like(p)
    m, v = quantized_zeros(p, True), quantized_zeros(p, False)
    for chance, rows, warps in product((False, True), (4, 8, 16), (4, 8)):
        kernel.ROWS, kernel.PIECE, kernel.NUM_WARPS = rows, rows * kernel.BLOCK, warps
        steps, divisions = count(1), {}  # type: ignore[var-annotated]
        update = partial(
            adamw8bit_,
            [p],
            [g],
            [m],
            [v],
            values,
            **SETTINGS,
            stochastic_rounding=chance,
            divisions=divisions,
        )
        ms = median_ms(lambda update=update, steps=steps: update(step=next(steps)))
        rate = SIZE * BYTES / ms * 1e3
        say(
            f"{'stochastic' if chance else 'nearest   '} rows {rows:2} warps {warps}: {ms:.3f} ms, "
            f"{rate / copy_bytes_per_s:.1%} of a copy, {fused_ms / ms:.2f}x torch fused"
        )


def main() -> None:
    values = (dynamic_map(True).cuda(), dynamic_map(False).cuda())
    for dtype, shape in product((torch.bfloat16, torch.float32), ((64, 512), (300, 256), (499, 101))):
        check(values, dtype, shape)
    source = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_bytes_per_s = 2 * source.numel() / median_ms(lambda: target.copy_(source)) * 1e3
    weight = torch.randn(SIZE // 4096, 4096, device="cuda").bfloat16().requires_grad_()
    weight.grad = torch.randn_like(weight)
    fused_ms = median_ms(torch.optim.AdamW([weight], fused=True).step)
    say(f"copy {copy_bytes_per_s / 1e12:.2f} TB/s; torch fused {fused_ms:.3f} ms")
    sweep(values, copy_bytes_per_s, fused_ms)


if __name__ == "__main__":
    main()
