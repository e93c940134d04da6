"""AdamW with weight decay on matrices only.

Decay pulls weights towards zero, which regularises matmuls and embeddings; pulling a norm's gain or
a bias to zero only hurts. So tensors with two or more dims decay and the others do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rush.recipe import Recipe


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, decayed and not, each trainable parameter in exactly one (a tied one once)."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def build_optimizer(recipe: Recipe, model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    """AdamW for the model; `options` are what techniques set (fused and the like)."""
    settings = recipe.optimizer
    return torch.optim.AdamW(
        parameter_groups(model, settings.weight_decay),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        # The plain update is one operation after another for each tensor: the honest baseline.
        **{"foreach": False, **options} if not options.get("fused") else options,
    )
