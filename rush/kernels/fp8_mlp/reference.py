"""Llama's MLP with fp8 operands in plain torch: the forward pass and all gradients.

Elementwise work between the matmuls is in fp32 and rounded once, to fp8. Results of the matmuls are rounded to `dtype`,
as on a GPU; in float64 only the operands are rounded. Each operand is scaled by its own amax.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rush.kernels.fp8_linear.reference import E4M3, E5M2, Fp8Tensor, quantize, scaled_mm

# Shapes: m tokens, d hidden, i width of the MLP, j = 2i (gate and up concatenated).


def swiglu(gate_up_mj: Tensor) -> Tensor:
    """silu(gate) · up, at least in fp32."""
    gate, up = gate_up_mj.to(torch.promote_types(gate_up_mj.dtype, torch.float32)).chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_gradient(dh_mi: Tensor, gate_up_mj: Tensor) -> Tensor:
    """The gradients of gate and up, concatenated, at least in fp32."""
    wide = gate_up_mj.detach().to(torch.promote_types(gate_up_mj.dtype, torch.float32)).requires_grad_()
    with torch.enable_grad():
        h = swiglu(wide)
    return torch.autograd.grad(h, wide, dh_mi.to(h.dtype))[0]


def fp8_mlp(
    x_md: Tensor, weight_jd: Tensor, down_di: Tensor, dout_md: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """The output, and the gradients of x, of gate and up, and of down."""
    x, weight, down = (quantize(operand, E4M3, rowwise=False) for operand in (x_md, weight_jd, down_di))
    gate_up_mj = scaled_mm(x, weight, dtype)
    h = quantize(swiglu(gate_up_mj), E4M3, rowwise=False)
    dout = quantize(dout_md, E5M2, rowwise=False)
    dh_mi = scaled_mm(dout, _transposed(down), dtype)
    d_gate_up = quantize(swiglu_gradient(dh_mi, gate_up_mj), E5M2, rowwise=False)
    return [
        scaled_mm(h, down, dtype),
        scaled_mm(d_gate_up, _transposed(weight), dtype),
        scaled_mm(_transposed(d_gate_up), _transposed(x), dtype),
        scaled_mm(_transposed(dout), _transposed(h), dtype),
    ]


def _transposed(x: Fp8Tensor) -> Fp8Tensor:
    return Fp8Tensor(x.values.t(), x.inv_scale)
