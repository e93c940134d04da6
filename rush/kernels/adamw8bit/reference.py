"""Block-wise 8-bit moments in plain torch: the reference for the kernel's tests."""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels.adamw.reference import adamw_
from rush.kernels.adamw8bit.quantization_map import dynamic_map

BLOCK = 256


def quantize(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes in x's shape, and the absmax of each block of 256 elements."""
    blocks = _blocks(x.float())
    scales = blocks.abs().amax(1)
    normal = torch.where(scales[:, None] > 0, blocks / scales[:, None], 0.0)
    values = dynamic_map(signed).to(x.device)
    # The index of the nearest value is the number of midpoints below.
    codes = torch.searchsorted((values[1:] + values[:-1]) / 2, normal, right=True)
    return codes.flatten()[: x.numel()].view(x.shape).to(torch.uint8), scales


def dequantize(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    values = dynamic_map(signed).to(codes.device)
    blocks = values[_blocks(codes).long()] * scales[:, None]
    return blocks.flatten()[: codes.numel()].view(codes.shape)


def adamw8bit_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: tuple[Tensor, Tensor],
    exp_avg_sq: tuple[Tensor, Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One update with quantized moments: dequantized, updated, quantized again."""
    m, v = dequantize(*exp_avg, signed=True), dequantize(*exp_avg_sq, signed=False)
    adamw_(parameter, gradient, m, v, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=step)
    for kept, fresh in zip((*exp_avg, *exp_avg_sq), (*quantize(m, True), *quantize(v, False)), strict=True):
        kept.copy_(fresh)


def _blocks(x: Tensor) -> Tensor:
    flat = x.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
