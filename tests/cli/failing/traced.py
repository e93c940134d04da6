"""A technique with an autograd function that a compiler cannot trace under no_grad, as one of ours once had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rush.recipe import Knob
from rush.techniques.api.contract import Build, Claim, Parity, Proof, Stage, Technique


class Kept(torch.autograd.Function):
    """Under no_grad the compiler counts `*weights` as one argument, takes `ctx` for one too many and leaves it out."""

    @staticmethod
    def forward(ctx: Any, x_btd: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x_btd)
        return x_btd.view_as(x_btd)

    @staticmethod
    def backward(ctx: Any, gradient_btd: Tensor) -> tuple[Tensor | None, ...]:
        assert len(ctx.saved_tensors) == 1
        return gradient_btd, None, None


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    for block in build.model.blocks:
        block.mlp.register_forward_pre_hook(
            lambda mlp, given: Kept.apply(given[0], mlp.gate.weight, mlp.up.weight)  # type: ignore[no-untyped-call]
        )


technique = Technique(
    name="traced",
    stage=Stage.MODEL,
    apply=apply,
    claim=Claim("tokens_per_s", 0.0, regime="planted", source="tests"),
    parity=Parity.EXACT,
    evidence=lambda seen, knobs: Proof(True, "planted"),
)
