"""Facts from the NVIDIA driver: its version, NVLinks, and the paths between GPUs.

Read by nvidia-ml-py; without package or driver the result is None. GPUs are identified by UUID: the driver numbers all GPUs,
torch only the visible ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rush.hardware.machine import Link


@dataclass(frozen=True)
class DriverFacts:
    driver: str
    num_nvlinks: tuple[int, ...]
    links: tuple[Link, ...]


Answer = TypeVar("Answer")


def ask(question: Callable[[Any], Answer]) -> Answer | None:
    """The result of `question` with NVML initialized; None without NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        # No driver, no permission in this container, or a MIG slice.
        return None


def read(uuids: Sequence[str]) -> DriverFacts | None:
    """Facts about these GPUs, in this order; None without NVML."""
    return ask(lambda nvml: collect(nvml, uuids))


def collect(nvml: Any, uuids: Sequence[str]) -> DriverFacts:
    """The facts, with NVML initialized."""
    handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    driver = nvml.nvmlSystemGetDriverVersion()
    links = tuple(
        Link(first, second, *_connection(nvml, handles[first], handles[second]))
        for first in range(len(handles))
        for second in range(first + 1, len(handles))
    )
    return DriverFacts(
        driver=driver.decode() if isinstance(driver, bytes) else driver,
        num_nvlinks=tuple(_count_nvlinks(nvml, handle) for handle in handles),
        links=links,
    )


def _count_nvlinks(nvml: Any, handle: Any) -> int:
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
        except nvml.NVMLError:
            # This GPU has no link of that number.
            break
    return active


def _connection(nvml: Any, first: Any, second: Any) -> tuple[str, bool]:
    """The path between two GPUs, and whether it allows peer-to-peer access."""

    def allowed(capability: int) -> bool:
        try:
            return bool(nvml.nvmlDeviceGetP2PStatus(first, second, capability) == nvml.NVML_P2P_STATUS_OK)
        except nvml.NVMLError:
            return False

    if allowed(nvml.NVML_P2P_CAPS_INDEX_NVLINK):
        return "nvlink", True
    names = {
        nvml.NVML_TOPOLOGY_INTERNAL: "same board",
        nvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
        nvml.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PCIe host bridge",
        nvml.NVML_TOPOLOGY_NODE: "one NUMA node",
        nvml.NVML_TOPOLOGY_SYSTEM: "between CPU sockets",
    }
    level = nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
    return names.get(level, f"level {level}"), allowed(nvml.NVML_P2P_CAPS_INDEX_READ)
