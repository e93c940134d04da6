"""Datasheets: peak arithmetic, memory bandwidth and memory of known accelerators.

Peaks are *dense*: datasheets like to print the figure for half-empty (2:4 sparse) matrices, twice as
high, which training does not use. For GeForce cards the rate with 32-bit accumulation counts, because
that is what training does; int8 accumulates in 32 bits at its full rate, four times the 16-bit one there.
A name alone can be ambiguous (40 or 80 GB, SXM or PCIe, a slice of a card), so the memory found must fit
as well; makers write GB and mean GiB, and a few per cent are reserved. An unknown device has no entry:
better no MFU than one against a guessed peak. The rates of any device can be measured instead (`ceilings`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rush.hardware.machine import Device, Machine


@dataclass(frozen=True)
class Datasheet:
    """One accelerator. `peak_flops` per second by dtype: float32, tf32, float16, bfloat16, float8, int8 (its operations)."""

    key: str
    chip: str
    pattern: str
    memory_bytes: int
    bytes_per_s: float
    peak_flops: Mapping[str, float]
    source: str

    @property
    def capability(self) -> tuple[int, int]:
        """As torch reports it: CUDA's compute capability, or the gfx version of an AMD GPU."""
        return CAPABILITIES[self.chip]

    @property
    def rocm(self) -> bool:
        return self.chip in AMD


CAPABILITIES = {
    "t4": (7, 5), "v100": (7, 0), "3090": (8, 6), "4090": (8, 9), "5090": (12, 0), "l40s": (8, 9), "a100": (8, 0),
    "a800": (8, 0), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0), "mi300x": (9, 4),
}  # fmt: skip
AMD = frozenset({"mi300x"})


def find(device: Device) -> Datasheet | None:
    """The entry whose name pattern and memory both fit, None for an unknown device."""
    name = re.sub(r"^(NVIDIA|AMD)\s+", "", device.name.strip(), flags=re.IGNORECASE)
    for sheet in CATALOG.values():
        fits = 0.88 <= device.memory_bytes / sheet.memory_bytes <= 1.03
        if fits and re.fullmatch(sheet.pattern, name, re.IGNORECASE):
            return sheet
    return None


def datasheet_peak(machine: Machine, dtype: str) -> float | None:
    """Dense peak of one device of this machine in FLOP/s, None where device or dtype has no figure."""
    return (datasheet_peaks(machine) or {}).get(dtype)


def datasheet_peaks(machine: Machine) -> dict[str, float] | None:
    """The dense peaks of one device of this machine in FLOP/s by dtype, None for an unknown device."""
    sheet = find(machine.devices[0]) if machine.device == "cuda" else None
    return dict(sheet.peak_flops) if sheet else None


def _row(
    key: str,
    chip: str,
    pattern: str,
    memory_gib: int,
    gb_per_s: float,
    peaks: Mapping[str, float],
    source: str,
) -> Datasheet:
    rates = {dtype: tera * 1e12 for dtype, tera in peaks.items()}
    return Datasheet(key, chip, pattern, memory_gib * 2**30, gb_per_s * 1e9, rates, source)


def _peaks(
    float32: float,
    half: float,
    *,
    tf32: float | None = None,
    float8: float | None = None,
    int8: float | None = None,
    bfloat16: bool = True,
) -> dict[str, float]:
    """Peaks in TFLOP/s (int8: TOP/s, accumulated in int32); bfloat16 runs at the rate of float16 wherever the device has it."""
    table = {
        "float32": float32,
        "tf32": tf32,
        "float16": half,
        "bfloat16": half if bfloat16 else None,
        "float8": float8,
        "int8": int8,
    }
    return {dtype: rate for dtype, rate in table.items() if rate is not None}


_A100 = _peaks(19.5, 312, tf32=156, int8=624)
_HOPPER_SXM = _peaks(67, 989.4, tf32=494.7, float8=1978.9, int8=1978.9)
_HOPPER_NVL = _peaks(60, 835.5, tf32=417.5, float8=1670.5, int8=1670.5)
_A100_SHEET = "NVIDIA A100 Tensor Core GPU datasheet"
_H100_SHEET = (
    "NVIDIA H100 Tensor Core GPU datasheet and architecture whitepaper, halved where printed with sparsity"
)

_ROWS = (
    _row("t4", "t4", r"(Tesla )?T4", 16, 320, _peaks(8.1, 65, int8=130, bfloat16=False),
         "NVIDIA T4 datasheet (320+ GB/s edition)"),
    _row("v100-16-sxm", "v100", r"(Tesla )?V100-SXM2-16GB", 16, 900, _peaks(15.7, 125, bfloat16=False),
         "NVIDIA V100 datasheet, SXM2 column"),
    _row("v100-32-sxm", "v100", r"(Tesla )?V100-SXM[23]-32GB", 32, 900, _peaks(15.7, 125, bfloat16=False),
         "NVIDIA V100 datasheet, SXM2 column"),
    _row("v100-16-pcie", "v100", r"(Tesla )?V100-PCIE-16GB", 16, 900, _peaks(14, 112, bfloat16=False),
         "NVIDIA V100 datasheet, PCIe column"),
    _row("v100-32-pcie", "v100", r"(Tesla )?V100-PCIE-32GB", 32, 900, _peaks(14, 112, bfloat16=False),
         "NVIDIA V100 datasheet, PCIe column"),
    _row("v100s-pcie", "v100", r"(Tesla )?V100S-PCIE-32GB", 32, 1134, _peaks(16.4, 130, bfloat16=False),
         "NVIDIA V100 datasheet, V100S column"),
    _row("3090", "3090", r"(GeForce )?RTX 3090", 24, 936.2, _peaks(35.6, 71, tf32=35.6, int8=284),
         "NVIDIA Ampere GA102 architecture whitepaper, RTX 3090, FP32 accumulation"),
    _row("4090", "4090", r"(GeForce )?RTX 4090", 24, 1008, _peaks(82.6, 165.2, tf32=82.6, float8=330.3, int8=660.6),
         "NVIDIA Ada architecture whitepaper, RTX 4090, FP32 accumulation"),
    _row("5090", "5090", r"(GeForce )?RTX 5090", 32, 1792, _peaks(104.8, 209.5, tf32=104.8, float8=419, int8=838),
         "NVIDIA RTX Blackwell architecture whitepaper, RTX 5090, FP32 accumulation"),
    _row("l40s", "l40s", r"L40S", 48, 864, _peaks(91.6, 362.05, tf32=183, float8=733, int8=733),
         "NVIDIA L40S datasheet"),
    _row("a100-40-sxm", "a100", r"A100-SXM4-40GB", 40, 1555, _A100, _A100_SHEET),
    _row("a100-80-sxm", "a100", r"A100-SXM4-80GB", 80, 2039, _A100, _A100_SHEET),
    _row("a100-40-pcie", "a100", r"A100(-PCIE-40GB| 40GB PCIe)", 40, 1555, _A100, _A100_SHEET),
    _row("a100-80-pcie", "a100", r"A100(-PCIE-80GB| 80GB PCIe)", 80, 1935, _A100, _A100_SHEET),
    _row("a800-80-sxm", "a800", r"A800-SXM4-80GB", 80, 2039, _A100,
         "NVIDIA A800 datasheet (A100 with NVLink at 400 GB/s)"),
    _row("a800-80-pcie", "a800", r"A800(-PCIE-80GB| 80GB PCIe)", 80, 1935, _A100,
         "NVIDIA A800 datasheet (A100 with NVLink at 400 GB/s)"),
    _row("a800-40-active", "a800", r"A800 40GB Active", 40, 1555, _A100, "NVIDIA A800 40GB Active datasheet"),
    _row("h100-pcie", "h100", r"H100( PCIe| 80GB HBM2e)", 80, 2039, _peaks(51, 756, tf32=378, float8=1513, int8=1513),
         "NVIDIA H100 architecture whitepaper, PCIe column, dense"),
    _row("h100-sxm", "h100", r"H100( SXM5?)?( 80GB HBM3)?", 80, 3352, _HOPPER_SXM, _H100_SHEET),
    _row("h100-nvl", "h100", r"H100 NVL", 94, 3938, _HOPPER_NVL, _H100_SHEET),
    _row("h200-sxm", "h200", r"H200", 141, 4800, _HOPPER_SXM,
         "NVIDIA H200 Tensor Core GPU datasheet, SXM, halved where printed with sparsity"),
    _row("h200-nvl", "h200", r"H200 NVL", 141, 4800, _HOPPER_NVL,
         "NVIDIA H200 Tensor Core GPU datasheet, NVL, halved where printed with sparsity"),
    _row("b200", "b200", r"B200", 180, 8000, _peaks(80, 2250, tf32=1100, float8=4500, int8=4500),
         "NVIDIA Blackwell architecture technical brief, HGX B200 at 1000 W, dense"),
    _row("mi300x", "mi300x", r"(Instinct )?MI300X( OAM)?", 192, 5300, _peaks(163.4, 1307.4, tf32=653.7, float8=2614.9, int8=2614.9),
         "AMD Instinct MI300X data sheet, matrix rates, dense"),
)  # fmt: skip

CATALOG: Mapping[str, Datasheet] = {row.key: row for row in _ROWS}
