"""A technique that trains well and breaks beside the steps, where its knob says."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from rush.recipe import Knob
from rush.techniques.api.contract import Build, Claim, KnobRange, Parity, Proof, Stage, Technique


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    kind = knobs["kind"]
    build.step_contexts.append(nullcontext)  # an effect that its evidence can be borne out by
    if kind in ("validate", "killed"):
        build.model.blocks[0].register_forward_pre_hook(_killed if kind == "killed" else _refuse)
    elif kind == "sample":
        _hold_back(build.model)
    elif kind == "resume":
        build.optimizer_hooks.append(_count)


def _refuse(block: nn.Module, given: Any) -> None:
    if not torch.is_grad_enabled():
        raise TypeError("planted under no_grad")


def _killed(block: nn.Module, given: Any) -> None:
    if not torch.is_grad_enabled():
        os.kill(os.getpid(), signal.SIGKILL)


def _hold_back(model: nn.Module) -> None:
    """After a validation the weights are not given away: the first that asks for them is the sample."""
    validated = False

    def note(block: nn.Module, given: Any) -> None:
        nonlocal validated
        validated = validated or not torch.is_grad_enabled()

    def refuse(*given: Any) -> None:
        if validated:
            raise TypeError("planted: no weights for a sample")

    model.blocks[0].register_forward_pre_hook(note)  # type: ignore[index, union-attr]
    model.register_state_dict_pre_hook(refuse)


def _count(optimizer: torch.optim.Optimizer) -> None:
    """Steps are counted in an attribute that no checkpoint holds; where the count is wrong, so is the update."""
    made = 0

    def before(*given: Any) -> None:
        nonlocal made
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if int(optimizer.state[weights[0]].get("step", 0)) != made:
            torch._foreach_mul_([weight.data for weight in weights], 1.05)
        made += 1

    optimizer.register_step_pre_hook(before)


def planted(seen: object, knobs: object) -> Proof:
    return Proof(True, "planted")


technique = Technique(
    name="breaks",
    stage=Stage.MODEL,
    apply=apply,
    knobs={"kind": KnobRange(("validate", "sample", "resume", "killed"), "where it breaks", planted)},
    claim=Claim("tokens_per_s", 0.0, regime="planted", source="tests"),
    parity=Parity.EXACT,
    evidence=planted,
)
