"""FlashAttention: exact attention that never writes the score matrix.

Plain attention writes sequence × sequence scores per head to device memory, reads them for the
softmax, writes them, reads them again. The flash kernel walks over tiles that fit on chip, keeps a
running maximum and sum, and recomputes the tiles in the backward pass: memory grows with the
sequence instead of its square, and the traffic that bound the plain version is gone. At short
sequences there is little to save.

torch's dispatcher picks a backend by its own rules, and a compiled graph from a cache can carry
another backend than the one asked for. So this calls the flash operator itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rush.recipe import Knob
from rush.techniques.contract import (
    Build,
    Claim,
    MemoryEffect,
    Parity,
    Stage,
    Technique,
    half_precision,
)
from rush.techniques.evidence import attention_ran
from rush.techniques.seams import repeat_heads, set_attention_core, to_autocast_dtype

# Shapes: b batch, h query heads, k key/value heads, t positions, d head dim.


class FlashCore(nn.Module):
    """The attention core through torch's flash operator for the tensors' device."""

    def forward(
        self,
        q_bhtd: Tensor,
        k_bktd: Tensor,
        v_bktd: Tensor,
        *,
        documents_bt: Tensor | None = None,
        query_offset: int = 0,
    ) -> Tensor:
        assert documents_bt is None, "packed documents need variable-length attention"
        assert query_offset == 0, "decoding with a cache uses the plain core"
        q_bhtd, k_bktd, v_bktd = to_autocast_dtype(q_bhtd, k_bktd, v_bktd)
        if q_bhtd.is_cuda:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            # The kernel reads a shared key/value head for each of its query heads by itself.
        else:
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            k_bktd, v_bktd = repeat_heads(q_bhtd, k_bktd, v_bktd)
        out: Tensor = flash(q_bhtd, k_bktd, v_bktd, dropout_p=0.0, is_causal=True)[0]
        return out


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    set_attention_core(build.model, FlashCore)


technique = Technique(
    name="flash_attention",
    stage=Stage.MODEL,
    apply=apply,
    requires=(half_precision,),
    conflicts=("cudnn_attention", "flex_attention", "triton_attention"),
    claim=Claim(
        "tokens_per_s",
        0.75,
        regime="Llama-3.2-1B, sequence 2048, batch 1, one A100, after mixed precision",
        source="a widely read hand-made ladder; see docs/sources.md; Dao 2023, arXiv:2307.08691",
    ),
    parity=Parity.CLOSE,
    evidence=attention_ran(
        kernels=("flash_fwd", "flash_bwd"),
        ops=("scaled_dot_product_flash_attention_for_cpu", "flash_attention_for_cpu_backward"),
    ),
    memory=(MemoryEffect("scores", 0.0, "only one number per query and head is kept"),),
)
