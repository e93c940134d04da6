"""Worker threads prepare batches ahead, while the device computes.

Without workers a step waits for its batches: reading, slicing and copying tokens on the thread that also
launches kernels. Workers prepare the next batches meanwhile, so the wait disappears as long as they keep up.
It shows only where the wait is noticeable: short steps, slow disks, long rows. The order of samples does not
depend on the number of workers.
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
    """Worker threads were running during the steps; the wait for data is reported with it."""
    threads = seen.loader_threads
    return Proof(
        0 < threads <= int(knobs["count"]),
        f"{threads} loader threads running; {seen.data_wait_ms:.2f} ms of {seen.step_ms:.1f} ms spent waiting for data",
    )


technique = Technique(
    name="loader_workers",
    stage=Stage.DATA,
    apply=apply,
    knobs={"count": KnobRange((2, 1, 4, 8), "worker threads")},
    claim=Claim(
        "data_wait_ms",
        -1.0,
        regime="preparing a batch takes less time than a step",
        source="PyTorch performance tuning guide, asynchronous data loading",
    ),
    parity=Parity.EXACT,
    evidence=evidence,
    memory=(MemoryEffect("buffers", 1.0, "a few prefetched batches in host memory"),),
    work=(WorkEffect("data.workers", 2.0, "threads", by_knob=lambda knobs: float(knobs["count"])),),
)
