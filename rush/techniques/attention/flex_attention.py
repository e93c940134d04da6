"""FlexAttention: a fused attention kernel generated from a mask function.

The mask is a small Python function of positions; the compiler generates a tiled kernel for it and skips
blocks that are fully masked. For a plain causal mask a hand-written kernel is slightly faster; it pays off
for unusual masks (packed documents, sliding windows) without a hand-written kernel. The first step waits for
the compiler. On a CPU it would materialize all scores, so it is refused there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.models import AttentionForm
from rush.models.layers import PLAIN_FORM
from rush.techniques.api.evidence import attention_ran
from rush.techniques.api.seams import set_attention_core, to_autocast_dtype
from rush.techniques.attention.tiled import GROUPED_MEMORY

# Shapes: b batch, h query heads, k key/value heads, t positions, d head dim, n and m blocks of positions.

BLOCK = 128


@dataclass(frozen=True)
class Masks:
    """BlockMasks of layers without and with a window."""

    whole: Any
    windowed: Any = None


class DocumentMask(nn.Module):
    """BlockMasks of packed documents, computed from the first position of each document: without a mask of length ×
    length, and without a device synchronization."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(self, documents_bt: Tensor, starts_n: Tensor | None) -> Masks:
        length = documents_bt.shape[1]
        position_t = torch.arange(length, device=documents_bt.device)
        begins_bt = nn.functional.pad(documents_bt[:, 1:] != documents_bt[:, :-1], (1, 0), value=True)
        first_bt = torch.cummax(torch.where(begins_bt, position_t, 0), dim=1).values
        if self.window is None:
            return Masks(self._mask(first_bt))
        return Masks(
            self._mask(first_bt), self._mask(torch.maximum(first_bt, position_t - (self.window - 1)))
        )

    def _mask(self, first_bt: Tensor) -> Any:
        """The mask of queries that see the keys from these on, up to their own."""
        from torch.nn.attention.flex_attention import BlockMask

        length = first_bt.shape[1]
        num_blocks = -(-length // BLOCK)
        block_n = torch.arange(num_blocks, device=first_bt.device)
        ends_n = (block_n * BLOCK + BLOCK - 1).clamp(max=length - 1)
        # The first query of a block sees the earliest keys, its last one the fewest.
        nearest_bn, farthest_bn = first_bt[:, ends_n], first_bt[:, block_n * BLOCK]
        seen = (block_n >= farthest_bn[..., None] // BLOCK) & (block_n <= block_n[:, None])
        whole = (block_n * BLOCK >= nearest_bn[..., None]) & (block_n < block_n[:, None])

        def within(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (key >= first_bt[b, query])

        mask: Any = BlockMask.from_kv_blocks(
            *_listed(seen & ~whole),
            *_listed(whole),
            BLOCK_SIZE=BLOCK,
            mask_mod=within,
            seq_lengths=(length, length),
        )
        return mask


def _listed(blocks_bnm: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the number of blocks that are set, and their indices first."""
    order = torch.argsort(blocks_bnm.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks_bnm.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()


class FlexCore(nn.Module):
    """Attention core by a generated kernel, for the sequence length of its mask."""

    def __init__(self, kernel: Any, masks: Masks, form: AttentionForm = PLAIN_FORM) -> None:
        super().__init__()
        self.kernel, self.masks, self.form = kernel, masks, form
        self.score_mod = None if form.softcap is None else _capped(form.softcap)

    def forward(
        self, q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor, *, documents: Any = None, query_offset: int = 0
    ) -> Tensor:
        assert query_offset == 0, "decoding with a cache uses the plain core"
        q_bhtd, k_bktd, v_bktd = to_autocast_dtype(q_bhtd, k_bktd, v_bktd)
        grouped = q_bhtd.shape[1] != k_bktd.shape[1]
        masks: Masks = self.masks if documents is None else documents
        out: Tensor = self.kernel(
            q_bhtd,
            k_bktd,
            v_bktd,
            score_mod=self.score_mod,
            block_mask=masks.whole if self.form.window is None else masks.windowed,
            scale=self.form.scale,
            enable_gqa=grouped,
        )
        return out


def causal_mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def within_documents(window: int) -> Callable[..., Tensor]:
    def within(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (key > query - window)

    return within


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def apply(build: api.Build, knobs: api.Knobs) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = build.recipe.batch.sequence
    # Uncompiled, the operator materializes all scores.
    kernel = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def mask(visible: Callable[..., Tensor]) -> Any:
        return create_block_mask(visible, None, None, length, length, device=str(build.device))

    window = build.model.shape.window
    masks = Masks(mask(causal_mask), None if window is None else mask(within_documents(window)))
    set_attention_core(build.model, lambda form: FlexCore(kernel, masks, form), DocumentMask(window))


technique = api.Technique(
    name="flex_attention",
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(
        api.needs_cuda,
        api.Requirement("it needs Triton", lambda machine, recipe: machine.triton is not None),
        api.Requirement(
            "it needs a head dim that is a power of two and at least 16",
            lambda machine, recipe: (
                recipe.shape().head_dim >= 16 and recipe.shape().head_dim.bit_count() == 1
            ),
        ),
        api.Requirement(
            "its mask has one sequence length: set shapes=1 in pad or bucket",
            lambda machine, recipe: all(
                api.knob_of(recipe, name, "shapes", 0) == 1
                for name in ("bucket", "pad")
                if api.used(recipe, name)
            ),
        ),
    ),
    conflicts=("cp", "cpu_attention", "cudnn_attention", "flash_attention", "triton_attention"),
    claim=api.Claim(
        "attention rate",
        -0.15,
        regime="backward, against FlashAttention 2 on an A100 (−10 % forward)",
        source="PyTorch blog, FlexAttention, August 2024",
        relative_to="flash_attention",
    ),
    parity=api.Parity.CLOSE,
    compiles=lambda knobs: True,
    evidence=attention_ran(kernels=("flex_attention",), ops=("flex_attention",)),
    memory=GROUPED_MEMORY,
    work=(api.WorkEffect("attention", 0.2, "measured on an H200"),),
)
