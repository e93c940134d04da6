"""LM head and cross-entropy fused by our own kernels: no logits of all tokens, nothing recomputed.

Logits are tokens × vocabulary, far larger than anything else in the model. For one chunk of tokens at a
time, a matmul computes them into a buffer, a Triton kernel overwrites them with their gradient, and two more
matmuls compute the gradients of hidden states and weight. All of this happens in the forward pass; the
backward pass multiplies by the loss scale. `chunked_loss` needs four matmuls: it recomputes a chunk's logits
in the backward pass. An unaligned vocabulary is padded, so `vocab_pad` has nothing to add. With `tp` each
rank does this for its vocab shard, and two numbers per token are communicated: the denominator and the
label's logit. It saves memory against full logits and costs about as much time; with a vocabulary of a few
thousand there is little to save. On a CPU the loss kernel is C++ (built at first use), and saves time
instead: a chunk's logits stay in the cache, and the exponentials are computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.techniques.api.evidence import head_rows
from rush.techniques.api.features import no_logit_cap
from rush.techniques.api.seams import needs_kernels

FP8_ALIGNMENT = 16
OP, KERNEL = "rush::linear_cross_entropy", "cross_entropy_forward_kernel"
CHUNK = 4
"""The place of the chunk size among the operator's arguments."""


class FusedLossHead(nn.Module):
    """The summed loss of hidden states and the LM head's weight, by the fused kernel."""

    def __init__(
        self,
        loss: Callable[..., Tensor],
        chunk_tokens: int | None,
        vocab_shard: tuple[Any, ...] | None = None,
    ) -> None:
        super().__init__()
        self.loss = loss
        self.chunk_tokens = chunk_tokens
        self.vocab_shard = vocab_shard
        self.matmuls = "dtype"
        """`fp8` sets it to run fp8 matmuls."""

    def forward(self, hidden_btd: Tensor, head_weight_vd: Tensor, labels_bt: Tensor) -> Tensor:
        missing = -labels_bt.numel() % FP8_ALIGNMENT
        if missing and self.matmuls != "dtype":
            # Padding tokens have no label.
            hidden_btd = F.pad(hidden_btd.flatten(0, -2), (0, 0, 0, missing))
            labels_bt = F.pad(labels_bt.flatten(), (0, missing), value=-100)
        return self.loss(
            hidden_btd,
            head_weight_vd,
            labels_bt,
            ignore_index=-100,
            chunk_tokens=self.chunk_tokens,
            vocab_shard=self.vocab_shard,
            matmuls=self.matmuls,
        )

    def over(self, first: int, whole: int, ranks: int, group: str) -> FusedLossHead:
        """The same loss for a vocab shard that begins at token `first`."""
        from rush.kernels.linear_cross_entropy import VocabShard

        return FusedLossHead(self.loss, self.chunk_tokens, VocabShard(first, whole, ranks, group))

    @staticmethod
    def width(vocab_size: int) -> int:
        """Width of the matmul for a vocabulary of this size."""
        from rush.kernels.linear_cross_entropy.chunks import ALIGNED

        return -(-vocab_size // ALIGNED) * ALIGNED


def apply(build: api.Build, knobs: api.Knobs) -> None:
    from rush.kernels.linear_cross_entropy import linear_cross_entropy

    head = FusedLossHead(linear_cross_entropy, int(knobs["chunk_tokens"]) or None)
    build.model.loss_head = head
    build.facts.padded_vocab_size = head.width(build.model.shape.vocab_size)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Our loss kernel ran (on a CPU: its operator), and no LM head matmul covered all tokens of a micro batch."""
    ran = any(KERNEL in name for name in seen.kernels) if seen.kernels else OP in seen.ops
    rows, tokens = head_rows(seen), seen.micro_tokens
    return api.Proof(
        ran and 0 < rows < tokens,
        f"{KERNEL if seen.kernels else OP} {'ran' if ran else 'did not run'}; the LM head matmul covered "
        f"at most {rows:,} of {tokens:,} tokens at once",
    )


def _chunk_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The profile shows the loss operator called with so many tokens per chunk; with 0 as many as the kernel chooses for
    the tokens of the call."""
    from rush.kernels.linear_cross_entropy.chunks import default_chunk

    asked = int(knobs["chunk_tokens"])
    calls = [(call.shapes[0][0], call.values[CHUNK]) for call in seen.calls.get(OP, {})]
    # (With fp8 the chosen size is rounded up.)
    wanted = [asked or -(-default_chunk(n) // FP8_ALIGNMENT) * FP8_ALIGNMENT for n, _ in calls]
    given = [found if asked else -(-found // FP8_ALIGNMENT) * FP8_ALIGNMENT for _, found in calls]
    return api.Proof(
        bool(calls) and wanted == given,
        f"the operator was called with chunks of {', '.join(map(str, sorted({found for _, found in calls}))) or 'no'} tokens",
    )


technique = api.Technique(
    name="fused_loss",
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(needs_kernels, no_logit_cap),
    conflicts=("chunked_loss", "liger", "vocab_pad"),
    knobs={
        "chunk_tokens": api.KnobRange(
            (0, 512, 1024, 2048, 4096, 8192, 16384),
            "tokens whose logits exist at once; 0: the kernel chooses",
            _chunk_seen,
        )
    },
    claim=api.Claim(
        "bytes of logits",
        -0.91,
        regime="16,384 tokens in 11 chunks, at the speed of full logits",
        source="arithmetic; gradients in the forward pass: Hsu et al. 2024, arXiv:2410.10989",
        of_memory=True,
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    head_only=True,
    memory=(
        api.MemoryEffect("logits.copies", 0.0, "the gradient overwrites the logits"),
        api.MemoryEffect(
            "logits.tokens",
            0.09,
            "those of one chunk",
            by_knob=lambda knobs: float(knobs["chunk_tokens"]) or 0.09,
        ),
        api.MemoryEffect("logits.padded", 0.0, "chunks are padded"),
        api.MemoryEffect("head.gradient", 1.0, "computed in the forward pass"),
    ),
    settings=(
        api.Setting(
            {"chunk_tokens": 16384}, when=lambda recipe: recipe.micro * recipe.batch.sequence > 16384
        ),
        api.Setting(),
    ),
    work=(
        api.WorkEffect(
            "loss.bytes", 6.0, "logits in 16 bits: read twice, and the gradient written over them"
        ),
        api.WorkEffect("head.unaligned", 1.0, "chunks are padded"),
    ),
)
