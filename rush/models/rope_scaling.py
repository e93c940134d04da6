"""RoPE scaling: how rotary frequencies are changed so that a model reads more than it was first trained on.

Each kind is a frozen dataclass of numbers; `rush/models/rotary.py` computes with them. YaRN and LongRoPE also multiply cosines
and sines by an attention factor. Dynamic NTK changes the frequencies while a text grows, so that earlier keys no longer fit
later queries; it is not supported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from rush.errors import RecipeError, nearest
from rush.models.numbers import LARGEST, positive, whole


@dataclass(frozen=True)
class LinearRopeScaling:
    """Position interpolation (Chen et al., arXiv:2306.15595): every frequency is divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        positive("rope_scaling.factor", self.factor)


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
            positive(f"rope_scaling.{field.name}", getattr(self, field.name))
        whole("rope_scaling.original_context", self.original_context, LARGEST["context"])
        if self.high_freq_factor <= self.low_freq_factor:
            raise RecipeError(
                f"rope_scaling.high_freq_factor must be greater than low_freq_factor: found "
                f"{self.high_freq_factor} and {self.low_freq_factor}."
            )


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN (Peng et al., arXiv:2309.00071): fast frequencies stay, slow ones are divided by `factor`, those between blended.

    The limits are rotations within the original context: `beta_fast` and `beta_slow`.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Multiplies cosines and sines; None: 0.1 ln(factor) + 1, as in the paper."""
    truncate: bool = True
    """Whether the limits are rounded to whole frequencies."""

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow"):
            positive(f"rope_scaling.{name}", getattr(self, name))
        whole("rope_scaling.original_context", self.original_context, LARGEST["context"])
        if self.attention_factor is not None:
            positive("rope_scaling.attention_factor", self.attention_factor)
        if not isinstance(self.truncate, bool):
            raise RecipeError(f"rope_scaling.truncate must be true or false: found {self.truncate!r:.80}.")
        if self.beta_fast <= self.beta_slow:
            raise RecipeError(
                f"rope_scaling.beta_fast must be greater than beta_slow: found {self.beta_fast} and {self.beta_slow}."
            )


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., arXiv:2402.13753): every frequency has its own divisor, one for rows up to `original_context` and
    another for longer ones."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_context: int
    attention_factor: float = 1.0
    """Multiplies cosines and sines."""

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if not isinstance(factors, list | tuple) or not factors:
                raise RecipeError(f"rope_scaling.{name} must be a list of numbers: found {factors!r:.80}.")
            for factor in factors:
                positive(f"rope_scaling.{name}", factor)
            object.__setattr__(self, name, tuple(float(factor) for factor in factors))
        if len(self.short_factor) != len(self.long_factor):
            raise RecipeError(
                f"rope_scaling.short_factor and long_factor must have one length: found {len(self.short_factor)} and "
                f"{len(self.long_factor)}."
            )
        whole("rope_scaling.original_context", self.original_context, LARGEST["context"])
        positive("rope_scaling.attention_factor", self.attention_factor)


Scaling = RopeScaling | LinearRopeScaling | YarnRopeScaling | LongRopeScaling

ROPE_TYPES: dict[str, type[Scaling]] = {
    "llama3": RopeScaling,
    "linear": LinearRopeScaling,
    "yarn": YarnRopeScaling,
    "longrope": LongRopeScaling,
}
"""The kinds of RoPE scaling under their names in Hugging Face's configs; `default` there means none."""


def rope_type(scaling: Scaling) -> str:
    return next(name for name, kind in ROPE_TYPES.items() if type(scaling) is kind)


def attention_factor(scaling: Scaling | None) -> float:
    """What cosines and sines are multiplied by."""
    if isinstance(scaling, YarnRopeScaling) and scaling.attention_factor is None:
        return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return float(getattr(scaling, "attention_factor", None) or 1.0)


def rope_scaling_from(table: Mapping[str, Any], base: object = None) -> Scaling | None:
    """The scaling that a table of a recipe describes; what it leaves out is the base's, where that has the same type."""
    known = {} if base is None else {field.name: getattr(base, field.name) for field in fields(base)}  # type: ignore[arg-type]
    named = rope_type(base) if isinstance(base, Scaling) else None
    kind = table.get("rope_type", named)
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise RecipeError(
            f"rope_scaling.rope_type is {kind!r:.80}; {nearest(str(kind)[:80], [*ROPE_TYPES, 'default'])}"
        )
    wanted = {field.name: field.default is MISSING for field in fields(ROPE_TYPES[kind])}
    given = {**(known if kind == named else {}), **{k: v for k, v in table.items() if k != "rope_type"}}
    for key in given.keys() - wanted.keys():
        raise RecipeError(
            f"rope_scaling.{key} is not a key of {kind} scaling; {nearest(key, ['rope_type', *wanted])}"
        )
    if missing := [key for key, required in wanted.items() if required and key not in given]:
        raise RecipeError(f"rope_scaling of type {kind} lacks {', '.join(missing)}.")
    return ROPE_TYPES[kind](**given)
