"""Worker threads prepare batches ahead, while the device computes.

Without workers a step waits for its batches: reading, slicing and copying tokens on the thread that also
launches kernels. Workers prepare the next batches meanwhile, so the wait disappears as long as they keep up.
It shows only where the wait is noticeable: short steps, slow disks, long rows. The order of samples does not
depend on the number of workers.
"""

from __future__ import annotations

import rush.techniques.api.contract as api


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.loader_options["workers"] = int(knobs["count"])


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """So many worker threads were running during the steps; the wait for data is reported with it."""
    threads = seen.loader_threads
    return api.Proof(
        threads == int(knobs["count"]),
        f"{threads} loader threads running; {seen.data_wait_ms:.2f} ms of {seen.step_ms:.1f} ms spent waiting for data",
    )


technique = api.Technique(
    name="loader_workers",
    stage=api.Stage.DATA,
    apply=apply,
    knobs={"count": api.KnobRange((2, 1, 4, 8), "worker threads", evidence)},
    claim=api.Claim(
        "data_wait_ms",
        -1.0,
        regime="preparing a batch takes less time than a step",
        source="PyTorch performance tuning guide, asynchronous data loading",
    ),
    parity=api.Parity.EXACT,
    evidence=evidence,
    memory=(api.MemoryEffect("buffers", 1.0, "a few prefetched batches in host memory"),),
    work=(api.WorkEffect("data.workers", 2.0, "threads", by_knob=lambda knobs: float(knobs["count"])),),
)
