"""A world in which a step is mostly waiting, so that a busy test machine hardly disturbs it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from rush.recipe import Knob
from rush.techniques.api.contract import (
    Build,
    Claim,
    KnobRange,
    Observation,
    Parity,
    Proof,
    Stage,
    Technique,
)


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    step_us = int(knobs["step_us"])

    @contextmanager
    def wait() -> Iterator[None]:
        began = time.perf_counter()
        yield
        # A longer wait has more operators: what a profile does not show is taken for a claim without an effect.
        for _ in range(step_us // 3000):
            torch.zeros(1)
        # At least this long from start to end, whatever the machine made of the step itself.
        time.sleep(max(0.0, step_us / 1e6 - (time.perf_counter() - began)))

    build.step_contexts.append(wait)


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    return Proof(seen.step_ms >= int(knobs["step_us"]) / 1000, f"steps of {seen.step_ms:.1f} ms")


technique = Technique(
    name="steady",
    stage=Stage.ENV,
    apply=apply,
    knobs={"step_us": KnobRange((60_000, 63_000), "the length of a step", evidence)},
    claim=Claim("tokens_per_s", -0.05, regime="planted", source="this test"),
    parity=Parity.EXACT,
    evidence=evidence,
)
