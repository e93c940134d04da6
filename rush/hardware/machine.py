"""What a machine is, as far as training on it is concerned: a plain record, to JSON and back.

It holds facts that were found, not rates that were measured (`ceilings`) or printed on a datasheet
(`catalog`). It is written beside every run, so that a number always has the machine it came from, and its
fingerprint says whether an earlier measurement is still valid for this machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rush.errors import DataError

DeviceKind = Literal["cpu", "cuda", "mps"]


@dataclass(frozen=True)
class Device:
    """One accelerator; on a CPU-only machine the CPU itself, with the machine's memory."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    num_multiprocessors: int | None = None
    num_nvlinks: int | None = None


@dataclass(frozen=True)
class Link:
    """How two accelerators reach each other: by NVLink or over the PCIe tree (and how far up in it)."""

    first: int
    second: int
    kind: str
    peer_to_peer: bool


@dataclass(frozen=True)
class Cpu:
    model: str
    num_cores: int
    num_threads: int
    """Logical cores this process may use, which a container or a batch system can restrict."""
    features: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """Everything the probe found. `device` is where a run on this machine computes."""

    device: DeviceKind
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    cpu: Cpu
    ram_bytes: int
    os: str
    python: str
    torch: str
    triton: str | None
    cuda: str | None
    hip: str | None
    driver: str | None
    cudnn: str | None = None
    nccl: str | None = None

    @property
    def name(self) -> str:
        return self.devices[0].name

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def memory_bytes(self) -> int:
        """Memory of one device: of the smallest, where they differ, since a run must fit on each."""
        return min(device.memory_bytes for device in self.devices)

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability that all devices have."""
        known = [device.capability for device in self.devices if device.capability is not None]
        return min(known) if len(known) == len(self.devices) else None

    def summary(self) -> str:
        """One line for people: `2 × NVIDIA H200 (140 GiB each)`."""
        size = f"{self.memory_bytes / 2**30:.0f} GiB"
        if self.device == "cpu":
            return f"CPU {self.cpu.model} ({self.cpu.num_threads} cores, {size})"
        if self.num_devices == 1:
            return f"{self.name} ({size})"
        return f"{self.num_devices} × {self.name} ({size} each)"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Machine:
        """The inverse of `to_dict`; a DataError when it is not such a record."""
        try:
            devices = tuple(
                Device(**{**row, "capability": tuple(row["capability"]) if row["capability"] else None})
                for row in data["devices"]
            )
            cpu = Cpu(**{**data["cpu"], "features": tuple(data["cpu"]["features"])})
            links = tuple(Link(**row) for row in data["links"])
            return Machine(**{**data, "devices": devices, "links": links, "cpu": cpu})
        except (KeyError, TypeError) as error:
            raise DataError(
                f"This is not a machine record as rush writes it ({error}); probe the machine again."
            ) from None

    def fingerprint(self) -> str:
        """Sixteen hex digits that change when a measured rate may no longer hold."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
