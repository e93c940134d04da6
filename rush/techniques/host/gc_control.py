"""No automatic garbage collection inside a step; an explicit one every so many steps.

Python's cyclic garbage collector runs whenever enough objects were allocated. With the millions of objects
of a large training process a full collection takes tens or hundreds of milliseconds, in which no kernel is
launched; with several ranks, each at another step, all wait for each. Here automatic collection is off
inside steps and runs at fixed intervals. Short runs of small models show no difference.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import rush.techniques.api.contract as api


class ManualCollection:
    """Context of a step without automatic garbage collection."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.steps = self.collections = 0

    @contextmanager
    def disabled(self) -> Iterator[None]:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
            self.steps += 1
            if self.steps % self.every == 0:
                gc.collect()
                self.collections += 1
        finally:
            if was_enabled:
                gc.enable()


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.step_contexts.append(build.facts.note(ManualCollection(int(knobs["every"]))).disabled)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Inside a step, automatic garbage collection is off."""
    how = "on" if seen.gc_enabled else "off"
    return api.Proof(not seen.gc_enabled, f"automatic garbage collection is {how} inside a step")


def _every_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The context of the steps collects at this interval, and has collected as often as it fits into the steps so far."""
    noted, every = seen.facts.noted(ManualCollection), int(knobs["every"])
    if noted is None or not noted.steps:
        return api.Proof(False, "no step ran without automatic collection")
    return api.Proof(
        noted.every == every and noted.collections == noted.steps // every,
        f"{noted.collections} collections in {noted.steps} steps, one every {noted.every}",
    )


technique = api.Technique(
    name="gc_control",
    stage=api.Stage.ENV,
    apply=apply,
    knobs={"every": api.KnobRange((100, 20, 1000), "steps between collections", _every_seen)},
    claim=api.Claim(
        "pauses of hundreds of milliseconds",
        -1.0,
        regime="large training processes; most of all many ranks in step",
        source="torchtitan and nanochat, which both switch it off; their training scripts",
    ),
    parity=api.Parity.EXACT,
    evidence=evidence,
)
