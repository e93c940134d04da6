"""Ceilings: measured matmul rates and bandwidths of this machine, cached.

A ceiling is the rate of a plain large matmul on this machine, with its power limit, libraries and torch, where a datasheet has
a peak. "% of ceiling" works on any device. It is not a strict bound: a better tuned kernel may exceed it slightly. Ceilings are
cached as JSON per machine fingerprint, with their time; a dtype is measured on first use.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rush.errors import MachineError
from rush.files import cache_folder, write_json_atomic, writing
from rush.hardware.conditions import load_now
from rush.hardware.machine import Machine
from rush.hardware.samples import Collective, Sample

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Ceilings:
    """Measured rates: FLOP/s by dtype, bytes/s by transfer, and collectives between devices."""

    fingerprint: str
    measured_at: float
    """Unix time of the oldest part."""
    matmul: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    bandwidth: Mapping[str, Sample] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Dtypes without matmul on this device, with the reason."""
    collectives: tuple[Collective, ...] = ()
    launching: Sample | None = None
    """Operator calls of the host, and their seconds."""
    load: float | None = None
    """Load per usable core before measuring; near 1, other processes ran and rates may be low."""

    def matmul_rate(self, dtype: str) -> float | None:
        """The best median over the shapes; None if the dtype was not measured or is unsupported."""
        samples = self.matmul.get(dtype)
        return max(sample.rate for sample in samples) if samples else None

    def bytes_per_s(self, transfer: str) -> float | None:
        """`copy` counts reads and writes; the others are one-way between host and device."""
        sample = self.bandwidth.get(transfer)
        return sample.rate if sample else None

    @property
    def launch_s(self) -> float | None:
        """Host time per operator call of an eager model."""
        return 1 / self.launching.rate if self.launching else None

    def age_s(self) -> float:
        return max(0.0, time.time() - self.measured_at)

    def rates(self) -> dict[str, Any]:
        """The rates without samples, as JSON values for other records."""
        return {
            "matmul": {dtype: self.matmul_rate(dtype) for dtype in self.matmul},
            "copy_bytes_per_s": self.bytes_per_s("copy"),
            "transfers_bytes_per_s": {
                kind: sample.rate for kind, sample in self.bandwidth.items() if kind != "copy"
            },
            "launch_s": self.launch_s,
            "collectives": [
                {
                    "operation": row.operation,
                    "backend": row.backend,
                    "ranks": row.ranks,
                    "bytes_per_s": row.bytes_per_s,
                    "bus_bytes_per_s": row.bus_bytes_per_s,
                }
                for row in self.collectives
            ],
            "measured_at": datetime.fromtimestamp(self.measured_at, UTC).isoformat(timespec="seconds"),
        }

    def to_dict(self) -> dict[str, Any]:
        return {"version": FORMAT_VERSION, **json.loads(json.dumps(asdict(self)))}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Ceilings:
        """The inverse of `to_dict`; ValueError for another version."""
        if data.get("version") != FORMAT_VERSION:
            raise ValueError(f"version {data.get('version')!r}")
        return Ceilings(
            fingerprint=data["fingerprint"],
            measured_at=float(data["measured_at"]),
            matmul={dtype: tuple(_sample(row) for row in rows) for dtype, rows in data["matmul"].items()},
            bandwidth={transfer: _sample(row) for transfer, row in data["bandwidth"].items()},
            unsupported=dict(data["unsupported"]),
            # Later additions to this version: older files lack them.
            collectives=tuple(
                Collective(**{**row, "samples": tuple(_sample(sample) for sample in row["samples"])})
                for row in data.get("collectives", ())
            ),
            launching=_sample(data["launching"]) if data.get("launching") else None,
            load=data.get("load"),
        )


def ceilings(
    machine: Machine,
    dtypes: Iterable[str] | None = None,
    *,
    bandwidth: bool = True,
    collectives: int | None = None,
    refresh: bool = False,
    folder: Path | None = None,
    on_problem: Callable[[str], None] = lambda problem: None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Ceilings:
    """The ceilings of this machine for these dtypes (default: all), from the cache or measured now.

    `bandwidth`: also memory bandwidth and launches. `collectives`: the number of processes to time collectives between, one per
    GPU; None: no collectives. If the cache cannot be read or written, `on_problem` is called with the reason, and the rates are
    measured. `on_progress` is called with what is measured, the number of parts done, and their total.
    """
    path, identity = _cache_entry(machine, folder)
    known = None if refresh else _read(path, identity, on_problem)
    found = known or Ceilings(identity, time.time(), load=load_now(machine))
    parts = _missing(found, machine, dtypes, bandwidth, collectives)
    for number, (what, measure_it) in enumerate(parts):
        on_progress(what, number, len(parts))
        found = measure_it(found)
    if found is not known:
        _write(path, found, on_problem)
    return found


Part = tuple[str, Callable[[Ceilings], Ceilings]]


def _missing(
    found: Ceilings,
    machine: Machine,
    dtypes: Iterable[str] | None,
    bandwidth: bool,
    collectives: int | None,
) -> list[Part]:
    """The parts that are not known yet: name, and function that adds it."""
    from rush.hardware import measure
    from rush.hardware.collectives import measure_collectives
    from rush.hardware.launch_rate import launching

    def matmul(dtype: str, so_far: Ceilings) -> Ceilings:
        result = measure.matmul(machine.device, dtype)
        if isinstance(result, str):
            return replace(so_far, unsupported={**so_far.unsupported, dtype: result})
        return replace(so_far, matmul={**so_far.matmul, dtype: result})

    wanted = tuple(dtypes) if dtypes is not None else measure.DTYPES
    parts: list[Part] = [
        (f"{dtype} matmul", partial(matmul, dtype))
        for dtype in wanted
        if dtype not in found.matmul and dtype not in found.unsupported
    ]
    if bandwidth and not found.bandwidth:
        parts.append(
            ("memory bandwidth", lambda so_far: replace(so_far, bandwidth=measure.bandwidth(machine.device)))
        )
    if bandwidth and found.launching is None:
        parts.append(("launches", lambda so_far: replace(so_far, launching=launching(machine.device))))
    if collectives is not None and collectives not in {row.ranks for row in found.collectives}:
        parts.append(
            (
                f"collectives between {collectives} processes",
                lambda so_far: replace(
                    so_far, collectives=so_far.collectives + measure_collectives(machine, collectives)
                ),
            )
        )
    return parts


def known_ceilings(machine: Machine) -> Ceilings | None:
    """The cached ceilings of this machine; None without any."""
    path, identity = _cache_entry(machine, None)
    return _read(path, identity, lambda problem: None)


def measured_matmul_rate(machine: Machine, dtype: str) -> float:
    """FLOP/s of a large matmul in `dtype` on this machine (cached); MachineError if unsupported."""
    found = ceilings(machine, (dtype,), bandwidth=False)
    rate = found.matmul_rate(dtype)
    if rate is None:
        raise MachineError(
            f"{machine.summary()} has no {dtype} matmul to measure: {found.unsupported[dtype]}."
        )
    return rate


def _cache_entry(machine: Machine, folder: Path | None) -> tuple[Path, str]:
    """The cache file of this machine, and the fingerprint that it must have."""
    identity = machine.fingerprint()
    if machine.device == "cpu":
        from rush.hardware.measure import num_threads

        # The number of torch threads decides a CPU's rate, and is a setting of the process.
        identity += f"-{num_threads()}"
    return (folder or cache_folder()) / f"ceilings-{machine.device}-{identity}.json", identity


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
