"""The decoder all families share: embedding, blocks, final norm, LM head.

One forward serves training and inference: with labels it returns the summed loss, without them the logits. So a wrapper
(compile, DDP, FSDP) wraps one module.

A technique changes a model through its slots, per instance: `block.attention.core`,
`block.attention.rotate`, the norms (`norms()` lists them), `block.mlp` and its `activation`, the steps between layers (`split`, `widen`,
`fan_out`), `model.loss_head`, `model.document_form` (how packed documents are described to attention), and the linear
layers that `linears()` lists by role. The forward does not depend on what fills a slot.

Shapes: b batch, t position, d hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from rush.errors import DataError
from rush.models.initial import initial_values
from rush.models.layers import (
    DocumentIds,
    KVCache,
    LayerCache,
    LayerNorm,
    PlainLossHead,
    RMSNorm,
    losses_by_row,
    soft_cap,
)
from rush.models.rotary import Rotary
from rush.models.shape import Shape

Angles = tuple[Tensor, Tensor]
"""RoPE's cosines and sines."""


class Block(nn.Module):
    """Attention, then an MLP; each reads a normalized copy of the residual stream and adds to it.

    Some families normalize or scale what is added; a norm that a family does not have is the identity before a sublayer, and
    None after it.
    """

    def __init__(
        self,
        attention_norm: nn.Module,
        attention: nn.Module,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        *,
        attention_post_norm: nn.Module | None = None,
        mlp_post_norm: nn.Module | None = None,
        residual_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.attention_post_norm = attention_post_norm
        self.mlp_post_norm = mlp_post_norm
        self.residual_scale = residual_scale

    def forward(
        self,
        x_btd: Tensor,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        documents: Any = None,
        cache: LayerCache | None = None,
        query_offset: int = 0,
    ) -> Tensor:
        # (No name for the output: it is freed before the MLP.)
        x_btd = x_btd + self.added(
            self.attention(
                self.attention_norm(x_btd),
                rotary=rotary,
                documents=documents,
                cache=cache,
                query_offset=query_offset,
            ),
            self.attention_post_norm,
        )
        return x_btd + self.added(self.mlp(self.mlp_norm(x_btd)), self.mlp_post_norm)

    def added(self, output_btd: Tensor, post_norm: nn.Module | None) -> Tensor:
        """What a sublayer's output adds to the residual stream."""
        if post_norm is not None:
            output_btd = post_norm(output_btd)
        return output_btd if self.residual_scale is None else output_btd * self.residual_scale


class Elsewhere(nn.Module):
    """Placeholder for a module of another rank: it has no parameters and is never called."""


class Decoder(nn.Module):
    """A causal language model. Each family defines its embedding and its blocks."""

    block_linears: ClassVar[Mapping[str, str]]  # role -> the linear's name within a block

    def __init__(self, shape: Shape, blocks: Sequence[Block], final_norm: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden)
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = final_norm
        self.head = nn.Linear(shape.hidden, shape.vocab_size, bias=False)
        self.loss_head: nn.Module = PlainLossHead(shape.logit_softcap)
        self.document_form: nn.Module = DocumentIds()
        self.rotary: Rotary | None = None
        self.local_rotary: Rotary | None = None
        """RoPE of layers with a window, where it is another."""
        # Gemma: sqrt(hidden), rounded to the dtype of the weights.
        self.width_scales = {
            dtype: float(torch.tensor(shape.hidden**0.5, device="cpu", dtype=dtype))
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        }
        self.tie_head()
        self.register_state_dict_post_hook(_drop_tied_head)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_restore_tied_head)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_tie_after_loading)  # type: ignore[no-untyped-call]

    def embed(self, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        """Token ids to vectors; GPT-2 adds its learned positions here."""
        x_btd: Tensor = self.embedding(tokens_bt)
        if self.shape.structure.embedding_by_width:
            x_btd = x_btd * self.width_scales[x_btd.dtype]
        scale = self.shape.embedding_scale
        return x_btd if scale is None else x_btd * scale

    def forward(
        self,
        tokens_bt: Tensor,
        labels_bt: Tensor | None = None,
        *,
        positions_bt: Tensor | None = None,
        documents_bt: Tensor | None = None,
        starts_n: Tensor | None = None,
        cache: KVCache | None = None,
        by_row: bool = False,
    ) -> Tensor:
        """fp32 logits [b, t, v]; given labels (already shifted, -100 ignored), the fp32 sum of their NLL (`by_row`: of each
        row [b]).

        Positions continue from the cache unless given. `documents_bt` is the document id of each token, within which it
        attends (positions are not reset); `starts_n` are the document starts in the flattened batch.
        """
        num_new = tokens_bt.shape[1]
        offset = 0
        if cache is not None:
            assert not torch.is_grad_enabled(), (
                "a KV cache is for inference: call the model under torch.no_grad()"
            )
            assert documents_bt is None, "a KV cache holds one document per row"
            offset = cache.length
            _check_length("the cache", offset + num_new, cache.capacity)
        if positions_bt is None:
            _check_length("the model", offset + num_new, self.shape.context)
            positions_bt = torch.arange(offset, offset + num_new, device=tokens_bt.device)[None]

        row_tokens = None if cache is None else cache.row_tokens
        rotary, documents = self.attention_inputs(positions_bt, documents_bt, starts_n, row_tokens)
        x_btd = self.embed(tokens_bt, positions_bt)
        for layer, block in enumerate(self.blocks):
            x_btd = block(
                x_btd,
                rotary=rotary[layer],
                documents=documents,
                cache=None if cache is None else cache.layers[layer],
                query_offset=offset,
            )
        if cache is not None:
            cache.length = offset + num_new
        return self.predict(x_btd, labels_bt, by_row=by_row)

    def attention_inputs(
        self,
        positions_bt: Tensor,
        documents_bt: Tensor | None,
        starts_n: Tensor | None,
        row_tokens: int | None = None,
    ) -> tuple[list[Angles | None], Any]:
        """What blocks get besides the hidden states: RoPE's cosines and sines for each layer, and the packed documents."""
        documents = None if documents_bt is None else self.document_form(documents_bt, starts_n)
        shape = self.shape
        whole = None if self.rotary is None else self.rotary(positions_bt, row_tokens)
        local = whole if self.local_rotary is None else self.local_rotary(positions_bt)
        angles = [
            (local if shape.is_local(layer) else whole) if shape.rotates(layer) else None
            for layer in range(shape.num_layers)
        ]
        return angles, documents

    def predict(self, x_btd: Tensor, labels_bt: Tensor | None, *, by_row: bool = False) -> Tensor:
        """Final norm and LM head: logits, or the loss of the labels."""
        hidden_btd = self.final_norm(x_btd)
        if self.shape.logit_divisor is not None:
            hidden_btd = hidden_btd / self.shape.logit_divisor  # so that any loss head divides its logits
        if labels_bt is None:
            return soft_cap(self.head(hidden_btd).float(), self.shape.logit_softcap)
        if by_row:
            return losses_by_row(self.loss_head, hidden_btd, self.head.weight, labels_bt)
        loss: Tensor = self.loss_head(hidden_btd, self.head.weight, labels_bt)
        return loss

    def norms(self) -> Iterator[tuple[nn.Module, str, nn.Module]]:
        """Every norm: the module that has it, its name there, and itself."""
        for owner in self.modules():
            for name, module in owner.named_children():
                if isinstance(module, LayerNorm | RMSNorm):
                    yield owner, name, module

    def rotaries(self) -> list[Rotary]:
        return [rotary for rotary in (self.rotary, self.local_rotary) if rotary is not None]

    def linears(self) -> dict[str, list[tuple[str, nn.Linear]]]:
        """The linear layers by role, with their qualified names; LoRA, fp8 and sharding replace or change them."""
        found: dict[str, list[tuple[str, nn.Linear]]] = {}
        for role, path in self.block_linears.items():
            names = [f"blocks.{layer}.{path}" for layer, _ in self.blocks.named_children()]
            found[role] = [(name, _linear(self.get_submodule(name))) for name in names]
        found["head"] = [("head", self.head)] if self.holds("head.weight") else []
        return found

    def holds(self, name: str) -> bool:
        """Whether the module of this parameter is on this rank."""
        owner, _, _ = name.rpartition(".")
        first, _, rest = owner.partition(".")
        if first == "blocks":
            return hasattr(self.blocks, rest.partition(".")[0])
        return not isinstance(getattr(self, first), Elsewhere)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty KV cache for `batch` rows of up to `capacity` tokens, on the device of the weights."""
        weight = self.embedding.weight
        return KVCache(self.shape, batch=batch, capacity=capacity, device=weight.device, dtype=weight.dtype)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialize every parameter, by the seed and its name alone. Techniques initialize the parameters they add."""
        for name, value in initial_values(self.shape, seed, self.holds):
            owner, _, own = name.rpartition(".")
            module = self.get_submodule(owner)
            set_weight: Any = getattr(module, "set_weight", None)
            if own == "weight" and set_weight is not None:
                set_weight(value)  # a quantized layer converts it
                continue
            parameter = module.get_parameter(own)
            assert parameter.shape == value.shape, f"{name}: {tuple(parameter.shape)} {tuple(value.shape)}"
            parameter.copy_(value)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Compute RoPE's frequencies on the device of the weights (after weights were assigned in place)."""
        for rotary in self.rotaries():
            rotary.fill(next(self.parameters()).device)

    def tie_head(self) -> None:
        """Tie the LM head to the embedding where the shape says so and the head is on this rank."""
        tied = self.shape.tied_head and self.holds("head.weight")
        if tied and self.head.weight is not self.embedding.weight:
            self.head.weight = self.embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `to_empty` replaces every parameter, which would untie the head.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie_head()
        return self


def check_tokens(shape: Shape, tokens: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> None:
    """Refuse ids outside the vocabulary and rows longer than the context, on the host.

    On an accelerator an out-of-range id is a device-side assert that ends the process, and a check would synchronize.
    """
    ids = torch.as_tensor(tokens)
    if ids.numel() == 0:
        return
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DataError(f"Token ids must be whole numbers: found {ids.dtype}.")
    ids = ids.to(torch.int64)  # small unsigned types, as token files have them, cannot be compared everywhere
    if ids.shape[-1] > shape.context:
        raise DataError(
            f"A row of {ids.shape[-1]} tokens is longer than the model's context of {shape.context}: "
            f"cut it, or use a model with a longer context."
        )
    wrong = (ids < 0) | (ids >= shape.vocab_size)
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        found = int(ids[tuple(where)])
        place = f"position {where[-1]}" if len(where) == 1 else f"row {where[0]}, position {where[-1]}"
        raise DataError(
            f"Token id {found} at {place} is outside the vocabulary: allowed are 0 to "
            f"{shape.vocab_size - 1}. Was the text tokenized for another model?"
        )


def _check_length(holder: str, length: int, limit: int) -> None:
    if length > limit:
        raise DataError(
            f"{length} tokens are more than {holder} can hold: at most {limit}. Use shorter rows."
        )


def _linear(module: nn.Module) -> nn.Linear:
    assert isinstance(module, nn.Linear), type(module)
    return module


# A tied head is one tensor under two names. It is stored once: safetensors refuses tensors that share memory.


def _drop_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    assert isinstance(module, Decoder)
    if module.shape.tied_head:
        state.pop(f"{prefix}head.weight", None)


def _restore_tied_head(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    assert isinstance(module, Decoder)
    embedding = state.get(f"{prefix}embedding.weight")
    if module.shape.tied_head and embedding is not None and module.holds("head.weight"):
        state[f"{prefix}head.weight"] = embedding


def _tie_after_loading(module: nn.Module, _incompatible: object) -> None:
    assert isinstance(module, Decoder)
    module.tie_head()
