"""`RushAdamW8bit`: torch's optimizer interface around the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rush.kernels.adamw.optimizer import Member, RushAdamW
from rush.kernels.adamw8bit.quantization_map import code_of_zero, dynamic_map
from rush.kernels.adamw8bit.triton import BLOCK
from rush.kernels.adamw8bit.update import QuantizedMoment, adamw8bit_, in_rows, is_sharded, quantized_zeros

SMALLEST = 4096
"""The least elements of a matrix with 8-bit moments: biases and norm weights are few, and sensitive."""
Alike = Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor]
"""Allocates a tensor (rows, blocks per row) that is sharded like the parameter."""


class RushAdamW8bit(RushAdamW):
    """AdamW with block-wise 8-bit moments. Moments of vectors and small matrices stay in fp32, as do those of sharded
    parameters whose shards would split a block. `alike` allocates the scales of sharded parameters.

    The state has `exp_avg.codes`, `exp_avg.scales` and the same for `exp_avg_sq`: plain tensors, for checkpoints.
    """

    supports_found_inf = False

    def __init__(
        self,
        params: Iterable[Any],
        *settings: Any,
        alike: Alike = lambda parameter, shape, dtype: parameter.new_empty(shape, dtype=dtype),
        **options: Any,
    ) -> None:
        """As `RushAdamW`, but moments that are not quantized are in fp32."""
        self.alike = alike
        super().__init__(params, *settings, state_dtype=torch.float32, **options)
        self._values: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        cuts_blocks = is_sharded(parameter) and not (in_rows(parameter) and in_rows(self.local(parameter)))
        if parameter.dim() < 2 or parameter.numel() < SMALLEST or cuts_blocks:
            return super().new_state(parameter)
        moments = {
            "exp_avg": self._quantized_zeros(parameter, signed=True),
            "exp_avg_sq": self._quantized_zeros(parameter, signed=False),
        }
        return {
            f"{key}.{part}": tensor
            for key, packed in moments.items()
            for part, tensor in packed._asdict().items()
        }

    def _quantized_zeros(self, parameter: Tensor, signed: bool) -> QuantizedMoment:
        """Scales by rows, where blocks do not cross them: independent of how rows are sharded."""
        if not in_rows(parameter):
            return quantized_zeros(parameter, signed)
        shape = (parameter.shape[0], parameter.shape[1] // BLOCK)
        codes = torch.full_like(parameter, code_of_zero(signed), dtype=torch.uint8)
        return QuantizedMoment(codes, self.alike(parameter, shape, torch.float32).zero_())

    def update(self, members: list[Member], group: dict[str, Any], step: int) -> None:
        small = [member for member in members if "exp_avg" in member.state]
        large = [member for member in members if "exp_avg" not in member.state]
        if small:
            super().update(small, group, step)
        if not large:
            return
        device = large[0].parameter.device
        if device not in self._values:
            self._values[device] = (dynamic_map(True).to(device), dynamic_map(False).to(device))
        adamw8bit_(
            [member.parameter for member in large],
            [member.gradient for member in large],
            [_moment(member, "exp_avg") for member in large],
            [_moment(member, "exp_avg_sq") for member in large],
            self._values[device],
            numbers=[member.number for member in large],
            **self.settings(group, step),
        )


def _moment(member: Member, key: str) -> QuantizedMoment:
    return QuantizedMoment(member.state[f"{key}.codes"], member.state[f"{key}.scales"].flatten())
