"""`RushAdamW8bit`: torch's optimizer interface around the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rush.kernels.adamw.optimizer import Local, Member, RushAdamW
from rush.kernels.adamw8bit.quantization_map import code_of_zero, dynamic_map
from rush.kernels.adamw8bit.triton import BLOCK
from rush.kernels.adamw8bit.update import Packed, adamw8bit_, in_rows, is_cut, quantized_zeros

SMALLEST = 4096
"""Elements from which on a matrix's moments are packed: gains and biases are few, and matter more than most."""
Alike = Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor]
"""Memory for a table (so many rows, a number for each block of a row) that is dealt out as a parameter in parts is."""


class RushAdamW8bit(RushAdamW):
    """AdamW with moments in blocks of 8-bit codes; those of vectors and small matrices stay in fp32, and those of parameters
    in parts (`local` gives less than all) that would cut a block. `alike` is for these.

    The state has `exp_avg.codes`, `exp_avg.scales` and the same of `exp_avg_sq`, plain tensors, so that checkpoints
    can hold them.
    """

    supports_found_inf = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        stochastic_rounding: bool = False,
        seed: int = 0,
        local: Local = Tensor.detach,
        alike: Alike = lambda parameter, shape, dtype: parameter.new_empty(shape, dtype=dtype),
    ) -> None:
        self.alike = alike
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            state_dtype=torch.float32,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
            local=local,
        )
        self._values: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        cuts_blocks = is_cut(parameter) and not (in_rows(parameter) and in_rows(self.local(parameter)))
        if parameter.dim() < 2 or parameter.numel() < SMALLEST or cuts_blocks:
            return super().new_state(parameter)
        moments = {
            "exp_avg": self._packed_zeros(parameter, signed=True),
            "exp_avg_sq": self._packed_zeros(parameter, signed=False),
        }
        return {
            f"{key}.{part}": tensor
            for key, packed in moments.items()
            for part, tensor in packed._asdict().items()
        }

    def _packed_zeros(self, parameter: Tensor, signed: bool) -> Packed:
        """Scales by rows, where blocks lie within them: so they look the same however rows are dealt out."""
        if not in_rows(parameter):
            return quantized_zeros(parameter, signed)
        shape = (parameter.shape[0], parameter.shape[1] // BLOCK)
        codes = torch.full_like(parameter, code_of_zero(signed), dtype=torch.uint8)
        return Packed(codes, self.alike(parameter, shape, torch.float32).zero_())

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
            [_packed(member, "exp_avg") for member in large],
            [_packed(member, "exp_avg_sq") for member in large],
            self._values[device],
            numbers=[member.number for member in large],
            **self.settings(group, step),
        )


def _packed(member: Member, key: str) -> Packed:
    return Packed(member.state[f"{key}.codes"], member.state[f"{key}.scales"].flatten())
