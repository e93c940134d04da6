"""No garbage collection inside a step; one on purpose every so many steps.

Python looks for unreachable cycles of objects whenever enough new ones were made, that is, at a moment
nobody chose. With the millions of objects of a large training process a full look takes tens or hundreds of
milliseconds, in which no kernel is launched; with several ranks, each at another step, all wait for each.
Here the collector rests inside steps and is called by hand. Short runs of small models show nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rush.recipe import Knob
from rush.techniques.api.contract import Build, Claim, KnobRange, Observation, Parity, Proof, Stage, Technique


class ManualCollection:
    """The surroundings of a step in which Python collects only when told to."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.steps = 0

    @contextmanager
    def resting(self) -> Iterator[None]:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
            self.steps += 1
            if self.steps % self.every == 0:
                gc.collect()
        finally:
            if was_enabled:
                gc.enable()


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    build.step_contexts.append(ManualCollection(int(knobs["every"])).resting)


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """Looked at from inside a step, Python's automatic collection is off."""
    enabled = seen.facts["gc_enabled_in_step"]
    return Proof(not enabled, f"automatic garbage collection is {'on' if enabled else 'off'} inside a step")


technique = Technique(
    name="gc_control",
    stage=Stage.ENV,
    apply=apply,
    knobs={"every": KnobRange((100, 20, 1000), "steps between collections")},
    claim=Claim(
        "pauses of hundreds of milliseconds",
        -1.0,
        regime="large training processes; most of all many ranks in step",
        source="torchtitan and nanochat, which both switch it off; their training scripts",
    ),
    parity=Parity.EXACT,
    evidence=evidence,
)
