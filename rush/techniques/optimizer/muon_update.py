"""`Muon`: the optimizer of the technique `muon`, with AdamW for all parameters that are not matrices of a block.

The Newton–Schulz iteration multiplies matrices of one shape as one batch: a block has a handful of shapes and a model dozens of
blocks, so an update is some hundred large kernels instead of thousands of small ones. `on_whole_matrices` gathers sharded
matrices, each on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.profiler import record_function

from rush.parallel.sharded import local_tensor
from rush.parallel.whole_matrices import on_whole_matrices, row_shards

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
"""Coefficients of the quintic iteration; its author chose them to raise small singular values fast. Singular values end between
0.7 and 1.2."""
MOMENTUM = 0.95
UPDATE_RMS = 0.2
"""The root mean square of AdamW's updates, in units of its learning rate: updates of matrices get the same (Liu et al. 2025)."""
LABEL = "rush::newton_schulz"
"""The profiler label of the iteration."""
MOST_ELEMENTS = 2**25
"""Maximum elements of the matrices that are updated at once, which bounds the temporaries. A single matrix may have more."""

# Shapes: k matrices, m rows, n columns.


def orthogonalize(matrices_kmn: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly: all singular values become about 1."""
    a, b, c = COEFFICIENTS
    tall = matrices_kmn.shape[1] > matrices_kmn.shape[2]
    x_kmn = (matrices_kmn.mT if tall else matrices_kmn).to(dtype)
    x_kmn = x_kmn / x_kmn.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram_kmm = x_kmn @ x_kmn.mT
        update_kmm = torch.baddbmm(gram_kmm, gram_kmm, gram_kmm, beta=b, alpha=c)
        x_kmn = torch.baddbmm(x_kmn, update_kmm, x_kmn, beta=a)
    return x_kmn.mT if tall else x_kmn


def scaled_update(matrices_kmn: Tensor, parts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Updates with AdamW's root mean square. `parts` are the rows of the matrices that are stored as one, such as queries, keys and
    values: each is orthogonalized separately."""
    found = []
    with record_function(LABEL):
        for part_kmn in torch.split(matrices_kmn, list(parts), 1):
            size = UPDATE_RMS * math.sqrt(max(part_kmn.shape[1:]))
            found.append(size * orthogonalize(part_kmn, dtype))
    return (found[0] if len(found) == 1 else torch.cat(found, 1)).to(matrices_kmn.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for `matrices`, AdamW for the rest of `params`.

    `matrices` maps the id of a parameter to the rows of its parts. Like torch's fused AdamW it reads `found_inf` and `grad_scale`
    from the device while they are set: a skipped step leaves weights and state unchanged.
    """

    supports_found_inf = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        *,
        matrices: Mapping[int, tuple[int, ...]],
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._parts, self._dtype = matrices, dtype
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        apart = [
            {**group, "params": chosen, "orthogonal": orthogonal}
            for group in groups
            for orthogonal in (True, False)
            if (chosen := [p for p in group["params"] if (id(p) in matrices) == orthogonal])
        ]
        # `fused` has torch and our checkpoints load AdamW's step counts to the device, where its kernel wants them.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True}
        super().__init__(apart, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_gradient = [one for one in group["params"] if one.grad is not None]
            if with_gradient:
                (self._muon if group["orthogonal"] else self._adamw)(with_gradient, group)
        return loss

    def _muon(self, parameters: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        alike: dict[Any, list[Tensor]] = {}
        for one in parameters:
            alike.setdefault((one.shape, one.device, self._parts[id(one)]), []).append(one)
        for (_, _, parts), members in alike.items():
            shards = row_shards(members[0])
            # Every rank gets one at least, so that all have work.
            at_once = max(shards.ranks if shards else 1, MOST_ELEMENTS // members[0].numel())
            for start in range(0, len(members), at_once):
                self._update_alike(members[start : start + at_once], parts, group)

    def _update_alike(
        self, members: Sequence[Tensor], parts: tuple[int, ...], group: Mapping[str, Any]
    ) -> None:
        """The update of matrices of one shape."""
        skip, scale = (getattr(self, name, None) for name in ("found_inf", "grad_scale"))
        weights = [local_tensor(one) for one in members]
        buffers = [local_tensor(self._buffer(one)) for one in members]
        gradients = [local_tensor(one.grad).to(one.dtype) for one in members if one.grad is not None]
        live: float | Tensor = 1.0
        if scale is not None:
            gradients = list(torch._foreach_div(gradients, scale))
        if skip is not None:
            # lerp of a buffer towards itself leaves it unchanged.
            gradients = [torch.where(skip > 0, b, g) for b, g in zip(buffers, gradients, strict=True)]
            live = (skip == 0).to(weights[0].dtype)
        torch._foreach_lerp_(buffers, gradients, 1 - MOMENTUM)
        nesterov = torch._foreach_lerp(gradients, buffers, MOMENTUM)
        del gradients
        updates = on_whole_matrices(
            lambda whole_kmn: scaled_update(whole_kmn, parts, self._dtype), nesterov, members[0]
        )
        rate = group["lr"] * live
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_mul_(updates, rate)
        torch._foreach_sub_(weights, updates)

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def _adamw(self, parameters: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        states = [self._moments(one) for one in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [local_tensor(one) for one in parameters],
            [local_tensor(one.grad) for one in parameters if one.grad is not None],
            [local_tensor(state["exp_avg"]) for state in states],
            [local_tensor(state["exp_avg_sq"]) for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=True,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _moments(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state
