"""AdamW with weight decay on matrices only.

Decay pulls weights towards zero, which regularizes matmuls and embeddings; pulling a norm's gain or
a bias to zero only hurts. So tensors with two or more dims decay and the others do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rush.recipe import Recipe


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, decayed and not, each trainable parameter in exactly one (a tied one once).

    A group that nobody is in (beside adapters no vector is trained) is left out: some updates refuse it.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(
    recipe: Recipe, model: nn.Module, make: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """AdamW for the model; `make` and `options` are the plain ones or what techniques put in their place."""
    settings = recipe.optimizer
    return make(
        parameter_groups(model, settings.weight_decay),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        **options,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The same rate for every group; optimizers that read it in a compiled update keep it as a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def supports_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer obeys what stands on the device in its attributes `found_inf` (not zero: change nothing) and
    `grad_scale` (divide gradients by it). Such an update can be launched before anyone knows that it may happen.

    torch's fused updates do, for the sake of loss scaling, and mark it.
    """
    torchs = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(getattr(optimizer, "supports_found_inf", torchs))
