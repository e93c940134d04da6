"""Our own flash attention: the tiled algorithm as a Triton kernel, written to be read.

The algorithm is FlashAttention 2's: tiles that fit on chip, a running maximum and sum, scores recomputed in
the backward pass. FlashAttention 2's own kernels were written for Ampere; Triton compiles ours for the
current GPU, so on Hopper it uses the asynchronous tensor cores. Unlike torch's flash operator it supports
packed documents, and its gradients are deterministic: no atomics, at the price of computing two of five
matmuls twice. cuDNN's kernel, tuned for each GPU by its vendor, may be faster still. In fp32 it is exact and
slow.
"""

from __future__ import annotations

from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.models import AttentionForm
from rush.models.layers import PLAIN_FORM
from rush.techniques.api.evidence import attention_ran
from rush.techniques.api.features import no_score_cap
from rush.techniques.api.seams import needs_triton, set_attention_core, to_autocast_dtype
from rush.techniques.attention.tiled import GROUPED_MEMORY, supported_head_dim

# Shapes: b batch, h query heads, k key/value heads, t positions, d head dim.

KERNELS = ("flash_forward_tiles", "flash_dq_tiles", "flash_dkdv_tiles")
OTHERS = ("flash_fwd", "flash_bwd", "fmha", "cudnn_generated", "scaled_dot_product", "flex_attention")


class DocumentBounds(nn.Module):
    """Packed documents for our kernel: first and last position of each position's document."""

    def forward(self, documents_bt: Tensor, starts_n: Tensor | None) -> tuple[Tensor, Tensor]:
        from rush.kernels.flash_attention import document_bounds

        return document_bounds(documents_bt, *documents_bt.shape)


class TritonCore(nn.Module):
    """Attention core by our own kernel."""

    def __init__(self, form: AttentionForm = PLAIN_FORM) -> None:
        super().__init__()
        assert form.softcap is None, "the kernel has no soft cap"
        self.form = form

    def forward(
        self,
        q_bhtd: Tensor,
        k_bktd: Tensor,
        v_bktd: Tensor,
        *,
        documents: Tensor | tuple[Tensor, Tensor] | None = None,
        query_offset: int = 0,
    ) -> Tensor:
        from rush.kernels.flash_attention import flash_attention

        assert query_offset == 0, "decoding with a cache uses the plain core"
        q_bhtd, k_bktd, v_bktd = to_autocast_dtype(q_bhtd, k_bktd, v_bktd)
        form = self.form
        return flash_attention(
            q_bhtd, k_bktd, v_bktd, scale=form.scale, window=form.window, documents=documents
        )


def apply(build: api.Build, knobs: api.Knobs) -> None:
    set_attention_core(build.model, TritonCore, DocumentBounds())


_ours_ran = attention_ran(
    kernels=KERNELS, ops=("rush::flash_attention_forward", "rush::flash_attention_backward")
)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The profile shows our kernels (on a CPU our operators), and neither plain attention's softmax nor another kernel."""
    names = [*seen.kernels, *seen.ops]
    if other := next((name for name in names if any(part in name for part in OTHERS)), None):
        return api.Proof(False, f"{other[:80]} ran, another attention kernel")
    return _ours_ran(seen, knobs)


technique = api.Technique(
    name="triton_attention",
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(needs_triton, supported_head_dim, no_score_cap),
    conflicts=("cpu_attention", "cudnn_attention", "flash_attention", "flex_attention"),
    claim=api.Claim(
        "attention rate",
        0.22,
        regime="Triton's tutorial kernel against FlashAttention 2: forward, causal, head dim 64, sequence 8192 "
        "(+14 % backward; slower than it at head dim 128)",
        source="a user's measurements in Triton's issue 5437, December 2024; the GPU is not named",
        relative_to="flash_attention",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=GROUPED_MEMORY,
    work=(api.WorkEffect("attention", 0.32, "measured on an H200"),),
)
