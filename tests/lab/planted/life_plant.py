"""A technique whose knob says what goes wrong in the course of a life, and never within a step. Being imported puts it on the list."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rush.recipe import Knob
from rush.techniques import registry
from rush.techniques.api.contract import Build, Claim, KnobRange, Observation, Parity, Proof, Stage, Technique


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    kind = knobs["kind"]
    if kind == "hangs":
        time.sleep(600)
    elif kind == "warns":
        warnings.warn("planted", stacklevel=1)
    elif kind == "forgets":
        build.step_contexts.append(_counting(build))
    elif kind in ("needs gradients", "validates otherwise"):
        build.model.register_forward_hook(_raises if kind == "needs gradients" else _otherwise)


def _counting(build: Build) -> Any:
    """Counts steps in a place that no checkpoint holds, and learns by the count."""
    steps = itertools.count()
    factor = 1.0

    @contextmanager
    def counted() -> Iterator[None]:
        nonlocal factor
        factor = 1 + next(steps) / 100
        if factor == 1:
            next(iter(build.model.parameters())).register_hook(lambda gradient: factor * gradient)
        yield

    return counted


def _raises(model: nn.Module, inputs: Any, output: Tensor) -> None:
    if not torch.is_grad_enabled():
        raise RuntimeError("planted: there is no gradient")


def _otherwise(model: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
    return None if torch.is_grad_enabled() else 1.05 * output


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    return Proof(True, "planted")


technique = Technique(
    name="life_plant",
    stage=Stage.ENV,
    apply=apply,
    knobs={
        "kind": KnobRange(
            ("nothing", "hangs", "warns", "forgets", "needs gradients", "validates otherwise"),
            "what is wrong",
            evidence,
        )
    },
    claim=Claim("tokens_per_s", 1.0, regime="planted", source="this test"),
    parity=Parity.CLOSE,
    evidence=evidence,
)
registry()[technique.name] = technique
