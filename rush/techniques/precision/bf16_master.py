"""bf16 weights with fp32 master weights in the optimizer.

Forward and backward use bf16 weights: no casts, and gradients of 2 bytes. The optimizer keeps an fp32
master copy of every weight, updates that, and rounds it to bf16 for the next step, so small updates
accumulate instead of being rounded away as in `pure_bf16`. The master copy starts from the weights before
they were rounded to bf16. Total memory is that of plain fp32 (2 + 2 + 4 + 8 bytes per parameter); what is
saved is the casts, and communication of gradients. It loses to `amp_bf16` where norms and the residual
stream need fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

import rush.techniques.api.contract as api
from rush.parallel.sharded import local_tensor
from rush.techniques.api.evidence import describe_dtypes, matmuls_took, state_per_parameter


class MasterAdamW(torch.optim.Optimizer):
    """AdamW on fp32 master weights, which are optimizer state, so checkpoints hold them."""

    keeps_small_updates = True
    """Updates below half a unit in the last place accumulate (see `rush/training/lost_updates.py`)."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        foreach: bool = False,
        fused: bool = False,
    ) -> None:
        assert not foreach, "tensors are updated one at a time, so that one fp32 gradient exists at a time"
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "fused": fused})
        self.supports_found_inf = fused
        """Whether `found_inf` and `grad_scale` are respected, as in torch's fused AdamW."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # The value before rounding, where it is known. Starting from the rounded one, no bf16 weight would change
            # in the first steps, whose updates are smaller than the spacing of bf16.
            exact = parameter.__dict__.pop("master", None)
            state["master"] = parameter.detach().float().clone() if exact is None else exact
            state["exp_avg"] = torch.zeros_like(state["master"])
            state["exp_avg_sq"] = torch.zeros_like(state["master"])
            state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
        assert parameter.grad is not None
        master = local_tensor(state["master"])
        adamw(
            [master],
            [local_tensor(parameter.grad).float()],
            [local_tensor(state["exp_avg"])],
            [local_tensor(state["exp_avg_sq"])],
            [],
            [state["step"]],
            foreach=False,
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            found_inf=getattr(self, "found_inf", None),
            grad_scale=getattr(self, "grad_scale", None),
        )
        local_tensor(parameter).copy_(master)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.weight_dtype, build.masters = torch.bfloat16, True
    build.make_optimizer = MasterAdamW


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Weights and matmul inputs are bf16, and the optimizer's state is fp32 with 12 bytes per parameter (plain: 8)."""
    per_parameter = state_per_parameter(seen)
    took_effect = (
        seen.weight_dtypes == {"bfloat16"}
        and matmuls_took(seen, "bfloat16")
        and set(seen.state_bytes) == {"float32"}
        and per_parameter > 11.5
    )
    weights = ", ".join(sorted(seen.weight_dtypes))
    return api.Proof(
        took_effect,
        f"weights are {weights}, {describe_dtypes(seen)}, optimizer state {per_parameter:.1f} bytes per parameter "
        "(12 with master weights in fp32)",
    )


technique = api.Technique(
    name="bf16_master",
    alternative=api.Alternative.PRECISION,
    relative_error=2**-8,
    half_dtype="bfloat16",
    stage=api.Stage.MODEL,
    apply=apply,
    conflicts=("adam8bit", "amp_bf16", "amp_fp16", "fp16_matmul", "fused_update", "pure_bf16"),
    claim=api.Claim(
        "bytes of weights and gradients in the passes",
        -0.5,
        regime="4 bytes for each parameter instead of 8; 16 in total, as in plain fp32",
        source="arithmetic; Rajbhandari et al. 2019, arXiv:1910.02054, section 3.1",
        of_memory=True,
    ),
    parity=api.Parity.STATISTICAL,
    evidence=evidence,
    memory=(
        api.MemoryEffect("parameters", 1.0, "2 bytes each", size=2),
        api.MemoryEffect("gradients", 1.0, "2 bytes each", size=2),
        api.MemoryEffect("master", 1.0, "4 bytes per trained weight"),
        api.MemoryEffect("stream", 1.0, "2 bytes an element", size=2),
        api.MemoryEffect("compute", 1.0, "2 bytes an element", size=2),
    ),
)
