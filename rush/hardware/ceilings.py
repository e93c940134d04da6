"""How fast this machine really is: measured matmul rates and bandwidths, kept in a small cache.

A datasheet peak is a promise; the ceiling is what a plain large matmul reaches here, with this power limit,
this library and this torch. "% of ceiling" says how much of the reachable a run uses, and works on any
device. It is no bound in the strict sense: a better tuned kernel may pass it by a little. A measurement
takes seconds, so it is kept as JSON per machine fingerprint, with the time it was made: the reader sees
its age and can ask for a new one. A dtype is measured when it is first asked for.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rush.errors import MachineError
from rush.files import write_json_atomic, writing
from rush.hardware.machine import Machine

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Sample:
    """One measured case: `amount` (FLOPs or bytes) done in each of `seconds`; the median gives the rate."""

    case: str
    amount: float
    seconds: tuple[float, ...]

    @property
    def rate(self) -> float:
        ordered = sorted(self.seconds)
        middle = len(ordered) // 2
        median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
        return self.amount / median


@dataclass(frozen=True)
class Ceilings:
    """Measured rates of one device: FLOP/s per dtype and bytes/s per kind of transfer, with their samples."""

    fingerprint: str
    measured_at: float
    matmul: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    bandwidth: Mapping[str, Sample] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Dtypes this device cannot multiply, with the reason."""

    def matmul_rate(self, dtype: str) -> float | None:
        """The best median over the shapes, None when the dtype was not measured or is unsupported."""
        samples = self.matmul.get(dtype)
        return max(sample.rate for sample in samples) if samples else None

    def bytes_per_s(self, transfer: str) -> float | None:
        """`copy` counts reading and writing; the others are one-way between host and device."""
        sample = self.bandwidth.get(transfer)
        return sample.rate if sample else None

    def age_s(self) -> float:
        return max(0.0, time.time() - self.measured_at)

    def to_dict(self) -> dict[str, Any]:
        return {"version": FORMAT_VERSION, **json.loads(json.dumps(asdict(self)))}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Ceilings:
        """The inverse of `to_dict`; ValueError when it is something else."""
        if data.get("version") != FORMAT_VERSION:
            raise ValueError(f"version {data.get('version')!r}")
        return Ceilings(
            fingerprint=data["fingerprint"],
            measured_at=float(data["measured_at"]),
            matmul={dtype: tuple(_sample(row) for row in rows) for dtype, rows in data["matmul"].items()},
            bandwidth={transfer: _sample(row) for transfer, row in data["bandwidth"].items()},
            unsupported=dict(data["unsupported"]),
        )


def ceilings(
    machine: Machine,
    dtypes: Iterable[str] | None = None,
    *,
    bandwidth: bool = True,
    refresh: bool = False,
    folder: Path | None = None,
    on_problem: Callable[[str], None] = lambda problem: None,
) -> Ceilings:
    """The ceilings of this machine for these dtypes (all, if not said), from the cache or measured now.

    The cache is a convenience: when it cannot be read or written, `on_problem` hears why, and the
    rates are measured all the same.
    """
    from rush.hardware import measure

    wanted = tuple(dtypes) if dtypes is not None else measure.DTYPES
    # A CPU is as fast as the threads torch may use; that is a setting of the process, not of the machine.
    identity = machine.fingerprint() + (f"-{measure.num_threads()}" if machine.device == "cpu" else "")
    path = (folder or cache_folder()) / f"ceilings-{machine.device}-{identity}.json"
    known = None if refresh else _read(path, identity, on_problem)
    found = known or Ceilings(identity, time.time())
    missing = [dtype for dtype in wanted if dtype not in found.matmul and dtype not in found.unsupported]
    for dtype in missing:
        result = measure.matmul(machine.device, dtype)
        if isinstance(result, str):
            found = replace(found, unsupported={**found.unsupported, dtype: result})
        else:
            found = replace(found, matmul={**found.matmul, dtype: result})
    if bandwidth and not found.bandwidth:
        found = replace(found, bandwidth=measure.bandwidth(machine.device))
    if found is not known:
        _write(path, found, on_problem)
    return found


def measured_matmul_rate(machine: Machine, dtype: str) -> float:
    """FLOP/s of a large matmul in `dtype` on this machine (cached); MachineError where it cannot do that."""
    found = ceilings(machine, (dtype,), bandwidth=False)
    rate = found.matmul_rate(dtype)
    if rate is None:
        raise MachineError(
            f"{machine.summary()} has no {dtype} matmul to measure: {found.unsupported[dtype]}."
        )
    return rate


def cache_folder() -> Path:
    """`$RUSH_CACHE`, else `$XDG_CACHE_HOME/rush`, else `~/.cache/rush`."""
    if chosen := os.environ.get("RUSH_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rush"


def _read(path: Path, identity: str, on_problem: Callable[[str], None]) -> Ceilings | None:
    if not path.is_file():
        return None
    try:
        found = Ceilings.from_dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        on_problem(f"The cached ceilings in {path} cannot be read ({error}); measuring again.")
        return None
    return found if found.fingerprint == identity else None


def _write(path: Path, found: Ceilings, on_problem: Callable[[str], None]) -> None:
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, found.to_dict())
    except MachineError as error:
        on_problem(f"The measured ceilings are not kept. {error} Or set RUSH_CACHE to another folder.")


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(str(row["case"]), float(row["amount"]), tuple(float(value) for value in row["seconds"]))
