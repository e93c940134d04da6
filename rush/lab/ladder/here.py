"""`rush ladder here`: the first ladder to measure on this machine.

A GPU gets a ladder with a model that keeps it busy, or the same with a smaller batch if its memory is too small; every other
machine gets `tiny`. The probe finds the devices, the planner the memory of each rung.
"""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

from rush.hardware import Machine, probe
from rush.lab.ladder.ladder_file import Addition, LadderPlan, compose, load_ladder
from rush.plan.micro_batch import needed

HERE = "here"
"""Stands for the name of the ladder that fits."""
FOR_GPUS, ANYWHERE = ("gpu", "gpu-small"), "tiny"
"""The first that fits is taken."""
ROOM = 0.9
"""A ladder fits if it needs at most this fraction of the device: the rest is for the driver and for what the planner does not
count."""


def ladder_here() -> tuple[str, str]:
    """The name of the ladder for this machine, and a sentence that gives the reason."""
    return choose(_probe_elsewhere())


def choose(machine: Machine) -> tuple[str, str]:
    """The ladder for a machine, and a sentence that gives the reason."""
    found = machine.summary()
    if machine.device != "cuda":
        return ANYWHERE, f"The ladder for this machine is {ANYWHERE}: {found}, no CUDA or ROCm device."
    for name in FOR_GPUS:
        if peak(load_ladder(name)) <= ROOM * machine.memory_bytes:
            return name, f"The ladder for this machine is {name}: {found}."
    least = peak(load_ladder(FOR_GPUS[-1])) / ROOM / 2**30
    return ANYWHERE, (
        f"The ladder for this machine is {ANYWHERE}: {found}, and {FOR_GPUS[-1]} needs {least:.0f} GiB of GPU memory."
    )


def peak(plan: LadderPlan) -> float:
    """The bytes of the rung that needs most, by the planner."""
    kept: list[Addition] = []
    most = needed(plan.base, "cuda")
    for addition in plan.additions:
        most = max(most, needed(compose(plan.base, [*kept, addition]), "cuda"))
        if addition.keep:
            kept = [*(part for part in kept if not addition.supersedes(part)), addition]
    return most


def _probe_elsewhere() -> Machine:
    """The probe, in a separate process: a ladder's own process never opens the device that its trials measure.

    Forked, because importing torch again takes seconds; on systems other than Linux the probe opens no device.
    """
    if sys.platform != "linux":
        return probe()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(probe).result()
