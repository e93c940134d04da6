"""Which launch shape is best for the norms on this GPU: a sweep of warps and programs, in a minute.

The kernels choose by a rule (`rush.kernels.support.row_tile`, and programs for each multiprocessor in the
backward pass), not by autotuning: a choice made anew in every process would change the last bits of the
weight's gradient from run to run. This script is how the rule is checked. It prints GB/s of what the op must
move at the least; compare with the measured copy rate.

    python scripts/tune_norms.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rush.kernels.layernorm import triton as layernorm
from rush.kernels.rmsnorm import triton as rmsnorm
from rush.kernels.support import RowTile, next_power_of_2, num_sms

ROWS, WIDTHS = 16384, (2048, 8192)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def gigabytes_per_s(work: Callable[[], object], num_bytes: int) -> float:
    return num_bytes / float(triton.testing.do_bench(work, warmup=10, rep=40)) / 1e6


def sweep(name: str, module: object, width: int) -> None:
    x = torch.randn(ROWS, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    rstd, mean = torch.ones(ROWS, device="cuda"), torch.zeros(ROWS, device="cuda")
    size, sms = x.numel() * x.element_size(), num_sms(x.device)
    bias: tuple[Tensor, ...] = (weight,) if name == "layernorm" else ()
    stats = (mean, rstd) if name == "layernorm" else (rstd,)
    for warps, rows in product((2, 4, 8, 16, 32), (1, 2)):
        tile = RowTile(rows, next_power_of_2(width), warps)
        with patch.object(module, "row_tile", lambda *_, tile=tile, **__: tile):
            rate = gigabytes_per_s(lambda: module.forward(x, None, weight, *bias, 1e-5, x.dtype), 2 * size)  # type: ignore[attr-defined]
            say(f"{name} forward {width}: {warps} warps, {rows} rows: {rate:.0f} GB/s")
    for warps, each in product((4, 8, 16, 32), (1, 2, 4, 8)):
        if warps * each > 64:
            continue
        tile = RowTile(1, next_power_of_2(width), warps)
        asked = each * sms // max(1, 16 // warps)
        with (
            patch.object(module, "row_tile", lambda *_, tile=tile, **__: tile),
            patch.object(module, "num_sms", lambda _, asked=asked: asked),
        ):
            rate = gigabytes_per_s(lambda: module.backward(x, None, x, weight, *stats), 3 * size)  # type: ignore[attr-defined]
            say(f"{name} backward {width}: {warps} warps, {each} programs a multiprocessor: {rate:.0f} GB/s")


def main() -> None:
    x = torch.empty(ROWS, 8192, device="cuda", dtype=torch.bfloat16)
    say(f"copy: {gigabytes_per_s(x.clone, 2 * x.numel() * 2):.0f} GB/s")
    for width in WIDTHS:
        sweep("rmsnorm", rmsnorm, width)
        sweep("layernorm", layernorm, width)


if __name__ == "__main__":
    main()
