"""A technique that fails in the forward pass of the third step: it raises, or crashes by the signal in PLANTED_SIGNAL."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rush.recipe import Knob
from rush.techniques.api.contract import Build, Claim, Parity, Proof, Stage, Technique

BROKEN = True


class Counted:
    """Before a block: counts its forward passes in training, of which a step has two."""

    passes = 0

    def __call__(self, block: nn.Module, given: Any) -> None:
        self.passes += torch.is_grad_enabled()
        if BROKEN and self.passes > 4:
            name = os.environ.get("PLANTED_SIGNAL")
            if name is None:
                raise RuntimeError("planted in forward")
            if name == "SIGSEGV":
                ctypes.string_at(0)
            elif name == "SIGABRT":
                ctypes.CDLL(None).abort()
            os.kill(os.getpid(), signal.Signals[name])


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    build.model.blocks[0].register_forward_pre_hook(Counted())


technique = Technique(
    name="in_forward",
    stage=Stage.MODEL,
    apply=apply,
    claim=Claim("tokens_per_s", 0.0, regime="planted", source="tests"),
    parity=Parity.EXACT,
    evidence=lambda seen, knobs: Proof(True, "planted"),
)
