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
from rush.models.layers import LayerNorm, OffsetRMSNorm, RMSNorm, RoundedRMSNorm
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
        self.offset = isinstance(plain, OffsetRMSNorm)
        """Whether it multiplies by 1 + weight."""
        self.keeps_dtype = isinstance(plain, RoundedRMSNorm)
        self.bias = plain.bias if isinstance(plain, LayerNorm) else None
        self.norm: Callable[..., Tensor] = rmsnorm if self.bias is None else layernorm
        self.add_norm: Callable[..., tuple[Tensor, Tensor]] = (
            add_rmsnorm if self.bias is None else add_layernorm
        )

    def _weights(self) -> tuple[Tensor, ...]:
        weight = 1.0 + self.weight.float() if self.offset else self.weight
        return (weight,) if self.bias is None else (weight, self.bias)

    def _dtype(self, x_btd: Tensor) -> torch.dtype | None:
        return _matmul_dtype(x_btd) or (x_btd.dtype if self.keeps_dtype else None)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.norm(x_btd, *self._weights(), self.eps, dtype=self._dtype(x_btd))

    def after_add(self, x_btd: Tensor, residual_btd: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the sum of both, and the sum."""
        return self.add_norm(x_btd, residual_btd, *self._weights(), self.eps, dtype=self._dtype(x_btd))


class FusedNormBlock(Block):
    """A block whose first residual add is fused into its second norm."""

    def forward(self, x_btd: Tensor, **rest: Any) -> Tensor:
        attended_btd = self.attention(self.attention_norm(x_btd), **rest)
        added_btd = self.added(attended_btd, self.attention_post_norm)
        normed_btd, x_btd = self.mlp_norm.after_add(added_btd, x_btd)  # type: ignore[operator]
        return x_btd + self.added(self.mlp(normed_btd), self.mlp_post_norm)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    model = build.model
    for owner, name, norm in list(model.norms()):
        setattr(owner, name, FusedNorm(norm))
    for layer, block in enumerate(model.blocks):
        assert type(block) is Block, "another technique has replaced the block"
        if isinstance(block.mlp_norm, FusedNorm):  # else there is no norm after the residual add
            model.blocks[layer] = FusedNormBlock(
                block.attention_norm,
                block.attention,
                block.mlp_norm,
                block.mlp,
                attention_post_norm=block.attention_post_norm,
                mlp_post_norm=block.mlp_post_norm,
                residual_scale=block.residual_scale,
            )


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
