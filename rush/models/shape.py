"""The architecture of a model: one frozen `Shape` per size, validated on construction.

A shape determines the tensors and the arithmetic of a decoder, and nothing about training. What all models of a family have
(kinds of norms, biases, activation) is the family's `Structure`; a shape has the numbers. Other code asks a shape for its
features (`has_rope`, `norm`, `gated_mlp`, `window_of`), never for the name of its family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from rush.errors import RecipeError, nearest
from rush.models.families import FAMILIES, Structure
from rush.models.numbers import LARGEST, LARGEST_NUMBER, divisors, positive, whole
from rush.models.rope_scaling import LongRopeScaling, Scaling

__all__ = ["LARGEST", "LARGEST_NUMBER", "AttentionForm", "Shape", "not_of_family"]

_FACTORS = (
    "attention_scale",
    "attention_softcap",
    "logit_softcap",
    "embedding_scale",
    "residual_scale",
    "logit_divisor",
)


@dataclass(frozen=True)
class AttentionForm:
    """How one layer attends, besides causally."""

    scale: float | None = None
    """Multiplies the scores; None: 1/sqrt(head dim)."""
    window: int | None = None
    """A query sees so many keys, its own included; None: all up to its own."""
    softcap: float | None = None
    """Scores are softcap · tanh(score / softcap)."""


@dataclass(frozen=True)
class Shape:
    """The dims of a decoder; `context` is in tokens."""

    family: str
    vocab_size: int
    context: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    tied_head: bool
    rope_theta: float | None = None
    rope_scaling: Scaling | None = None
    rotary_dim: int | None = None
    """Elements of a head that RoPE rotates, the first ones; None: all."""
    rope_layers: tuple[bool, ...] = (True,)
    """Which layers rotate, repeated as often as there are layers."""
    local_rope_theta: float | None = None
    """RoPE's theta in layers with a window, where it is another."""
    window: int | None = None
    """Sliding window in tokens, the query's own included."""
    window_layers: tuple[bool, ...] = (True,)
    """Which layers have the window, repeated as often as there are layers."""
    attention_scale: float | None = None
    """Multiplies the scores; None: 1/sqrt(head_dim)."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    residual_scale: float | None = None
    """Multiplies what a sublayer adds to the residual stream."""
    logit_divisor: float | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise RecipeError(
                f"There is no model family {self.family!r}: {nearest(str(self.family), FAMILIES)}"
            )
        for name, most in LARGEST.items():
            whole(name, getattr(self, name), most)
        positive("norm_eps", self.norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise RecipeError(
                f"num_kv_heads must divide num_heads: found {self.num_kv_heads} key/value heads for "
                f"{self.num_heads} heads. Allowed: {divisors(self.num_heads)}."
            )
        if self.learned_positions:
            self._check_learned_positions()
        else:
            self._check_rope()
        self._check_windows()
        for name in _FACTORS:
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        self._normalize()

    def _check_learned_positions(self) -> None:
        title = FAMILIES[self.family].title
        if self.hidden % self.num_heads:
            raise RecipeError(
                f"num_heads must divide hidden: found {self.num_heads} heads for a hidden size of "
                f"{self.hidden}. Allowed: {divisors(self.hidden)}."
            )
        if self.num_kv_heads != self.num_heads:
            raise RecipeError(
                f"{title} has one key/value head per head: found num_kv_heads {self.num_kv_heads}, "
                f"allowed {self.num_heads}. Grouped-query attention is of the llama family."
            )
        if self.num_heads * self.head_dim != self.hidden:
            raise RecipeError(
                f"{title}'s heads together are as wide as the hidden size: found head_dim {self.head_dim}, "
                f"allowed {self.hidden // self.num_heads} ({self.hidden} / {self.num_heads})."
            )
        if self.rope_theta is not None or self.rope_scaling is not None:
            raise RecipeError(f"{title} learns its positions: leave out rope_theta and rope_scaling.")

    def _check_rope(self) -> None:
        if self.rope_theta is None:
            raise RecipeError(
                f"A {self.family} shape needs rope_theta, the base of RoPE's frequencies (e.g. 500000.0)."
            )
        positive("rope_theta", self.rope_theta)
        if self.local_rope_theta is not None:
            positive("local_rope_theta", self.local_rope_theta)
        if self.head_dim % 2:
            raise RecipeError(
                f"RoPE rotates pairs of elements, so head_dim must be even: found {self.head_dim}."
            )
        if self.rotary_dim is not None:
            whole("rotary_dim", self.rotary_dim, self.head_dim)
            if self.rotary_dim % 2:
                raise RecipeError(
                    f"RoPE rotates pairs of elements, so rotary_dim must be even: found {self.rotary_dim}."
                )
        rotated = self.rotary_dim or self.head_dim
        if (
            isinstance(self.rope_scaling, LongRopeScaling)
            and len(self.rope_scaling.long_factor) != rotated // 2
        ):
            raise RecipeError(
                f"rope_scaling.long_factor must have a factor for each of the {rotated // 2} frequencies: found "
                f"{len(self.rope_scaling.long_factor)}."
            )
        _check_pattern("rope_layers", self.rope_layers)

    def _check_windows(self) -> None:
        _check_pattern("window_layers", self.window_layers)
        if self.window is not None:
            whole("window", self.window, LARGEST["context"])

    def _normalize(self) -> None:
        """A canonical form, so that equal models have equal shapes."""
        put = object.__setattr__
        put(self, "rope_layers", _period(self.rope_layers, self.num_layers))
        put(self, "window_layers", _period(self.window_layers, self.num_layers))
        if self.window is not None and (self.window >= self.context or not any(self.window_layers)):
            put(self, "window", None)  # no row is so long
        if self.window is None and self.local_rope_theta is None:
            put(self, "window_layers", (True,))
        if self.rotary_dim == self.head_dim:
            put(self, "rotary_dim", None)
        if self.attention_scale == self.head_dim**-0.5:
            put(self, "attention_scale", None)
        for name in ("embedding_scale", "residual_scale", "logit_divisor"):
            if getattr(self, name) == 1.0:
                put(self, name, None)

    # --- features ------------------------------------------------------------------------------------

    @property
    def structure(self) -> Structure:
        return FAMILIES[self.family].structure

    @property
    def learned_positions(self) -> bool:
        return self.structure.learned_positions

    @property
    def has_rope(self) -> bool:
        return not self.structure.learned_positions

    @property
    def norm(self) -> Literal["rms", "layer"]:
        return self.structure.norm

    @property
    def norms_before(self) -> bool:
        """Whether sublayers read a normalized residual stream."""
        return self.structure.norm_position != "after"

    @property
    def norms_after(self) -> bool:
        """Whether what sublayers add is normalized."""
        return self.structure.norm_position != "before"

    @property
    def qk_norm(self) -> Literal["none", "head", "width"]:
        return self.structure.qk_norm

    @property
    def gated_mlp(self) -> bool:
        return self.structure.gated_mlp

    @property
    def activation(self) -> Literal["silu", "gelu"]:
        return self.structure.activation

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Output features of queries, keys and values."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys

    @property
    def joined_qkv(self) -> bool:
        return self.structure.joined_qkv

    @property
    def qkv_biases(self) -> bool:
        return self.structure.biases != "none"

    @property
    def all_biases(self) -> bool:
        """Whether every linear layer but the LM head has a bias."""
        return self.structure.biases == "all"

    @property
    def has_windows(self) -> bool:
        return self.window is not None

    def is_local(self, layer: int) -> bool:
        """Whether a layer is one of those with a window."""
        local = self.window is not None or self.local_rope_theta is not None
        return local and self.window_layers[layer % len(self.window_layers)]

    def window_of(self, layer: int) -> int | None:
        return self.window if self.is_local(layer) else None

    def rotates(self, layer: int) -> bool:
        return self.has_rope and self.rope_layers[layer % len(self.rope_layers)]

    @property
    def rope_switch(self) -> int | None:
        """Rows of more tokens have other frequencies at every position (LongRoPE)."""
        return self.rope_scaling.original_context if isinstance(self.rope_scaling, LongRopeScaling) else None

    def attention_form(self, layer: int) -> AttentionForm:
        return AttentionForm(self.attention_scale, self.window_of(layer), self.attention_softcap)


def not_of_family(shape: Shape) -> list[str]:
    """Fields that no config.json of the family can express: an exported model would differ."""
    family = FAMILIES[shape.family]
    config = {"vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tied_head, **family.write(shape)}
    again = Shape(shape.family, **family.read(config))
    return [one.name for one in fields(Shape) if getattr(again, one.name) != getattr(shape, one.name)]


def _check_pattern(name: str, pattern: object) -> None:
    if not isinstance(pattern, tuple) or not pattern or not all(isinstance(one, bool) for one in pattern):
        raise RecipeError(f"{name} must be a tuple of true and false: found {pattern!r:.80}.")


def _period(pattern: Sequence[bool], num_layers: int) -> tuple[bool, ...]:
    """The shortest pattern that repeats to the same layers."""
    layers = [pattern[layer % len(pattern)] for layer in range(num_layers)]
    for length in range(1, num_layers):
        if all(one == layers[place % length] for place, one in enumerate(layers)):
            return tuple(layers[:length])
    return tuple(layers)
