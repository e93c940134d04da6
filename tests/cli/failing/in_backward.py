"""A technique that raises in the backward pass of the third step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rush.recipe import Knob
from rush.techniques.api.contract import Build, Claim, Parity, Proof, Stage, Technique

BROKEN = True


class Failing(torch.autograd.Function):
    """Does nothing to what goes through it; counts the backward passes, of which a step has two."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x_btd: Tensor) -> Tensor:
        return x_btd.view_as(x_btd)

    @staticmethod
    def backward(ctx: Any, gradient_btd: Tensor) -> Tensor:
        Failing.passes += 1
        if BROKEN and Failing.passes > 4:
            raise KeyError("planted in backward")
        return gradient_btd


def pass_through(block: nn.Module, given: Any, out_btd: Tensor) -> Any:
    return Failing.apply(out_btd)  # type: ignore[no-untyped-call]


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    build.model.blocks[0].register_forward_hook(pass_through)


technique = Technique(
    name="in_backward",
    stage=Stage.MODEL,
    apply=apply,
    claim=Claim("tokens_per_s", 0.0, regime="planted", source="tests"),
    parity=Parity.EXACT,
    evidence=lambda seen, knobs: Proof(True, "planted"),
)
