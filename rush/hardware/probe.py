"""Probe this machine: devices, memory, versions, CPU features, links between GPUs.

Nothing is measured: a probe takes milliseconds, plus the import of torch. A device that is not available is an error; "auto" is
an accelerator if there is one, else the CPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

from rush.errors import MachineError, RecipeError, nearest
from rush.hardware import nvml
from rush.hardware.machine import Cpu, Device, DeviceKind, Link, Machine

# Instruction sets for matmuls, by their names in Linux, and our names.
_FEATURES = {
    "avx2": "avx2", "avx512f": "avx512", "avx512_bf16": "avx512_bf16", "avx512_vnni": "avx512_vnni",
    "amx_tile": "amx", "amx_bf16": "amx_bf16", "amx_int8": "amx_int8",
    "asimd": "neon", "asimdhp": "fp16", "asimddp": "dotprod", "sve": "sve", "sve2": "sve2",
    "bf16": "bf16", "i8mm": "i8mm",
}  # fmt: skip
# ARM prints numbers instead of names: (implementer, part).
_ARM_CORES = {
    (0x41, 0xD03): "Cortex-A53", (0x41, 0xD08): "Cortex-A72", (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1", (0x41, 0xD40): "Neoverse-V1", (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2", (0x41, 0xD84): "Neoverse-V3", (0x41, 0xD8E): "Neoverse-N3",
}  # fmt: skip

_OPTIONAL = (
    "triton", "torchao", "bitsandbytes", "liger-kernel", "transformers", "datasets", "datatrove", "ray",
    "pyarrow", "wandb",
)  # fmt: skip


def probe(device: str = "auto") -> Machine:
    """The record of this machine. `device`: "auto", "cpu", "cuda" or "mps"; MachineError if it is not available."""
    import torch

    kind = _choose(device)
    cpu, ram_bytes = _cpu(), _ram_bytes()
    devices: tuple[Device, ...] = (Device(cpu.model, ram_bytes),)
    links: tuple[Link, ...] = ()
    driver = cudnn = nccl = None
    if kind == "cuda":
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        facts = nvml.read([f"GPU-{properties.uuid}" for properties in found]) if torch.version.cuda else None
        devices = tuple(
            Device(
                name=properties.name,
                memory_bytes=properties.total_memory,
                capability=(properties.major, properties.minor),
                num_multiprocessors=properties.multi_processor_count,
                num_nvlinks=facts.num_nvlinks[index] if facts else None,
            )
            for index, properties in enumerate(found)
        )
        links, driver = (facts.links, facts.driver) if facts else (_peers(len(found)), None)
        cudnn, nccl = _library_versions()
    elif kind == "mps":
        devices = (Device(cpu.model, torch.mps.recommended_max_memory()),)
    return Machine(
        device=kind,
        devices=devices,
        links=links,
        cpu=cpu,
        ram_bytes=ram_bytes,
        # Major and minor only, without the name of a kernel build.
        os=f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        driver=driver,
        cudnn=cudnn,
        nccl=nccl,
    )


def packages() -> dict[str, str | None]:
    """Installed versions of optional packages; None if not installed."""
    return {name: _version(name) for name in _OPTIONAL}


def _choose(device: str) -> DeviceKind:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "cpu":
        return "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            why = (
                "this torch is built without CUDA"
                if torch.version.cuda is None
                else "torch sees no CUDA device"
            )
            raise MachineError(
                f"The device cuda was asked for, but {why} (torch {torch.__version__}). {_OTHERWISE}"
            )
        return "cuda"
    if device == "mps":
        if not torch.backends.mps.is_available():
            raise MachineError(f"The device mps was asked for, but there is no Apple GPU here. {_OTHERWISE}")
        return "mps"
    raise RecipeError(f"Unknown device {device!r}; {nearest(device, ('auto', 'cpu', 'cuda', 'mps'))}")


def _peers(num_devices: int) -> tuple[Link, ...]:
    """Peer-to-peer access by torch, without NVML."""
    import torch

    return tuple(
        Link(first, second, "unknown path", torch.cuda.can_device_access_peer(first, second))
        for first in range(num_devices)
        for second in range(first + 1, num_devices)
    )


def _library_versions() -> tuple[str | None, str | None]:
    """cuDNN and NCCL as torch was built with them (on ROCm: MIOpen and RCCL)."""
    import torch

    number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    # 91002 is 9.10.2; before version 9 one digit less stood for the minor: 8902 was 8.9.2.
    base = 10_000 if number is not None and number >= 90_000 else 1_000
    cudnn = None if number is None else f"{number // base}.{number % base // 100}.{number % 100}"
    if not torch.distributed.is_nccl_available():
        return cudnn, None
    return cudnn, ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


_OTHERWISE = 'Use "auto" or "cpu", or run where such a device is.'


def _cpu() -> Cpu:
    information = _cpuinfo()
    flags = (information.get("flags") or information.get("Features") or "").split()
    features = tuple(ours for theirs, ours in _FEATURES.items() if theirs in flags)
    if sys.platform == "darwin" and platform.machine() == "arm64":
        features = ("neon", "fp16", "dotprod")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Cpu(_cpu_model(information), num_cores=_num_cores(), num_threads=usable or 1, features=features)


def _num_cores() -> int:
    """Physical cores: distinct sets of sibling threads on Linux."""
    lists = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    return len({path.read_text() for path in lists}) or os.cpu_count() or 1


def _cpuinfo() -> dict[str, str]:
    """The first core's block of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    block = path.read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_model(information: dict[str, str]) -> str:
    if "model name" in information:
        return information["model name"]
    if "CPU part" in information:
        core = (int(information["CPU implementer"], 16), int(information["CPU part"], 16))
        return _ARM_CORES.get(core, f"ARM core {core[0]:#x}/{core[1]:#x}")
    if sys.platform == "darwin":
        asked = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return platform.processor() or platform.machine()


def _ram_bytes() -> int:
    """Memory of the machine, or of the container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.exists() and (limit := path.read_text().strip()).isdigit():
            total = min(total, int(limit))
    return total


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
