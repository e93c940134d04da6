"""One planted technique, whose knob says what is wrong with it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
    kind = knobs["kind"]
    if kind == "gradient":
        # The error of one tensor out of many: its gradient is one part in twenty too large.
        build.optimizer_hooks.append(lambda optimizer: _spoil(build))
    elif kind == "memory":
        build.step_contexts.append(_take_all_memory)
    elif kind == "memory_error":
        raise MemoryError("planted")
    elif kind == "hang":
        # A grandchild that must be ended, too; tests beside this one have theirs.
        subprocess.Popen(["sleep", os.environ["PLANTED_SLEEP"]])
        time.sleep(600)
    elif kind == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exception":
        raise ValueError("planted trouble")
    elif kind == "slow":
        build.step_contexts.append(_a_twentieth_slower)


def _spoil(build: Build) -> None:
    weight = next(iter(build.model.parameters()))
    weight.register_hook(lambda gradient: 1.05 * gradient)


@contextmanager
def _take_all_memory() -> Iterator[None]:
    import torch

    torch.empty(2**62, dtype=torch.uint8)
    yield


@contextmanager
def _a_twentieth_slower() -> Iterator[None]:
    began = time.perf_counter()
    yield
    time.sleep(0.05 * (time.perf_counter() - began))


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    idle = knobs["kind"] == "nothing"
    return Proof(not idle, "nothing of it was seen" if idle else "planted")


technique = Technique(
    name="plant",
    stage=Stage.ENV,
    apply=apply,
    knobs={
        "kind": KnobRange(
            (
                "nothing", "gradient", "memory", "memory_error", "hang", "segfault", "killed", "exception", "slow"
            ),
            "what is wrong",
            evidence,
        )
    },
    claim=Claim("tokens_per_s", 1.0, regime="planted", source="this test"),
    parity=Parity.CLOSE,
    evidence=evidence,
)  # fmt: skip
