"""Which matmul rates of a machine to measure: torch's dtypes, and our own fp16 kernel.

Our kernel is built at first use, so unless asked to build it is measured only once it is in the cache.
"""

from __future__ import annotations

from rush.errors import KernelRefusal, MachineError
from rush.hardware import Machine
from rush.hardware.measure import DTYPES, HALF_KERNEL
from rush.kernels import fp16_linear


def rates_to_measure(machine: Machine, *, build: bool) -> tuple[str, ...]:
    """Names for `ceilings`; loads our kernel if it is among them. `build`: compile it if needed (ten seconds)."""
    if machine.device != "cpu" or fp16_linear.cannot_run() is not None:
        return DTYPES
    if not (build or fp16_linear.is_built()):
        return DTYPES
    try:
        fp16_linear.load()
    except (KernelRefusal, MachineError):
        return DTYPES  # the technique that needs it reports why
    return (*DTYPES, HALF_KERNEL)
