"""Batches are made ahead, by worker threads, while the device computes.

Without workers a step first waits for its batches: reading, cutting and copying tokens on the thread that
also feeds the device. Workers make the next batches meanwhile, so the wait disappears as long as they can
keep up. It shows only where the wait was worth mentioning: short steps, slow disks, long rows. The order of
samples does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping

from rush.recipe import Knob
from rush.techniques.api.contract import (
    Build,
    Claim,
    KnobRange,
    MemoryEffect,
    Observation,
    Parity,
    Proof,
    Stage,
    Technique,
    WorkEffect,
)


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    build.loader_options["workers"] = int(knobs["count"])


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """Worker threads were at work while the steps ran; the wait for data is reported beside it."""
    threads = seen.facts["loader_threads"]
    return Proof(
        0 < threads <= int(knobs["count"]),
        f"{threads} loader threads at work; {seen.data_wait_ms:.2f} ms of {seen.step_ms:.1f} ms spent waiting for data",
    )


technique = Technique(
    name="loader_workers",
    stage=Stage.DATA,
    apply=apply,
    knobs={"count": KnobRange((2, 1, 4, 8), "worker threads")},
    claim=Claim(
        "data_wait_ms",
        -1.0,
        regime="a batch takes less time to make than a step to compute",
        source="PyTorch performance tuning guide, asynchronous data loading",
    ),
    parity=Parity.EXACT,
    evidence=evidence,
    memory=(MemoryEffect("buffers", 1.0, "a few batches ahead, in host memory"),),
    work=(WorkEffect("data.ahead", 2.0, "threads", by_knob=lambda knobs: float(knobs["count"])),),
)
