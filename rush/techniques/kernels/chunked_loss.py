"""Chunked loss: the logits of all tokens never exist at once.

Logits are tokens × vocabulary: with 16,000 tokens and a vocabulary of 128,000, 8 GB in fp32, and as much
again for their gradient. Here the loss head takes a chunk of tokens, computes its logits, adds up its loss
and discards them; the backward pass recomputes them. The price is one more LM head matmul. It saves memory
(for a larger batch, most of all); by itself it does not make a step faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rush.techniques.api.contract as api
from rush.models.layers import soft_cap
from rush.techniques.api.evidence import head_rows

# Shapes: b batch, t positions, n tokens of a chunk, d hidden, v vocabulary.


class Projection(nn.Module):
    """Hidden states to logits; `vocab_pad` replaces it."""

    def forward(self, hidden_nd: Tensor, head_weight_vd: Tensor) -> Tensor:
        return F.linear(hidden_nd, head_weight_vd)


class ChunkedLossHead(nn.Module):
    """The summed loss over chunks of tokens; each chunk's logits are recomputed in the backward pass."""

    recomputes = True

    def __init__(self, chunk_tokens: int, project: nn.Module, softcap: float | None = None) -> None:
        super().__init__()
        self.chunk_tokens = chunk_tokens
        self.project = project
        self.softcap = softcap

    def forward(self, hidden_btd: Tensor, head_weight_vd: Tensor, labels_bt: Tensor) -> Tensor:
        parts: list[Tensor] = []
        chunks = torch.split(hidden_btd.flatten(0, 1), self.chunk_tokens)
        labels = torch.split(labels_bt.flatten(), self.chunk_tokens)
        for hidden_nd, labels_n in zip(chunks, labels, strict=True):
            if torch.is_grad_enabled():
                part = checkpoint(
                    self._chunk_loss,
                    hidden_nd,
                    head_weight_vd,
                    labels_n,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                part = self._chunk_loss(hidden_nd, head_weight_vd, labels_n)
            parts.append(part)
        return sum(parts[1:], parts[0])

    def _chunk_loss(self, hidden_nd: Tensor, head_weight_vd: Tensor, labels_n: Tensor) -> Tensor:
        logits_nv = soft_cap(self.project(hidden_nd, head_weight_vd).float(), self.softcap)
        return F.cross_entropy(logits_nv, labels_n, ignore_index=-100, reduction="sum")


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.model.loss_head = ChunkedLossHead(
        int(knobs["chunk_tokens"]), Projection(), build.model.shape.logit_softcap
    )


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The largest LM head matmul covered a chunk of tokens, and not all of a micro batch."""
    rows, tokens = head_rows(seen), seen.micro_tokens
    return api.Proof(
        rows < tokens and rows == int(knobs["chunk_tokens"]),
        f"the LM head matmul covered at most {rows:,} of {tokens:,} tokens at once",
    )


technique = api.Technique(
    name="chunked_loss",
    stage=api.Stage.MODEL,
    apply=apply,
    conflicts=("fused_loss", "liger"),
    knobs={
        "chunk_tokens": api.KnobRange(
            (1024, 256, 512, 2048, 4096, 64), "tokens whose logits exist at once", evidence
        )
    },
    claim=api.Claim(
        "bytes of logits",
        -0.94,
        regime="16,384 tokens in chunks of 1,024",
        source="arithmetic; the idea at its limit: Wijmans et al. 2024, arXiv:2411.09009",
        of_memory=True,
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    head_only=True,
    memory=(
        api.MemoryEffect(
            "logits.tokens", 1024.0, "those of one chunk", by_knob=lambda knobs: float(knobs["chunk_tokens"])
        ),
    ),
    settings=(
        api.Setting({"chunk_tokens": 4096}, when=lambda recipe: recipe.micro * recipe.batch.sequence > 4096),
        api.Setting(when=lambda recipe: recipe.micro * recipe.batch.sequence > 1024),
    ),
    work=(api.WorkEffect("head.recomputed", 2.0, "logits are recomputed"),),
)
