"""A technique whose kernel refuses a width, as ours do, in the first validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rush.errors import KernelRefusal
from rush.recipe import Knob
from rush.techniques.api.contract import Build, Claim, Parity, Proof, Stage, Technique

BROKEN = True


def refuse(block: nn.Module, given: Any) -> None:
    if BROKEN and not torch.is_grad_enabled():
        raise KernelRefusal("planted: no rows of 17.")


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    build.model.blocks[0].register_forward_pre_hook(refuse)


technique = Technique(
    name="refuses",
    stage=Stage.MODEL,
    apply=apply,
    claim=Claim("tokens_per_s", 0.0, regime="planted", source="tests"),
    parity=Parity.EXACT,
    evidence=lambda seen, knobs: Proof(True, "planted"),
)
