"""FlashAttention: exact attention that never materializes the score matrix.

Plain attention writes sequence × sequence scores per head to device memory, reads them for the softmax,
writes them, reads them again. The flash kernel works on tiles that fit on chip, keeps a running maximum and
sum, and recomputes the tiles in the backward pass: memory is linear in the sequence instead of quadratic,
and the memory traffic that bound the plain version is gone. At short sequences there is little to save.

Packed documents are flattened into one row with cumulative sequence lengths (varlen attention): nothing
outside a document is read, so short documents cost little. (The CPU operator uses a mask.) Sliding windows are the
kernel's own, so that a long row costs what its windows do; on a CPU they are a mask.

torch's dispatcher picks a backend by its own rules, and a cached compiled graph can hold another backend
than the one asked for. So this calls the flash operator itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.models import AttentionForm
from rush.models.layers import PLAIN_FORM
from rush.techniques.api.evidence import attention_ran
from rush.techniques.api.features import no_score_cap
from rush.techniques.api.seams import repeat_heads, set_attention_core, to_autocast_dtype
from rush.techniques.attention.tiled import GROUPED_MEMORY

# Shapes: b batch, h query heads, k key/value heads, t positions, d head dim, n documents + 1.


class DocumentOffsets(nn.Module):
    """Packed documents for the flash operators: cumulative sequence lengths of the flattened batch; on a CPU, a mask."""

    def forward(self, documents_bt: Tensor, starts_n: Tensor | None) -> Tensor:
        if documents_bt.is_cuda:
            assert starts_n is not None, "varlen attention needs the cumulative sequence lengths"
            return starts_n
        position_t = torch.arange(documents_bt.shape[1])
        visible_bts = documents_bt[:, :, None] == documents_bt[:, None, :]
        visible_bts = visible_bts & (position_t[None, :] <= position_t[:, None])
        return torch.where(visible_bts, 0.0, -math.inf)[:, None]


class FlashCore(nn.Module):
    """Attention core by torch's flash operator for the tensors' device."""

    def __init__(self, longest: int, form: AttentionForm = PLAIN_FORM) -> None:
        super().__init__()
        assert form.softcap is None, "torch's operator has no soft cap"
        self.form = form
        self.longest = longest
        """Maximum length of a packed document."""

    def forward(
        self,
        q_bhtd: Tensor,
        k_bktd: Tensor,
        v_bktd: Tensor,
        *,
        documents: Tensor | None = None,
        query_offset: int = 0,
    ) -> Tensor:
        """The queries are the last positions of the keys, the first of them at `query_offset`."""
        assert query_offset + q_bhtd.shape[2] == k_bktd.shape[2], "decoding with a cache uses the plain core"
        q_bhtd, k_bktd, v_bktd = to_autocast_dtype(q_bhtd, k_bktd, v_bktd)
        if q_bhtd.is_cuda and documents is not None:
            return self._varlen(q_bhtd, k_bktd, v_bktd, documents)
        out: Tensor
        if q_bhtd.is_cuda and self.form.window is not None:
            q, k, v = (x.transpose(1, 2) for x in (q_bhtd, k_bktd, v_bktd))
            dense = torch.ops.aten._flash_attention_forward
            out = dense(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, **self._options())[0]
            return out.transpose(1, 2)
        if q_bhtd.is_cuda:
            # The kernel supports grouped-query attention, and aligns the causal mask to the last query and key.
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            out = flash(q_bhtd, k_bktd, v_bktd, dropout_p=0.0, is_causal=True, scale=self.form.scale)[0]
            return out
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        k_bhtd, v_bhtd = repeat_heads(q_bhtd, k_bktd, v_bktd)
        mask = None if documents is None else documents[:, :, query_offset:].to(q_bhtd.dtype)
        window = self.form.window
        if window is not None or (mask is None and query_offset):
            seen_ts = torch.ones(q_bhtd.shape[2], k_bktd.shape[2], dtype=torch.bool).tril(query_offset)
            if window is not None:
                seen_ts = seen_ts.triu(query_offset - window + 1)
            own = torch.where(seen_ts, 0.0, -math.inf).to(q_bhtd.dtype)
            mask = own if mask is None else mask + own
        out = flash(
            q_bhtd,
            k_bhtd,
            v_bhtd,
            dropout_p=0.0,
            is_causal=mask is None,
            attn_mask=mask,
            scale=self.form.scale,
        )[0]
        return out

    def _options(self) -> dict[str, Any]:
        """Scale and window of the varlen operator; a window ends at the query's own key."""
        window = self.form.window
        limits = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        return {"scale": self.form.scale, **limits}

    def _varlen(self, q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor, starts_n: Tensor) -> Tensor:
        """Varlen attention over all rows flattened. Empty documents, which pad `starts_n`, cost nothing."""
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_bhtd, k_bktd, v_bktd))
        starts_q, num_queries, num_keys = starts_n, q_bhtd.shape[2], k_bktd.shape[2]
        if num_queries < num_keys:
            # Queries are the last positions of each row; a document that ends before them has none.
            within = (starts_n % num_keys - (num_keys - num_queries)).clamp(min=0)
            starts_q = starts_n // num_keys * num_queries + within
        varlen = torch.ops.aten._flash_attention_forward
        out: Tensor = varlen(
            q, k, v, starts_q, starts_n, self.longest, self.longest, 0.0, True, False, **self._options()
        )[0]
        batch, heads, length, head_dim = q_bhtd.shape
        return out.view(batch, length, heads, head_dim).transpose(1, 2)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    longest = build.recipe.batch.sequence
    set_attention_core(build.model, lambda form: FlashCore(longest, form), DocumentOffsets())


technique = api.Technique(
    name="flash_attention",
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(
        api.Requirement(
            "torch's kernel needs compute capability 8.0 (Ampere) or newer on an NVIDIA GPU",
            lambda machine, recipe: machine.device != "cuda" or (machine.capability or (8, 0)) >= (8, 0),
        ),
        api.half_precision,
        no_score_cap,
    ),
    conflicts=("cpu_attention", "cudnn_attention", "flex_attention", "triton_attention"),
    claim=api.Claim(
        "tokens_per_s",
        0.75,
        regime="Llama-3.2-1B, sequence 2048, batch 1, one A100, after mixed precision",
        source="a widely read hand-made ladder; see docs/sources.md; Dao 2023, arXiv:2307.08691",
    ),
    parity=api.Parity.CLOSE,
    evidence=attention_ran(
        kernels=("flash_fwd", "flash_bwd"),
        ops=("scaled_dot_product_flash_attention_for_cpu", "flash_attention_for_cpu_backward"),
    ),
    memory=GROUPED_MEMORY,
    work=(api.WorkEffect("attention", 0.225, "measured on an H200"),),
)
