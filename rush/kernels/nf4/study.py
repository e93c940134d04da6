"""How NF4 dequantization is measured, against bitsandbytes and plain torch. Sizes are the layers of Llama's 1B and 8B."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rush.kernels import nf4, study
from rush.kernels.nf4 import reference
from rush.kernels.nf4.reference import BLOCK, SCALE_BLOCK
from rush.kernels.study import Contender, Inputs, Pass, Size, Study, Target, Work


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Uniform codes, scales around their offset."""
    count = size["rows"] * size["columns"]
    blocks = count // BLOCK
    generator = torch.Generator(device).manual_seed(5)

    def codes(number: int) -> Tensor:
        drawn = torch.randint(0, 256, (number,), device=device, generator=generator)
        return drawn.to(torch.uint8)

    return {
        "codes": codes(count // 2),
        "scales": codes(blocks),
        "scale_scales": study.normal(device, 6, -(-blocks // SCALE_BLOCK)).abs() * 0.01 + 0.01,
        "scale_table": torch.linspace(-1, 1, 256, device=device),
        "offset": torch.full((1,), 0.04, device=device),
        # Empty: gives the number of rows and the dtype of the result.
        "like": torch.zeros(size["rows"], 0, device=device, dtype=dtype),
    }


def _dims(like: Tensor, codes: Tensor) -> tuple[int, int]:
    return like.shape[0], 2 * codes.numel() // like.shape[0]


def ours(like: Tensor, codes: Tensor, **rest: Tensor) -> Tensor:
    return nf4.dequantize_nf4(codes, **rest, dims=_dims(like, codes), dtype=like.dtype)


def plain(like: Tensor, codes: Tensor, **rest: Tensor) -> Tensor:
    return reference.dequantize_nf4(codes, **rest, dims=_dims(like, codes), dtype=like.dtype)


def bitsandbytes(
    codes: Tensor, scales: Tensor, scale_scales: Tensor, scale_table: Tensor, offset: Tensor, like: Tensor
) -> Tensor:
    import_module("bitsandbytes")  # registers the operators
    ops: Any = torch.ops.bitsandbytes
    largest = ops.dequantize_blockwise.default(scales, scale_scales, scale_table, SCALE_BLOCK, torch.float32)
    largest += offset
    weight: Tensor = ops.dequantize_4bit.default(
        codes[:, None], largest, BLOCK, "nf4", _dims(like, codes), like.dtype
    )
    return weight


def work(size: Size, element: int, step: Pass) -> Work:
    """Half a byte read and an element written for each weight; a byte for each block of 64."""
    return Work(size["rows"] * size["columns"] * (0.5 + element + 1 / BLOCK + 4 / BLOCK / SCALE_BLOCK))


STUDY = Study(
    op="nf4",
    about="A 4-bit weight dequantized to 16 bits, with its 8-bit scales; memory-bound.",
    bound="memory",
    axis="rows",
    sizes=(
        Size("2048 × 2048", {"rows": 2048, "columns": 2048}, target=False),
        Size("4096 × 4096", {"rows": 4096, "columns": 4096}),
        Size("14336 × 4096", {"rows": 14336, "columns": 4096}),
    ),
    small=tuple(Size(f"{rows} × 128", {"rows": rows, "columns": 128}) for rows in (64, 256)),
    make=make,
    reference=plain,
    contenders=(
        study.ours(ours),
        *study.torch_pair(plain),
        Contender("bitsandbytes", "baseline", bitsandbytes, study.needs("bitsandbytes")),
    ),
    work=work,
    targets=(
        Target("ceiling", ("forward",), at_least=0.85),
        Target("speed", ("forward",), at_least=1.0, against="bitsandbytes"),
    ),
    passes=("forward",),
)
