"""The record of a machine: devices, links, CPU, memory and versions, without rates (`ceilings`, `catalog`).

It is saved with every run. Its fingerprint shows whether an earlier measurement is valid for this machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from rush.errors import DataError

DeviceKind = Literal["cpu", "cuda", "mps"]


Count = Annotated[int, Field(ge=0, lt=2**62)]


@dataclass(frozen=True)
class Device:
    """One accelerator; on a CPU-only machine the CPU itself, with the machine's memory."""

    name: str
    memory_bytes: Count
    capability: tuple[Count, Count] | None = None
    num_multiprocessors: Count | None = None
    num_nvlinks: Count | None = None


@dataclass(frozen=True)
class Link:
    """The path between two accelerators: NVLink, or a level of the PCIe topology."""

    first: Count
    second: Count
    kind: str
    peer_to_peer: bool


@dataclass(frozen=True)
class Cpu:
    model: str
    num_cores: Count
    num_threads: Count
    """Logical cores that this process may use."""
    features: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """The result of a probe. `device` is where runs compute."""

    device: DeviceKind
    devices: Annotated[tuple[Device, ...], Field(min_length=1)]
    links: tuple[Link, ...]
    cpu: Cpu
    ram_bytes: Count
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
        """Memory of the smallest device."""
        return min(device.memory_bytes for device in self.devices)

    @property
    def capability(self) -> tuple[int, int] | None:
        """Lowest CUDA compute capability of the devices."""
        known = [device.capability for device in self.devices if device.capability is not None]
        return min(known) if len(known) == len(self.devices) else None

    def summary(self) -> str:
        """In one line: `2 × NVIDIA H200 (140 GiB each)`."""
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
        """The inverse of `to_dict`; DataError for another record."""
        try:
            devices = tuple(
                Device(**{**row, "capability": tuple(row["capability"]) if row["capability"] else None})
                for row in data["devices"]
            )
            cpu = Cpu(**{**data["cpu"], "features": tuple(data["cpu"]["features"])})
            links = tuple(Link(**row) for row in data["links"])
            found = Machine(**{**data, "devices": devices, "links": links, "cpu": cpu})
            return _schema().validate_json(json.dumps(asdict(found)), strict=True)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"This is not a machine record as rush writes it ({error}); probe the machine again."
            ) from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise DataError(
                f"This is not a machine record as rush writes it ({where} is {first['input']!r:.80}; {first['msg']}); "
                "probe the machine again."
            ) from None

    def fingerprint(self) -> str:
        """Sixteen hex digits that change with anything that may change measured rates."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _schema() -> TypeAdapter[Machine]:
    return TypeAdapter(Machine)
