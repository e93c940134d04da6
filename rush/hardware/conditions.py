"""Conditions of a measurement: clocks, temperature, throttling, other processes.

The same code is slower on a card that is hot, power-capped or shared. So conditions are recorded with every measurement, while
it runs: an idle card has idle clocks. Unknown values are None.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from rush.hardware import nvml
from rush.hardware.machine import Machine

# NVML's clock event reasons, by bit. Idle (bit 0) and application clocks (bit 1) are not throttling.
_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Conditions:
    clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()
    foreign_processes: int | None = None
    """Other compute processes on the same GPU; None on a CPU."""
    load: float | None = None
    """Load average of the last minute per usable core."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "throttle": list(self.throttle)}


def conditions(machine: Machine) -> Conditions:
    """The current conditions of the first device."""
    load = load_per_core(machine)
    if machine.device != "cuda":
        return Conditions(load=load)
    import torch

    if torch.version.cuda is None:
        return Conditions(load=load)
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    computing = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    found = nvml.ask(lambda library: read_gpu(library, uuid, {os.getpid()}, computing, load))
    return found or Conditions(load=load)


def read_gpu(
    library: Any, uuid: str, own: Collection[int], computing: bool, load: float | None
) -> Conditions:
    """The conditions of one GPU by NVML; `computing`: this process uses it too."""
    handle = library.nvmlDeviceGetHandleByUUID(uuid)
    # NVML renamed throttle reasons to event reasons; both bindings are in use.
    reasons = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None) or (
        library.nvmlDeviceGetCurrentClocksThrottleReasons
    )
    bits = reasons(handle)
    there = {process.pid for process in library.nvmlDeviceGetComputeRunningProcesses(handle)}
    foreign = there - set(own)
    # In a container the driver may see another pid: then one of the unknown processes is this one.
    ourselves = computing and bool(foreign) and not there & set(own)
    return Conditions(
        clock_mhz=library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM),
        temperature_c=library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU),
        throttle=tuple(name for bit, name in _REASONS.items() if bits & bit),
        foreign_processes=len(foreign) - ourselves,
        load=load,
    )


def load_per_core(machine: Machine) -> float | None:
    return os.getloadavg()[0] / machine.cpu.num_threads if hasattr(os, "getloadavg") else None


def load_now(machine: Machine, seconds: float = 0.3) -> float:
    """Current CPU load per usable core; the load average would count processes that ended a minute ago."""
    import psutil  # type: ignore[import-untyped]

    busy = psutil.cpu_percent(interval=seconds) / 100 * psutil.cpu_count()
    return float(busy / machine.cpu.num_threads)
