"""AdamW with weight decay on matrices only.

Decay regularizes matmuls and embeddings; on a norm's weight or a bias it only hurts. So tensors with two or more dims decay
and the others do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rush.recipe import Recipe


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups, with and without decay; an empty one is left out, since some optimizers refuse it."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    recipe: Recipe, model: nn.Module, make: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """AdamW for the model; techniques may replace `make` and `options`."""
    settings = recipe.optimizer
    return make(
        parameter_groups(model, settings.weight_decay),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        **options,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every group; optimizers with a compiled or captured update keep it as a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer reads `found_inf` (nonzero: skip the update) and `grad_scale` (divide gradients by it) from
    the device, as torch's fused optimizers do. Such an update can be launched before the host knows whether it may happen."""
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(getattr(optimizer, "supports_found_inf", fused))
