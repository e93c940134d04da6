"""A technique that goes wrong on rank 1 of several, in the way its knob says; a rank that is alone notices nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

from rush.recipe import Knob
from rush.techniques.api.contract import Build, Claim, KnobRange, Parity, Proof, Stage, Technique


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    if build.ranks.rank != 1:
        return
    kind = knobs["kind"]
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "memory":
        raise MemoryError("planted")
    elif kind == "raises":
        raise ValueError("planted on rank 1")
    elif kind == "hangs":
        time.sleep(600)
    elif kind == "unequal":
        # A gradient that is one part in a thousand too large where the ranks' sums are made.
        build.weight_hooks.append(
            lambda model: [p.register_hook(lambda g: 1.001 * g) for p in model.parameters()]
        )


def planted(seen: object, knobs: object) -> Proof:
    return Proof(True, "planted")


technique = Technique(
    name="on_rank_one",
    stage=Stage.MODEL,
    apply=apply,
    knobs={
        "kind": KnobRange(
            ("nothing", "killed", "memory", "raises", "hangs", "unequal"), "what goes wrong", planted
        )
    },
    claim=Claim("tokens_per_s", 0.0, regime="planted", source="tests"),
    parity=Parity.CLOSE,
    evidence=planted,
)
