"""How the optimizer step with 8-bit moments is measured, against bitsandbytes and torch's own with 32-bit moments.

The check is the first step from zero moments, which quantization does not round yet. Parameters are matrices: moments of
vectors and small tensors stay in fp32.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from rush.kernels import study
from rush.kernels.adamw import study as wide
from rush.kernels.adamw8bit import RushAdamW8bit
from rush.kernels.adamw8bit.triton import BLOCK
from rush.kernels.study import Contender, Inputs, Pass, Size, Study, Target, Work


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    return {name: tensor.view(-1, BLOCK) for name, tensor in wide.make(size, device, dtype).items()}


def _bitsandbytes(*args: Any, **options: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = import_module("bitsandbytes.optim").AdamW8bit(*args, **options)
    return made


def work(size: Size, element: int, step: Pass) -> Work:
    """Weight and gradient read, weight written; two codes of a byte read and written; the scales, one in 256."""
    wide_bytes = 3.0 * (4 if size["bits"] == 32 else element)
    return Work(size["parameters"] * (wide_bytes + 4.0 + 4 * 4 / 256))


STUDY = Study(
    op="adamw8bit",
    about="AdamW whose moments take a byte each; less to move than with wide moments, and memory bounds it.",
    bound="memory",
    axis="parameters",
    sizes=wide.STUDY.sizes[:2],
    small=tuple(Size(f"{count:,}", {"parameters": count, "bits": 32}) for count in (32768, 65536)),
    make=make,
    reference=wide.defined,
    contenders=(
        Contender("rush", "ours", wide.OptimizerStep(RushAdamW8bit)),
        Contender("plain torch", "plain", wide.OptimizerStep(torch.optim.AdamW, foreach=False)),
        Contender("torch fused", "baseline", wide.OptimizerStep(torch.optim.AdamW, fused=True)),
        Contender("bitsandbytes", "baseline", wide.OptimizerStep(_bitsandbytes), study.needs("bitsandbytes")),
    ),
    work=work,
    targets=(
        Target("ceiling", ("forward",), at_least=0.85),
        Target("speed", ("forward",), at_least=1.0, against="torch fused"),
        Target("speed", ("forward",), at_least=1.0, against="bitsandbytes"),
    ),
    passes=("forward",),
)
