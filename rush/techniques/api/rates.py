"""Which rates of a machine are worth measuring before techniques are judged: dtypes that torch multiplies, and our own kernel.

A product by our kernel has a rate of its own, which no dtype's tells. Its kernel is built where it is first used; who only
looks at a machine should not wait for a compiler, so unasked it is measured only once it lies in the cache.
"""

from __future__ import annotations

from rush.errors import KernelRefusal, MachineError
from rush.hardware import Machine
from rush.hardware.measure import DTYPES, HALF_KERNEL
from rush.kernels import fp16_linear


def rates_to_measure(machine: Machine, *, build: bool) -> tuple[str, ...]:
    """Their names, for `ceilings`; our kernel is loaded if it is among them. `build`: compile it if need be (ten seconds)."""
    if machine.device != "cpu" or fp16_linear.cannot_run() is not None:
        return DTYPES
    if not (build or fp16_linear.is_built()):
        return DTYPES
    try:
        fp16_linear.load()
    except (KernelRefusal, MachineError):
        return DTYPES  # the technique that needs it says why, when it is tried
    return (*DTYPES, HALF_KERNEL)
