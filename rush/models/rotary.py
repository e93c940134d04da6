"""RoPE: the angles of positions, and the rotation of queries and keys by them.

Shapes: b batch, t position, h query heads, k key/value heads, d head dim (of cosines and sines: what is rotated of it).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from rush.models.rope_scaling import (
    LinearRopeScaling,
    LongRopeScaling,
    Scaling,
    YarnRopeScaling,
    attention_factor,
)


def inverse_frequencies(
    rotary_dim: int, theta: float, scaling: Scaling | None, *, long: bool = False
) -> Tensor:
    """RoPE's inverse frequencies (radians per position), on the CPU in fp32, scaled. `long`: LongRoPE's for long rows."""
    exponents = torch.arange(0, rotary_dim, 2, device="cpu", dtype=torch.float32) / rotary_dim
    if isinstance(scaling, LongRopeScaling):
        divisors = torch.tensor(scaling.long_factor if long else scaling.short_factor, device="cpu")
        return 1.0 / (divisors * theta**exponents)
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnRopeScaling):
        kept = _yarn_kept(rotary_dim, theta, scaling)
        return frequencies / scaling.factor * (1 - kept) + frequencies * kept
    rotations = scaling.original_context * frequencies / (2 * math.pi)  # within the original context
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)  # 0 below the low factor: fully slowed; 1 above the high one: kept
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn_kept(rotary_dim: int, theta: float, scaling: YarnRopeScaling) -> Tensor:
    """How much of each frequency YaRN keeps: 1 where it is fast, 0 where it is slow, a ramp between."""

    def place(rotations: float) -> float:
        """The (fractional) number of the frequency with so many rotations within the original context."""
        return (
            rotary_dim
            * math.log(scaling.original_context / (rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    high = high + 0.001 if low == high else high
    number = torch.arange(rotary_dim // 2, device="cpu", dtype=torch.float32)
    return 1 - ((number - low) / (high - low)).clamp(0, 1)


class Rotary(nn.Module):
    """RoPE: cosines and sines of the angles by which queries and keys are rotated.

    The frequencies stay in fp32 whatever the dtype of the weights: at position 100,000 a bf16 frequency is wrong by
    whole rotations. So they are recomputed whenever the module is moved or cast, also from the meta device.
    """

    def __init__(self, rotary_dim: int, theta: float, scaling: Scaling | None) -> None:
        super().__init__()
        self.rotary_dim, self.theta, self.scaling = rotary_dim, theta, scaling
        self.factor = attention_factor(scaling)
        self.cos_and_sin = cos_and_sin
        """A slot: from angles to cosines and sines."""
        self.frequencies: Tensor
        self.long_frequencies: Tensor | None
        empty = torch.empty(rotary_dim // 2, dtype=torch.float32)
        self.register_buffer("frequencies", empty, persistent=False)
        if isinstance(scaling, LongRopeScaling):
            self.register_buffer("long_frequencies", torch.empty_like(empty), persistent=False)
        self.fill(self.frequencies.device)

    def fill(self, device: torch.device) -> None:
        self.frequencies = inverse_frequencies(self.rotary_dim, self.theta, self.scaling).to(device)
        if isinstance(self.scaling, LongRopeScaling):
            long = inverse_frequencies(self.rotary_dim, self.theta, self.scaling, long=True)
            self.long_frequencies = long.to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.fill(self.frequencies.device)
        return self

    def forward(self, positions_bt: Tensor, row_tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """`row_tokens` is the length of the rows where these are a part of them; by default up to the largest position."""
        frequencies = self.frequencies
        if isinstance(self.scaling, LongRopeScaling):
            original = self.scaling.original_context
            # On the device: the host does not wait for the largest position.
            is_long = (
                positions_bt.max() >= original if row_tokens is None else torch.tensor(row_tokens > original)
            )
            frequencies = torch.where(is_long.to(frequencies.device), self.long_frequencies, frequencies)  # type: ignore[arg-type]
        angles = positions_bt[..., None].float() * frequencies
        cos, sin = self.cos_and_sin(torch.cat((angles, angles), dim=-1))
        return (cos, sin) if self.factor == 1.0 else (cos * self.factor, sin * self.factor)


def cos_and_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    return angles.cos(), angles.sin()


class PlainRotate(nn.Module):
    """Rotates each pair (i, i + d/2) of every query and key by the angle of its position, in fp32.

    Where cosines and sines are narrower than a head, the rest of it is unchanged. The output has the memory layout of the
    input, the heads of a position side by side. So has attention's output, which needs no copy before the next layer.
    """

    def forward(
        self, q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos_btd[:, :, None], sin_btd[:, :, None]
        q_bthd, k_btkd = q_bhtd.transpose(1, 2), k_bktd.transpose(1, 2)
        return _rotate(q_bthd, cos, sin).transpose(1, 2), _rotate(k_btkd, cos, sin).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((_rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first, second), dim=-1) * cos + torch.cat((-second, first), dim=-1) * sin
    return rotated.to(x.dtype)
