"""`RushAdamW`: torch's optimizer interface around the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rush.kernels.adamw.table import Divisions
from rush.kernels.adamw.update import DTYPES, adamw_
from rush.kernels.support import require

Local = Callable[[Tensor], Tensor]
"""Returns the local shard of a tensor."""


class Member(NamedTuple):
    """A parameter to update, its number among all, and its state; of sharded ones the local shard."""

    number: int
    parameter: Tensor
    gradient: Tensor
    state: dict[str, Any]


class RushAdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, one launch for each group.

    Moments have the parameter's dtype unless `state_dtype` is given. The state is that of `torch.optim.AdamW`; random
    bits depend only on `seed`, the step and the parameter's number. Like torch's fused AdamW it reads the attributes
    `found_inf` and `grad_scale` (see `adamw_`) while they are set; a skipped step is counted nevertheless.
    """

    supports_found_inf = True
    """Whether it supports them."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        local: Local = Tensor.detach,
    ) -> None:
        require(
            isinstance(lr, Tensor) or lr >= 0, f"{type(self).__name__}: lr must not be negative; found {lr}."
        )
        require(
            all(0 <= beta < 1 for beta in betas),
            f"{type(self).__name__}: betas must be at least 0 and below 1; found {betas}.",
        )
        require(
            state_dtype in (None, *DTYPES),
            f"{type(self).__name__}: state_dtype must be torch.float32 or torch.bfloat16; found {state_dtype}.",
        )
        self.state_dtype = state_dtype
        self.stochastic_rounding = self.keeps_small_updates = stochastic_rounding
        self.seed = seed
        self.local = local
        self._divisions: Divisions = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = 0
        for group in self.param_groups:
            # Parameters that had no gradient at some step lag behind: one launch per step count.
            by_step: dict[int, list[Member]] = {}
            for parameter in group["params"]:
                number += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state.update(self.new_state(parameter))
                state["step"] += 1
                by_step.setdefault(int(state["step"]), []).append(self._member(number, parameter, state))
            for step, members in by_step.items():
                self.update(members, group, step)
        return loss

    def _member(self, number: int, parameter: Tensor, state: dict[str, Any]) -> Member:
        assert parameter.grad is not None
        mine = {key: self.local(value) for key, value in state.items() if key != "step"}
        return Member(number, self.local(parameter), self.local(parameter.grad).contiguous(), mine)

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Initial moments of a parameter."""
        return {
            key: torch.zeros_like(parameter, dtype=self.state_dtype or parameter.dtype)
            for key in ("exp_avg", "exp_avg_sq")
        }

    def update(self, members: list[Member], group: dict[str, Any], step: int) -> None:
        """Step number `step` for parameters of one group."""
        adamw_(
            [member.parameter for member in members],
            [member.gradient for member in members],
            [member.state["exp_avg"] for member in members],
            [member.state["exp_avg_sq"] for member in members],
            numbers=[member.number for member in members],
            found_inf=getattr(self, "found_inf", None),
            grad_scale=getattr(self, "grad_scale", None),
            **self.settings(group, step),
        )

    def settings(self, group: dict[str, Any], step: int) -> dict[str, Any]:
        """The arguments that all launches of a group share."""
        return {
            **{key: group[key] for key in ("lr", "betas", "eps", "weight_decay")},
            "step": step,
            "stochastic_rounding": self.stochastic_rounding,
            "seed": self.seed,
            "divisions": self._divisions,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but moments keep their dtypes: torch would cast them to those of the parameters."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        ours = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(saved, ours, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and key != "step":
                    self.state[parameter][key] = value.to(parameter.device, copy=True)
