"""A decoder cut into stages, one after another: which blocks each gets, and a module that computes one of them.

A pipeline is as fast as its slowest stage. So blocks are dealt out by what they cost, and the ends are counted: the
head is a matmul as wide as the vocabulary, in small models worth several blocks; the embedding is a lookup, worth
nothing in arithmetic but as much as the head in memory.

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
    """Blocks `start` to `end` (not included); the first stage embeds too, the last one predicts."""

    number: int
    start: int
    end: int
    is_first: bool
    is_last: bool
    cost: float
    """Its share of the whole."""

    def __str__(self) -> str:
        parts = ["embedding"] * self.is_first
        parts += [
            f"block {self.start}" if self.end == self.start + 1 else f"blocks {self.start}-{self.end - 1}"
        ]
        parts += ["head"] * self.is_last
        return f"{' + '.join(parts)} ({self.cost:.0%})"


def costs(shape: Shape, sequence: int, balance: str) -> tuple[float, float, float]:
    """What the embedding, one block and the head cost: multiplications of a token, or parameters."""
    vocabulary = shape.vocab_size * shape.hidden
    specs = [spec for spec in list_parameters(shape) if spec.name.startswith("blocks.0.")]
    if balance == "parameters":
        return vocabulary, sum(spec.count for spec in specs), vocabulary
    scores = shape.num_heads * shape.head_dim * sequence
    return 0.0, sum(spec.count for spec in specs if spec.matmul) + scores, vocabulary


def split(shape: Shape, num_stages: int, sequence: int, balance: str = "flops") -> tuple[Span, ...]:
    """The stages whose most expensive one is cheapest; of those the most even. Each has a block at least."""
    layers = shape.num_layers
    assert 1 <= num_stages <= layers, f"{num_stages} stages for {layers} blocks"
    embedding, block, head = costs(shape, sequence, balance)

    def cost(number: int, blocks: int) -> float:
        return blocks * block + embedding * (number == 0) + head * (number == num_stages - 1)

    @cache
    def best(number: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        """Highest cost, sum of squares and sizes of the stages from this one on, which share the blocks left."""
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
    """What one stage computes, of a model whose parts it shares: a way to call it, not another owner of its weights.

    A schedule calls it with what came from the stage before (nothing, for the first). What it is to compute then is in
    `call`, which whoever runs the schedule puts there.
    """

    def __init__(self, model: Decoder, span: Span) -> None:
        super().__init__()
        self.span = span
        self.blocks = nn.ModuleList(model.blocks.get_submodule(str(n)) for n in range(span.start, span.end))
        ends = _ends(model, span.is_first, span.is_last)
        self.ends = nn.ModuleDict({name: model.get_submodule(name) for name in sorted(ends)})
        # Not as a child: its other stages are no part of this one.
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
        """The hidden state after this stage; of the last one the summed loss."""
        model: Decoder = self.__dict__["model"]
        if positions_bt is None:
            positions_bt = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)[None]
        rotary, documents = model.described(positions_bt, documents_bt, starts_n)
        if self.span.is_first:
            x_btd = model.embed(tokens_bt, positions_bt)
        assert x_btd is not None
        for block in self.blocks:
            x_btd = block(x_btd, rotary=rotary, documents=documents)
        assert x_btd is not None
        return model.predict(x_btd, labels_bt) if self.span.is_last else x_btd


def keep(model: Decoder, spans: Iterable[Span]) -> list[StageModule]:
    """Take from the model all that is not of these stages (names stay as they are), and make a module of each."""
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
    """The children of a model that are needed before its first block, and after its last."""
    # A tied head's weight goes by the embedding's name.
    last = {"final_norm", "head", "loss_head", *(["embedding"] if model.shape.tied_head else [])}
    first = {"embedding", "position_embedding"}.intersection(name for name, _ in model.named_children())
    return (first if is_first else set()) | (last if is_last else set())
