"""What the probe says about this machine, compared with what the system says in other ways."""

from __future__ import annotations

import json
import mmap
import os
import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rush.errors import DataError, MachineError, RecipeError
from rush.hardware import Device, Machine, peak_memory_bytes, probe, process_memory, reset_peak_memory
from rush.hardware.nvml import collect


def test_the_cpu_is_described_as_the_system_describes_it() -> None:
    machine = probe("cpu")
    assert machine.device == "cpu"
    assert machine.num_devices == 1
    assert machine.memory_bytes == machine.ram_bytes
    assert machine.cpu.num_threads == len(os.sched_getaffinity(0))
    assert 1 <= machine.cpu.num_cores <= (os.cpu_count() or 1)
    assert machine.torch == torch.__version__
    assert machine.python == platform.python_version()
    assert machine.capability is None
    free = subprocess.run(["free", "-b"], capture_output=True, text=True, check=True).stdout
    assert machine.ram_bytes <= int(free.splitlines()[1].split()[1]) * 1.001


def test_cpu_features_are_those_of_the_kernels_list() -> None:
    features = probe("cpu").cpu.features
    with open("/proc/cpuinfo") as file:
        flags = next(line for line in file if line.startswith(("flags", "Features"))).split()
    assert ("avx512" in features) == ("avx512f" in flags)
    assert ("neon" in features) == ("asimd" in flags)
    assert ("amx_bf16" in features) == ("amx_bf16" in flags)


def test_a_machine_goes_to_json_and_back_unchanged() -> None:
    machine = probe("auto")
    text = json.dumps(machine.to_dict(), allow_nan=False)
    assert Machine.from_dict(json.loads(text)) == machine
    gpu = Device("NVIDIA H200", 150, (9, 0), 132, 18)
    other = Machine(**{**vars(machine), "device": "cuda", "devices": (gpu, gpu)})
    back = Machine.from_dict(json.loads(json.dumps(other.to_dict())))
    assert back == other
    assert back.capability == (9, 0)
    assert back.summary().startswith("2 × NVIDIA H200")
    with pytest.raises(DataError, match="machine record"):
        Machine.from_dict({"device": "cpu"})


def test_the_fingerprint_is_stable_and_changes_with_what_matters() -> None:
    machine = probe("cpu")
    assert probe("cpu").fingerprint() == machine.fingerprint()
    assert Machine(**{**vars(machine), "torch": "2.10.0"}).fingerprint() != machine.fingerprint()
    assert Machine(**{**vars(machine), "driver": "1"}).fingerprint() != machine.fingerprint()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_asking_for_cuda_where_there_is_none_is_a_message() -> None:
    with pytest.raises(MachineError, match="cuda") as caught:
        probe("cuda")
    assert '"cpu"' in str(caught.value)


def test_an_unknown_device_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(RecipeError, match="did you mean 'cuda'"):
        probe("cudo")


def test_the_machine_record_and_the_catalog_load_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import rush.hardware; rush.hardware.CATALOG['h200-sxm']"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_peak_memory_sees_an_allocation_and_can_be_reset() -> None:
    reset_peak_memory("cpu")
    before = peak_memory_bytes("cpu")
    # Mapped afresh: an allocator may hand out memory that is resident already.
    block = mmap.mmap(-1, 40 * 2**20)
    block.write(b"1" * len(block))
    assert peak_memory_bytes("cpu") - before >= 30 * 2**20
    peak = peak_memory_bytes("cpu")
    block.close()
    # The kernel counts in batches per thread, so the figure wavers by some pages.
    assert peak_memory_bytes("cpu") == pytest.approx(peak, abs=2**20)
    reset_peak_memory("cpu")
    assert peak_memory_bytes("cpu") < peak - 30 * 2**20
    assert process_memory().resident_bytes <= process_memory().peak_resident_bytes


class DriverError(Exception):
    pass


def driver(nvlinks: int, pairs: dict[tuple[int, int], str]) -> Any:
    """A stand-in for the driver's library; `pairs` says how each pair is connected."""

    def link_state(handle: int, link: int) -> int:
        if link >= nvlinks:
            raise DriverError
        return 1

    def peer(first: int, second: int, capability: int) -> int:
        kind = pairs[first, second]
        return 0 if kind == "nvlink" or (capability == 0 and kind == "system+p2p") else 1

    return SimpleNamespace(
        NVMLError=DriverError, NVML_NVLINK_MAX_LINKS=18, NVML_FEATURE_ENABLED=1, NVML_P2P_STATUS_OK=0,
        NVML_P2P_CAPS_INDEX_READ=0, NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_TOPOLOGY_INTERNAL=0, NVML_TOPOLOGY_SINGLE=10, NVML_TOPOLOGY_MULTIPLE=20,
        NVML_TOPOLOGY_HOSTBRIDGE=30, NVML_TOPOLOGY_NODE=40, NVML_TOPOLOGY_SYSTEM=50,
        nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid[-1]), nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetNvLinkState=link_state, nvmlDeviceGetP2PStatus=peer,
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: 50 if "system" in pairs[a, b] else 10,
    )  # fmt: skip


def test_links_between_gpus_are_read_in_the_order_torch_sees_them() -> None:
    library = driver(4, {(3, 1): "nvlink", (3, 0): "system", (1, 0): "system+p2p"})
    facts = collect(library, ["GPU-3", "GPU-1", "GPU-0"])
    assert facts.driver == "580.1"
    assert facts.num_nvlinks == (4, 4, 4)
    assert [(link.first, link.second, link.kind, link.peer_to_peer) for link in facts.links] == [
        (0, 1, "nvlink", True),
        (0, 2, "between CPU sockets", False),
        (1, 2, "between CPU sockets", True),
    ]


@pytest.mark.gpu
def test_a_gpu_is_described_as_nvidia_smi_describes_it() -> None:
    asked = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,compute_cap,memory.total",
        "--format=csv,noheader,nounits",
    ]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    name, driver_version, capability, memory_mib = (part.strip() for part in printed.split(","))
    machine = probe("cuda")
    assert machine.name == name
    assert machine.driver == driver_version
    assert machine.capability is not None
    assert ".".join(map(str, machine.capability)) == capability
    assert machine.memory_bytes == pytest.approx(int(memory_mib) * 2**20, rel=0.03)
