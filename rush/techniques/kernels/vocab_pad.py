"""Pad the vocabulary of the LM head to a multiple of 64.

Matmul kernels work in tiles, and tensor cores need dims that are multiples of 8, better of 64. GPT-2's
vocabulary of 50,257 is odd: the largest matmul of the model runs on the slow path. Padded to 50,304 it does
more FLOPs in less time. The padding exists only inside the loss head: zero rows are appended to the weight
for the matmul, and their logits are dropped before the loss, so weights, checkpoints and exports keep the
published shape. An aligned vocabulary gains nothing, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.models import Decoder
from rush.models.layers import soft_cap
from rush.techniques.kernels.chunked_loss import Projection

# Shapes: n tokens, d hidden, v vocabulary.

DEFAULT = 64


class PaddedProjection(Projection):
    """Logits by `matmul(hidden, weight)` with a zero-padded weight; the padding's logits are dropped."""

    def __init__(self, padded: int, matmul: Callable[[Tensor, Tensor], Tensor] = F.linear) -> None:
        super().__init__()
        self.padded, self.matmul = padded, matmul

    def forward(self, hidden_nd: Tensor, head_weight_vd: Tensor) -> Tensor:
        vocab_size = head_weight_vd.shape[0]
        if self.padded == vocab_size:
            return self.matmul(hidden_nd, head_weight_vd)
        weight = F.pad(head_weight_vd, (0, 0, 0, self.padded - vocab_size))
        return self.matmul(hidden_nd, weight)[..., :vocab_size]


class ProjectedLossHead(nn.Module):
    """The plain loss head with a replaceable projection."""

    def __init__(self, project: nn.Module, softcap: float | None = None) -> None:
        super().__init__()
        self.project, self.softcap = project, softcap

    def forward(self, hidden_btd: Tensor, head_weight_vd: Tensor, labels_bt: Tensor) -> Tensor:
        logits_nv = soft_cap(self.project(hidden_btd.flatten(0, 1), head_weight_vd).float(), self.softcap)
        return F.cross_entropy(logits_nv, labels_bt.flatten(), ignore_index=-100, reduction="sum")


def set_projection(model: Decoder, projection: Projection) -> None:
    """Replace the projection of a loss head that has one, else the loss head."""
    if hasattr(model.loss_head, "project"):
        model.loss_head.project = projection
    else:
        model.loss_head = ProjectedLossHead(projection, model.shape.logit_softcap)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    multiple = int(knobs["multiple"])
    padded = -(-build.model.shape.vocab_size // multiple) * multiple
    build.facts.padded_vocab_size = padded
    set_projection(build.model, PaddedProjection(padded))


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """LM head matmuls have the padded vocabulary, none the true one."""
    multiple, true = int(knobs["multiple"]), seen.shape.vocab_size
    padded = -(-true // multiple) * multiple
    widths = {size for shape in seen.matmul_shapes for size in shape if size in (true, padded)}
    return api.Proof(
        widths == {padded} and padded != true,
        f"LM head matmuls were {', '.join(map(str, sorted(widths))) or 'not seen'} wide "
        f"(the vocabulary is {true})",
    )


technique = api.Technique(
    name="vocab_pad",
    stage=api.Stage.MODEL,
    apply=apply,
    conflicts=("fused_loss", "liger", "tp"),
    after=("chunked_loss",),
    requires=(
        api.Requirement(
            "it needs a vocabulary that is not a multiple of the padding already",
            lambda machine, recipe: (
                recipe.shape().vocab_size % int(api.knob_of(recipe, "vocab_pad", "multiple", DEFAULT)) != 0
            ),
        ),
    ),
    knobs={
        "multiple": api.KnobRange((DEFAULT, 128), "the padded vocabulary is a multiple of this", evidence)
    },
    claim=api.Claim(
        "tokens_per_s",
        0.25,
        regime="GPT-2 124M, vocabulary of 50,257 padded to 50,304, one A100",
        source="A. Karpathy on nanoGPT, February 2023",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    head_only=True,
    memory=(
        api.MemoryEffect("buffers", 1.0, "a padded copy of the LM head's weight during the loss"),
        api.MemoryEffect("logits.padded", 0.0, "nothing is left to pad"),
    ),
    work=(api.WorkEffect("head.unaligned", 1.0),),
)
