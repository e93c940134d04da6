"""Device names as drivers print them, and the datasheet each must (or must not) be matched with."""

from __future__ import annotations

import pytest

from rush.hardware import CATALOG, Cpu, Device, Machine, datasheet_peak
from rush.hardware.catalog import find
from rush.hardware.machine import DeviceKind

GIB = 2**30

# Names as torch reports them, with total memory as seen on real cards (GiB).
KNOWN = [
    ("Tesla T4", 14.58, "t4", 65e12),
    ("Tesla V100-SXM2-16GB", 15.77, "v100-16-sxm", 125e12),
    ("Tesla V100-SXM2-32GB", 31.73, "v100-32-sxm", 125e12),
    ("Tesla V100-PCIE-16GB", 15.77, "v100-16-pcie", 112e12),
    ("Tesla V100-PCIE-32GB", 31.73, "v100-32-pcie", 112e12),
    ("Tesla V100S-PCIE-32GB", 31.73, "v100s-pcie", 130e12),
    ("NVIDIA GeForce RTX 3090", 23.57, "3090", 71e12),
    ("NVIDIA GeForce RTX 4090", 23.64, "4090", 165.2e12),
    ("NVIDIA GeForce RTX 5090", 31.36, "5090", 209.5e12),
    ("NVIDIA L40S", 44.39, "l40s", 362.05e12),
    ("NVIDIA A100-SXM4-40GB", 39.39, "a100-40-sxm", 312e12),
    ("NVIDIA A100-SXM4-80GB", 79.25, "a100-80-sxm", 312e12),
    ("NVIDIA A100-PCIE-40GB", 39.39, "a100-40-pcie", 312e12),
    ("NVIDIA A100 80GB PCIe", 79.15, "a100-80-pcie", 312e12),
    ("NVIDIA A800-SXM4-80GB", 79.32, "a800-80-sxm", 312e12),
    ("NVIDIA A800 80GB PCIe", 79.15, "a800-80-pcie", 312e12),
    ("NVIDIA H100 PCIe", 79.10, "h100-pcie", 756e12),
    ("NVIDIA H100 80GB HBM3", 79.10, "h100-sxm", 989.4e12),
    ("NVIDIA H100 NVL", 93.10, "h100-nvl", 835.5e12),
    ("NVIDIA H200", 139.72, "h200-sxm", 989.4e12),
    ("NVIDIA H200 NVL", 139.80, "h200-nvl", 835.5e12),
    ("NVIDIA B200", 178.35, "b200", 2250e12),
    ("AMD Instinct MI300X", 191.98, "mi300x", 1307.4e12),
]

UNKNOWN = [
    ("NVIDIA GeForce RTX 3090 Ti", 23.57),
    ("NVIDIA GeForce RTX 4090 D", 23.64),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.99),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75),
    ("NVIDIA A100-SXM4-40GB", 4.75),
    ("NVIDIA A100-SXM-64GB", 63.4),
    ("NVIDIA A100-SXM4-80GB", 39.39),
    ("NVIDIA GH200 480GB", 94.5),
    ("NVIDIA H100", 63.0),
    ("NVIDIA B200", 288.0),
    ("NVIDIA L40", 44.39),
    ("Neoverse-N1", 24.0),
    ("", 80.0),
]


def machine(device: Device, kind: DeviceKind = "cuda") -> Machine:
    return Machine(
        device=kind, devices=(device,), links=(), cpu=Cpu("x", 1, 1, ()), ram_bytes=1, os="x",
        python="3", torch="2", triton=None, cuda=None, hip=None, driver=None,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "gib", "key", "peak"), KNOWN)
def test_a_known_device_is_found_with_its_dense_float16_peak(
    name: str, gib: float, key: str, peak: float
) -> None:
    device = Device(name, int(gib * GIB))
    sheet = find(device)
    assert sheet is not None
    assert sheet.key == key
    assert sheet.peak_flops["float16"] == pytest.approx(peak)
    assert datasheet_peak(machine(device), "float16") == pytest.approx(peak)


@pytest.mark.parametrize(("name", "gib"), UNKNOWN)
def test_an_unknown_device_a_slice_or_a_wrong_memory_has_no_datasheet(name: str, gib: float) -> None:
    device = Device(name, int(gib * GIB))
    assert find(device) is None
    assert datasheet_peak(machine(device), "bfloat16") is None


def test_a_device_fits_at_most_one_entry() -> None:
    for name, gib, key, _ in KNOWN:
        matches = [k for k in CATALOG if find(Device(name, int(gib * GIB))) is CATALOG[k]]
        assert matches == [key]


@pytest.mark.parametrize("key", CATALOG)
def test_every_entry_is_plausible_and_names_its_source(key: str) -> None:
    sheet = CATALOG[key]
    peaks = sheet.peak_flops
    assert ("NVIDIA" if key != "mi300x" else "AMD") in sheet.source
    assert 100e9 < sheet.bytes_per_s < 10e12
    assert 15 * GIB <= sheet.memory_bytes <= 300 * GIB
    assert peaks["float32"] < peaks["float16"]
    # Dense ratios of the architectures: bfloat16 as float16, float8 twice as much, TF32 between the others.
    if "bfloat16" in peaks:
        assert peaks["bfloat16"] == peaks["float16"]
        assert peaks["float32"] <= peaks["tf32"] <= peaks["float16"] / 1.9
    if "float8" in peaks:
        assert peaks["float8"] == pytest.approx(2 * peaks["float16"], rel=0.02)
    # int8 as well; on GeForce cards four times, as only 16-bit (and fp8) matmuls are slower with 32-bit accumulation.
    if sheet.chip != "v100":
        geforce = sheet.chip in ("3090", "4090", "5090")
        assert peaks["int8"] == pytest.approx((4 if geforce else 2) * peaks["float16"], rel=0.02)


def test_the_dtypes_a_device_lacks_have_no_peak() -> None:
    assert "bfloat16" not in CATALOG["t4"].peak_flops
    assert "bfloat16" not in CATALOG["v100-32-sxm"].peak_flops
    assert "float8" not in CATALOG["a100-80-sxm"].peak_flops
    assert "int8" not in CATALOG["v100-32-sxm"].peak_flops


def test_a_cpu_has_no_datasheet_peak() -> None:
    assert datasheet_peak(machine(Device("NVIDIA H200", int(139.7 * GIB)), "cpu"), "float32") is None
