"""A technique that raises what is no `Exception` in the third step, as a panic of a library in Rust is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rush.recipe import Knob
from rush.techniques.api.contract import Build, Claim, Parity, Proof, Stage, Technique

BROKEN = True


class Panic(BaseException):
    pass


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    passes = 0

    def counted(block: nn.Module, given: Any) -> None:
        nonlocal passes
        passes += torch.is_grad_enabled()
        if BROKEN and passes > 4:
            raise Panic("planted panic")

    build.model.blocks[0].register_forward_pre_hook(counted)


technique = Technique(
    name="no_exception",
    stage=Stage.MODEL,
    apply=apply,
    claim=Claim("tokens_per_s", 0.0, regime="planted", source="tests"),
    parity=Parity.EXACT,
    evidence=lambda seen, knobs: Proof(True, "planted"),
)
