"""Pipeline stages of a decoder: which blocks each stage has, and the module of one stage.

A pipeline is as fast as its slowest stage. So blocks are assigned by cost, including the ends: the LM head is a matmul as
wide as the vocabulary, which in small models costs as much as several blocks; the embedding is a lookup without FLOPs, but
takes as much memory as the head.

Shapes: b batch, t position, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from rush.models.counts import list_parameters
from rush.models.decoder import Decoder, Elsewhere
from rush.models.shape import Shape


@dataclass(frozen=True)
class Span:
    """Blocks `start` to `end` (exclusive); the first stage has the embedding, the last one the LM head."""

    number: int
    start: int
    end: int
    is_first: bool
    is_last: bool
    cost: float
    """Fraction of the total cost."""

    def __str__(self) -> str:
        parts = ["embedding"] * self.is_first
        parts += [
            f"block {self.start}" if self.end == self.start + 1 else f"blocks {self.start}-{self.end - 1}"
        ]
        parts += ["head"] * self.is_last
        return f"{' + '.join(parts)} ({self.cost:.0%})"


def costs(shape: Shape, sequence: int, balance: str) -> tuple[float, float, float]:
    """Costs of the embedding, one block and the LM head: multiply-adds per token, or parameters."""
    vocabulary = shape.vocab_size * shape.hidden
    specs = [spec for spec in list_parameters(shape) if spec.name.startswith("blocks.0.")]
    if balance == "parameters":
        return vocabulary, sum(spec.count for spec in specs), vocabulary
    scores = shape.num_heads * shape.head_dim * sequence
    return 0.0, sum(spec.count for spec in specs if spec.matmul) + scores, vocabulary


def split(shape: Shape, num_stages: int, sequence: int, balance: str = "flops") -> tuple[Span, ...]:
    """The split with the lowest maximum cost; in a tie the most even one. Every stage has at least one block."""
    layers = shape.num_layers
    assert 1 <= num_stages <= layers, f"{num_stages} stages for {layers} blocks"
    embedding, block, head = costs(shape, sequence, balance)

    def cost(number: int, blocks: int) -> float:
        return blocks * block + embedding * (number == 0) + head * (number == num_stages - 1)

    @cache
    def best(number: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """Maximum cost, sum of squares and sizes of the stages from this one on, for the blocks left."""
        later = num_stages - number - 1
        if later == 0:
            own = cost(number, left)
            return own, own**2, (left,)
        found = []
        for blocks in range(1, left - later + 1):
            own, (highest, squares, sizes) = cost(number, blocks), best(number + 1, left - blocks)
            found.append((max(own, highest), own**2 + squares, (blocks, *sizes)))
        return min(found)

    total, start, spans = embedding + layers * block + head, 0, []
    for number, blocks in enumerate(best(0, layers)[2]):
        share = cost(number, blocks) / total
        spans.append(Span(number, start, start + blocks, number == 0, number == num_stages - 1, share))
        start += blocks
    return tuple(spans)


class StageModule(nn.Module):
    """The forward of one pipeline stage. It shares the modules of its model and does not own their weights.

    The schedule calls it with the output of the previous stage (nothing, for the first one); `call`, set by the runner of the
    schedule, does the rest.
    """

    def __init__(self, model: Decoder, span: Span) -> None:
        super().__init__()
        self.span = span
        self.blocks = nn.ModuleList(model.blocks.get_submodule(str(n)) for n in range(span.start, span.end))
        ends = _ends(model, span.is_first, span.is_last)
        self.ends = nn.ModuleDict({name: model.get_submodule(name) for name in sorted(ends)})
        # Not as a child module: its other stages do not belong to this one.
        self.__dict__["model"] = model
        self.call: Callable[..., Tensor] = self.compute

    def forward(self, *received: Tensor) -> Tensor:
        return self.call(*received)

    def compute(
        self,
        x_btd: Tensor | None,
        tokens_bt: Tensor,
        labels_bt: Tensor,
        *,
        positions_bt: Tensor | None = None,
        documents_bt: Tensor | None = None,
        starts_n: Tensor | None = None,
    ) -> Tensor:
        """The hidden states after this stage; for the last one, the summed loss."""
        model: Decoder = self.__dict__["model"]
        if positions_bt is None:
            positions_bt = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)[None]
        rotary, documents = model.attention_inputs(positions_bt, documents_bt, starts_n)
        if self.span.is_first:
            x_btd = model.embed(tokens_bt, positions_bt)
        assert x_btd is not None
        for layer, block in enumerate(self.blocks, start=self.span.start):
            x_btd = block(x_btd, rotary=rotary[layer], documents=documents)
        assert x_btd is not None
        return model.predict(x_btd, labels_bt) if self.span.is_last else x_btd


def keep(model: Decoder, spans: Iterable[Span]) -> list[StageModule]:
    """Remove all other stages from the model (parameter names are unchanged), and build a module for each of these."""
    spans = list(spans)
    own = {str(layer) for span in spans for layer in range(span.start, span.end)}
    for layer, _ in list(model.blocks.named_children()):
        if layer not in own:
            delattr(model.blocks, layer)
    is_first, is_last = any(s.is_first for s in spans), any(s.is_last for s in spans)
    held = _ends(model, is_first, is_last)
    for name in _ends(model, True, True) - held:
        setattr(model, name, Elsewhere())
    return [StageModule(model, span) for span in spans]


def _ends(model: Decoder, is_first: bool, is_last: bool) -> set[str]:
    """The children of a model needed before its first block and after its last."""
    # A tied head's weight is the embedding's.
    last = {"final_norm", "head", "loss_head", *(["embedding"] if model.shape.tied_head else [])}
    first = {"embedding", "position_embedding"}.intersection(name for name, _ in model.named_children())
    return (first if is_first else set()) | (last if is_last else set())
