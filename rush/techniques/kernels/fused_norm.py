"""Fused norms: a norm is one pass over memory, and the residual add before it is free.

A norm does a handful of operations per element, so it is bound by memory bandwidth. Eager, each of those
operations is a pass over memory. The kernel holds whole rows on chip: read once, written once. In a block
the residual add after attention is fused into the norm that follows: two reads, two writes instead of three
and two. It wins eager, and most on Llama, whose plain norm is many operations (GPT-2's is one already). A
compiler fuses norms well too; with `compile` expect little: an opaque kernel can even prevent larger
fusions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.models.decoder import Block
from rush.models.layers import LayerNorm, RMSNorm
from rush.techniques.api.seams import needs_triton, rush_kernels_ran


def _matmul_dtype(x: Tensor) -> torch.dtype | None:
    """Under autocast the dtype of the next matmul, in which the norm writes its output."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class FusedNorm(nn.Module):
    """A norm by our kernel, over the plain norm's weights."""

    def __init__(self, plain: nn.Module) -> None:
        from rush.kernels.layernorm import add_layernorm, layernorm
        from rush.kernels.rmsnorm import add_rmsnorm, rmsnorm

        super().__init__()
        assert isinstance(plain, RMSNorm | LayerNorm), type(plain)
        self.eps, self.weight = plain.eps, plain.weight
        self.bias = plain.bias if isinstance(plain, LayerNorm) else None
        self.norm: Callable[..., Tensor] = rmsnorm if self.bias is None else layernorm
        self.add_norm: Callable[..., tuple[Tensor, Tensor]] = (
            add_rmsnorm if self.bias is None else add_layernorm
        )

    def _weights(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.norm(x_btd, *self._weights(), self.eps, dtype=_matmul_dtype(x_btd))

    def after_add(self, x_btd: Tensor, residual_btd: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the sum of both, and the sum."""
        return self.add_norm(x_btd, residual_btd, *self._weights(), self.eps, dtype=_matmul_dtype(x_btd))


class FusedNormBlock(Block):
    """A block whose first residual add is fused into its second norm."""

    def forward(self, x_btd: Tensor, **rest: Any) -> Tensor:
        attended_btd = self.attention(self.attention_norm(x_btd), **rest)
        normed_btd, x_btd = self.mlp_norm.after_add(attended_btd, x_btd)  # type: ignore[operator]
        out: Tensor = x_btd + self.mlp(normed_btd)
        return out


def apply(build: api.Build, knobs: api.Knobs) -> None:
    model = build.model
    for layer, block in enumerate(model.blocks):
        assert type(block) is Block, "another technique has replaced the block"
        model.blocks[layer] = FusedNormBlock(
            FusedNorm(block.attention_norm), block.attention, FusedNorm(block.mlp_norm), block.mlp
        )
    model.final_norm = FusedNorm(model.final_norm)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """In the profile: kernels of ours named `rmsnorm_` or `layernorm_`, forward and backward (on a CPU the operators
    `rush::add_rmsnorm` or `rush::add_layernorm` and their backward)."""
    proofs = [_ran_for(norm)(seen, knobs) for norm in ("rmsnorm", "layernorm")]
    return next((proof for proof in proofs if proof.took_effect), proofs[0])


def _ran_for(norm: str) -> api.Evidence:
    return rush_kernels_ran(
        kernels=(f"{norm}_forward_kernel", f"{norm}_backward_kernel"),
        ops=(f"rush::{norm}", f"rush::add_{norm}", f"rush::add_{norm}_backward"),
    )


technique = api.Technique(
    name="fused_norm",
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(needs_triton,),
    conflicts=("liger",),
    claim=api.Claim(
        "time of a norm",
        -0.86,
        regime="RMSNorm forward and backward against eager PyTorch, one A100",
        source="Liger Kernel's documentation (about 7 times as fast); Hsu et al. 2024, arXiv:2410.10989",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=(
        api.MemoryEffect("norm.wide", 0.0, "the norms save their input and a number per row"),
        api.MemoryEffect("norm.scaled", 0.0, "the norms save their input and a number per row"),
        api.MemoryEffect("norm.copies", 0.0, "the norm writes the dtype of the next matmul"),
        api.MemoryEffect("norm.opaque", 1.0, "with fp8: casts of its output are saved"),
    ),
    work=(api.WorkEffect("norms.fused", 1.0),),
)
