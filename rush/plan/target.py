"""The machine of a plan: rates of one device, its links, and the source of each figure.

Rates are *measured here* (this machine's ceilings, from `rush probe`), *calibrated* (the mean ceilings of an
accelerator on which findings under `results/` were made, also for this machine if its own differ little), or from the
*datasheet*, derated by what large matmuls and copies reach where both are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rush.errors import MachineError, RecipeError, nearest
from rush.hardware.catalog import CATALOG, Datasheet
from rush.hardware.links import LINKS, SERVERS
from rush.hardware.machine import Cpu, Device, Machine

DERATING = {"float32": 0.76, "tf32": 0.76, "float16": 0.70, "bfloat16": 0.74, "float8": 0.65, "int8": 0.48}
"""Measured ceiling over datasheet peak on the H200s under `results/` (51/67, 380/495, 665/989, 735/989, 1280/1979; int8 by
cuBLAS, 949/1979); used for every accelerator that was not measured. Chips that are not power-limited reach more (an A100 about
0.8)."""
BANDWIDTH_DERATING = 0.87
"""Measured copy rate over datasheet bandwidth: 4.18 of 4.8 TB/s."""
BETTER = {
    "a100": 0.78,
    "a800": 0.78,
    "v100": 0.75,
    "t4": 0.45,
    "3090": 0.80,
    "4090": 0.85,
    "5090": 0.80,
    "l40s": 0.65,
    "mi300x": 0.47,
}
"""Fraction of the dense peak that large 16-bit matmuls reach, where it differs: published measurements differ by ±5 %, so this
is an assumption, for machines under sustained load. (A T4 is limited by its 70 W; an MI300X is reported to reach
about 45 % of its peaks in 16 and 8 bits: Ambati et al., October 2025; its maker's own best case is 0.54.)"""
EIGHT_BIT_TOO = ("mi300x",)
"""Those whose fraction holds for 8-bit matmuls as well."""
MEASURED = {
    "h200-sxm": {
        "float32": 51e12, "tf32": 381e12, "float16": 666e12, "bfloat16": 736e12, "float8": 1280e12, "copy": 4.18e12,
    }
}  # fmt: skip
"""Ceilings of the accelerators behind the findings under `results/`: the means of their records."""
ALIKE = 0.10
"""Probes within this distance of the means use the means. A probe is a short burst: on fourteen H200s it measured 691 to 793
TFLOP/s in bf16, where the speeds of one recipe differed by 2 to 5 %, and not in the same direction."""


@dataclass(frozen=True)
class TargetMachine:
    """A number of equal devices."""

    key: str
    name: str
    memory_bytes: float
    matmul: Mapping[str, float]
    """FLOP/s of a large matmul by dtype."""
    peaks: Mapping[str, float]
    """The datasheet's dense peaks; empty where there are none."""
    bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    devices_per_node: int
    devices: int
    watts: float
    how: str
    """measured here, calibrated or datasheet."""
    sources: tuple[str, ...]
    kind: str = "cuda"
    launch_s: float | None = None
    """Host time per operator call; None where no probe measured it."""
    network_cards: int = 1
    """Network cards per node, shared by all rings between nodes."""
    host_bytes: float | None = None
    """Host memory of a server; None where it is not known."""
    features: tuple[str, ...] = ()
    """CPU features, as the probe names them; empty if unknown."""
    capability: tuple[int, int] | None = None
    """As torch reports it."""
    rocm: bool = False

    def rate(self, dtype: str) -> float:
        """FLOP/s of large matmuls; a dtype without a rate uses fp32's (or what was measured)."""
        return self.matmul.get(dtype) or self.matmul.get("float32") or min(self.matmul.values())

    def machine(self) -> Machine:
        """The machine as a probe would describe it, for techniques' requirements."""
        device = Device(self.name, int(self.memory_bytes), self.capability)
        return Machine(
            device="cuda" if self.kind == "cuda" else "cpu",
            devices=(device,) * min(self.devices, self.devices_per_node),
            links=(),
            cpu=Cpu("unknown", 16, 16, self.features),
            ram_bytes=2**40,
            os="Linux",
            python="3",
            torch="2",
            triton="3",
            cuda=None if self.rocm else "13",
            hip="7" if self.rocm else None,
            driver=None,
        )


def target_of(
    name: str,
    devices: int | None = None,
    nodes: int | None = None,
    link: str | None = None,
    network: str | None = None,
    cards: int | None = None,
) -> TargetMachine:
    """A machine of the catalog by its key; RecipeError names the nearest."""
    key = name.lower()
    if key != "cpu" and key not in CATALOG:
        raise RecipeError(f"there is no machine {name!r} in the catalog; {nearest(key, [*CATALOG, 'cpu'])}")
    server = SERVERS[key]
    per_node = server.devices
    total = (devices or 1) * (nodes or 1) if nodes else (devices or 1)
    if nodes:
        per_node = devices or per_node
        total = per_node * nodes
    chosen, wire = _known(link or server.link), _known(network or server.network)
    cards = cards or (per_node if server.cards is None else server.cards)
    base = _cpu() if key == "cpu" else _from_sheet(CATALOG[key])
    return replace(
        base,
        link_bytes_per_s=LINKS[chosen].bytes_per_s,
        network_bytes_per_s=LINKS[wire].bytes_per_s,
        network_cards=cards,
        devices_per_node=per_node,
        devices=total,
        watts=server.watts,
        sources=(
            *base.sources,
            LINKS[chosen].source,
            f"{cards} network card{'' if cards == 1 else 's'} a server, {LINKS[wire].what}: {LINKS[wire].source}",
            f"{server.watts:g} W: {server.source}",
        ),
    )


def _known(link: str) -> str:
    if link not in LINKS:
        raise RecipeError(f"there is no link {link!r} in the catalog; {nearest(link, LINKS)}")
    return link


def _from_sheet(sheet: Datasheet) -> TargetMachine:
    share = BETTER.get(sheet.chip)
    lowered = ("float16", "bfloat16", "tf32", *(("float8", "int8") if sheet.chip in EIGHT_BIT_TOO else ()))
    rates = {
        dtype: peak * (share if share is not None and dtype in lowered else DERATING[dtype])
        for dtype, peak in sheet.peak_flops.items()
    }
    if sheet.key in MEASURED:
        rates |= MEASURED[sheet.key]
        unmeasured = ", ".join(sorted(sheet.peak_flops.keys() - MEASURED[sheet.key].keys()))
        copy, how = rates.pop("copy"), "calibrated"
        source = "ceilings measured on this kind of accelerator (results/)"
        source += f"; {unmeasured} from the datasheet, derated" if unmeasured else ""
    else:
        copy, how = BANDWIDTH_DERATING * sheet.bytes_per_s, "datasheet"
        source = f"{sheet.source}, derated"
    reserved = 0.985  # the driver keeps a little: an H200 of 141 GB shows 139.8 GiB
    memory = 150_109_880_320 if sheet.key == "h200-sxm" else sheet.memory_bytes * reserved
    return TargetMachine(
        sheet.key, sheet.key, memory, rates, sheet.peak_flops, copy, 0, 0, 1, 1, 0, how, (source,),
        capability=sheet.capability, rocm=sheet.rocm,
    )  # fmt: skip


def _cpu() -> TargetMachine:
    rates = {"float32": 1.5e12, "bfloat16": 1.5e12}
    return TargetMachine("cpu", "a server's CPU", 256 * 2**30, rates, {}, 100e9, 0, 0, 1, 1, 0, "assumed",
                  ("a server CPU of 32 cores at 1.5 TFLOP/s and 100 GB/s; probe your own",), "cpu")  # fmt: skip


def with_memory_limit(target: TargetMachine, limit_gb: float | None) -> TargetMachine:
    """The machine with its memory limited to `run.memory_limit_gb`."""
    if limit_gb is None:
        return target
    if limit_gb * 1e9 > target.memory_bytes:
        raise RecipeError(
            f"run.memory_limit_gb is {limit_gb:g}, more than the {target.memory_bytes / 1e9:.0f} GB of {target.name}; lower it "
            "or remove it."
        )
    source = f"device memory is limited to {limit_gb:g} GB (run.memory_limit_gb)"
    return replace(target, memory_bytes=limit_gb * 1e9, sources=(*target.sources, source))


def find_target(
    machine: str | None = None,
    devices: int | None = None,
    nodes: int | None = None,
    link: str | None = None,
    network: str | None = None,
    network_cards: int | None = None,
    *,
    limit_gb: float | None = None,
) -> TargetMachine:
    """A machine of the catalog, or this one by its measured rates; with its memory limited where `limit_gb` is given."""
    from rush.hardware import probe
    from rush.hardware.ceilings import known_ceilings

    if machine is not None:
        return with_memory_limit(target_of(machine, devices, nodes, link, network, network_cards), limit_gb)
    here = probe()
    known = known_ceilings(here)
    if known is None or not known.matmul or not known.bandwidth:
        raise MachineError(
            "the rates of this machine are not known yet; measure them once with `rush probe`, or name an accelerator of the "
            "catalog with --machine."
        )
    target = target_here(here, known.rates())
    target = replace(target, devices=(devices or target.devices) * (nodes or 1))
    return with_memory_limit(target, limit_gb)


def target_here(machine: Machine, rates: Mapping[str, Any]) -> TargetMachine:
    """This machine, from its probe and its measured ceilings (`Ceilings.rates()`), or the mean ceilings of its kind if they are
    close."""
    from rush.hardware.catalog import find

    sheet = find(machine.devices[0]) if machine.device == "cuda" else None
    usual = MEASURED.get(sheet.key, {}) if sheet else {}

    def calibrated(name: str, found: float) -> float:
        return usual[name] if name in usual and abs(found / usual[name] - 1) <= ALIKE else found

    found = {dtype: float(rate) for dtype, rate in rates["matmul"].items() if rate}
    matmul = {dtype: calibrated(dtype, rate) for dtype, rate in found.items()}
    copy = calibrated("copy", float(rates.get("copy_bytes_per_s") or 10e9))
    as_usual = matmul != found
    server = SERVERS[sheet.key if sheet else "cpu"]
    buses = [row["bus_bytes_per_s"] for row in rates.get("collectives", ())]
    return TargetMachine(
        key=sheet.key if sheet else "here",
        name=machine.name,
        memory_bytes=machine.memory_bytes,
        matmul=matmul,
        peaks=sheet.peak_flops if sheet else {},
        bytes_per_s=copy,
        link_bytes_per_s=max(buses, default=LINKS[server.link].bytes_per_s),
        network_bytes_per_s=LINKS[server.network].bytes_per_s,
        network_cards=machine.num_devices if server.cards is None else server.cards,
        devices_per_node=machine.num_devices,
        devices=machine.num_devices,
        watts=server.watts,
        how="calibrated" if as_usual else "measured here",
        sources=(
            f"ceilings measured on this kind of accelerator (results/); this one's are within {ALIKE:.0%} of them"
            if as_usual
            else "ceilings measured on this machine",
        ),
        kind="cuda" if machine.device == "cuda" else "cpu",
        launch_s=rates.get("launch_s"),
        host_bytes=machine.ram_bytes if machine.device == "cuda" else None,
        features=machine.cpu.features,
        capability=machine.capability,
        rocm=machine.hip is not None,
    )
