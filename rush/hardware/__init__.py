"""This machine: what it is (`probe`), how fast it is (`ceilings`), its datasheet (`catalog`)."""

from __future__ import annotations

from rush.hardware.catalog import CATALOG, Datasheet, datasheet_peak, datasheet_peaks
from rush.hardware.ceilings import Ceilings, ceilings, measured_matmul_rate
from rush.hardware.conditions import Conditions, conditions
from rush.hardware.machine import Cpu, Device, Link, Machine
from rush.hardware.memory_use import (
    fragmentation_hint,
    free_memory,
    memory_in_use,
    out_of_memory,
    peak_memory_bytes,
    process_memory,
    reset_peak_memory,
)
from rush.hardware.probe import packages, probe
from rush.hardware.samples import Collective

__all__ = [
    "CATALOG",
    "Ceilings",
    "Collective",
    "Conditions",
    "Cpu",
    "Datasheet",
    "Device",
    "Link",
    "Machine",
    "ceilings",
    "conditions",
    "datasheet_peak",
    "datasheet_peaks",
    "fragmentation_hint",
    "free_memory",
    "measured_matmul_rate",
    "memory_in_use",
    "out_of_memory",
    "packages",
    "peak_memory_bytes",
    "probe",
    "process_memory",
    "reset_peak_memory",
]
