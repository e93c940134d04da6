"""The architecture of a model: one frozen `Shape` per size, validated on construction.

A shape determines the tensors and the arithmetic of a decoder, and nothing about training. The two families differ in a few
choices: GPT-2 has learned positions, LayerNorm and biases; Llama has RoPE, grouped-query attention, RMSNorm and a gated MLP.
`SIZES` holds the published shapes under the names that recipes use, and two toy shapes for a laptop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from rush.errors import RecipeError, nearest

Family = Literal["gpt2", "llama"]
FAMILIES: tuple[Family, ...] = ("gpt2", "llama")


LARGEST = {
    "vocab_size": 2**24,
    "context": 2**31,
    "hidden": 2**20,
    "num_layers": 2**12,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "intermediate": 2**24,
}
"""Bounds of the dims: far above any model, and small enough that nothing hangs or overflows before a message."""
LARGEST_NUMBER = 1e30
"""Bound of norm_eps and of RoPE's numbers, which are computed with in fp32."""


@dataclass(frozen=True)
class LinearRopeScaling:
    """Position interpolation (Chen et al., arXiv:2306.15595): every frequency is divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _positive("rope_scaling.factor", self.factor)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's RoPE scaling, which extends the context beyond `original_context`.

    A frequency with more than `high_freq_factor` rotations within the original context is unchanged, one with fewer than
    `low_freq_factor` is divided by `factor`, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        for field in fields(self):
            _positive(f"rope_scaling.{field.name}", getattr(self, field.name))
        _whole("rope_scaling.original_context", self.original_context, LARGEST["context"])
        if self.high_freq_factor <= self.low_freq_factor:
            raise RecipeError(
                f"rope_scaling.high_freq_factor must be greater than low_freq_factor: found "
                f"{self.high_freq_factor} and {self.low_freq_factor}."
            )


@dataclass(frozen=True)
class Shape:
    """The dims of a decoder; `context` is in tokens."""

    family: Family
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
    rope_scaling: RopeScaling | LinearRopeScaling | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise RecipeError(
                f"There is no model family {self.family!r}: {nearest(str(self.family), FAMILIES)}"
            )
        for name, most in LARGEST.items():
            _whole(name, getattr(self, name), most)
        _positive("norm_eps", self.norm_eps)
        if self.hidden % self.num_heads:
            raise RecipeError(
                f"num_heads must divide hidden: found {self.num_heads} heads for a hidden size of "
                f"{self.hidden}. Allowed: {_divisors(self.hidden)}."
            )
        if self.num_heads % self.num_kv_heads:
            raise RecipeError(
                f"num_kv_heads must divide num_heads: found {self.num_kv_heads} key/value heads for "
                f"{self.num_heads} heads. Allowed: {_divisors(self.num_heads)}."
            )
        if self.family == "gpt2":
            self._check_gpt2()
        else:
            self._check_llama()

    def _check_gpt2(self) -> None:
        if self.num_kv_heads != self.num_heads:
            raise RecipeError(
                f"GPT-2 has one key/value head per head: found num_kv_heads {self.num_kv_heads}, "
                f"allowed {self.num_heads}. Grouped-query attention is of the llama family."
            )
        if self.num_heads * self.head_dim != self.hidden:
            raise RecipeError(
                f"GPT-2's heads together are as wide as the hidden size: found head_dim {self.head_dim}, "
                f"allowed {self.hidden // self.num_heads} ({self.hidden} / {self.num_heads})."
            )
        if self.rope_theta is not None or self.rope_scaling is not None:
            raise RecipeError("GPT-2 learns its positions: leave out rope_theta and rope_scaling.")

    def _check_llama(self) -> None:
        if self.rope_theta is None:
            raise RecipeError(
                "A llama shape needs rope_theta, the base of RoPE's frequencies (e.g. 500000.0)."
            )
        _positive("rope_theta", self.rope_theta)
        if self.head_dim % 2:
            raise RecipeError(
                f"RoPE rotates pairs of elements, so head_dim must be even: found {self.head_dim}."
            )


def _whole(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise RecipeError(f"{name} must be a whole number from 1 to {most:,}: found {str(value)[:40]}.")


def _positive(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < LARGEST_NUMBER:  # type: ignore[operator]
        raise RecipeError(
            f"{name} must be a number greater than 0 and less than {LARGEST_NUMBER:g}: found {value!r:.80}."
        )


ROPE_TYPES: dict[str, type[RopeScaling | LinearRopeScaling]] = {
    "llama3": RopeScaling,
    "linear": LinearRopeScaling,
}
"""The kinds of RoPE scaling under their names in Hugging Face's configs; `default` there means none."""


def rope_type(scaling: RopeScaling | LinearRopeScaling) -> str:
    return next(name for name, kind in ROPE_TYPES.items() if type(scaling) is kind)


def rope_scaling_from(
    table: Mapping[str, Any], base: object = None
) -> RopeScaling | LinearRopeScaling | None:
    """The scaling that a table of a recipe describes; what it leaves out is the base's, where that has the same type."""
    known = {} if base is None else {field.name: getattr(base, field.name) for field in fields(base)}  # type: ignore[arg-type]
    named = rope_type(base) if isinstance(base, RopeScaling | LinearRopeScaling) else None
    kind = table.get("rope_type", named)
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise RecipeError(
            f"rope_scaling.rope_type is {kind!r:.80}; {nearest(str(kind)[:80], [*ROPE_TYPES, 'default'])}"
        )
    wanted = [field.name for field in fields(ROPE_TYPES[kind])]
    given = {**(known if kind == named else {}), **{k: v for k, v in table.items() if k != "rope_type"}}
    for key in given.keys() - wanted:
        raise RecipeError(
            f"rope_scaling.{key} is not a key of {kind} scaling; {nearest(key, ['rope_type', *wanted])}"
        )
    if missing := [key for key in wanted if key not in given]:
        raise RecipeError(f"rope_scaling of type {kind} lacks {', '.join(missing)}.")
    return ROPE_TYPES[kind](**given)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def gpt2_shape(
    num_layers: int, hidden: int, num_heads: int, *, vocab_size: int = 50257, context: int = 1024
) -> Shape:
    """GPT-2 with the published proportions: an MLP of 4 × hidden, a tied head."""
    return Shape(
        family="gpt2",
        vocab_size=vocab_size,
        context=context,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden // num_heads,
        intermediate=4 * hidden,
        norm_eps=1e-5,
        tied_head=True,
    )


def llama_shape(
    num_layers: int,
    hidden: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate: int,
    *,
    tied_head: bool,
    rope_factor: float | None = None,
    vocab_size: int = 128256,
    context: int = 131072,
    rope_theta: float = 500000.0,
) -> Shape:
    """Llama 3.1 or 3.2: a vocabulary of 128,256, RoPE scaled from a context of 8,192 to 131,072."""
    return Shape(
        family="llama",
        vocab_size=vocab_size,
        context=context,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden // num_heads,
        intermediate=intermediate,
        norm_eps=1e-5,
        tied_head=tied_head,
        rope_theta=rope_theta,
        rope_scaling=None if rope_factor is None else RopeScaling(rope_factor, 1.0, 4.0, 8192),
    )


SIZES: dict[str, Shape] = {
    "tiny": gpt2_shape(4, 128, 4, vocab_size=2048, context=256),
    "llama-tiny": llama_shape(
        4, 128, 4, 2, 352, tied_head=True, vocab_size=2048, context=512, rope_theta=10000.0
    ),
    "gpt2-124m": gpt2_shape(12, 768, 12),
    "gpt2-350m": gpt2_shape(24, 1024, 16),
    "gpt2-774m": gpt2_shape(36, 1280, 20),
    "gpt2-1.5b": gpt2_shape(48, 1600, 25),
    "llama-3.2-1b": llama_shape(16, 2048, 32, 8, 8192, tied_head=True, rope_factor=32.0),
    "llama-3.2-3b": llama_shape(28, 3072, 24, 8, 8192, tied_head=True, rope_factor=32.0),
    "llama-3.1-8b": llama_shape(32, 4096, 32, 8, 14336, tied_head=False, rope_factor=8.0),
    # Meta, "The Llama 3 Herd of Models", arXiv:2407.21783, table 3.
    "llama-3.1-70b": llama_shape(80, 8192, 64, 8, 28672, tied_head=False, rope_factor=8.0),
    "llama-3.1-405b": llama_shape(126, 16384, 128, 8, 53248, tied_head=False, rope_factor=8.0),
}


def shape_of(name: str) -> Shape:
    """The shape of a named size, or a RecipeError that names the nearest one."""
    if name not in SIZES:
        raise RecipeError(f"There is no model size {name!r}: {nearest(name, SIZES)}")
    return SIZES[name]
