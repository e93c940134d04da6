"""Links, network and power of accelerators in their usual servers, which plans for other machines assume.

Rates are one-way bytes per second of one accelerator; datasheets add both directions, so their figure is halved. A collective
within a server runs at the link's rate, between servers at the rate of the network cards: one per accelerator in servers for
clusters, one in total in ordinary servers. `--link`, `--network` and `--network-cards` of `rush plan` override `SERVERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkKind:
    """A link of one accelerator, one way."""

    key: str
    bytes_per_s: float
    what: str
    source: str


@dataclass(frozen=True)
class Server:
    """The usual server of an accelerator."""

    devices: int
    link: str
    network: str
    watts: float
    source: str = "the accelerator's datasheet"
    """Source of the power: the board's limit, not a run's draw."""
    cards: int | None = None
    """Network cards of the server; None: one per accelerator, as in servers for clusters."""


def _link(key: str, gb_per_s: float, what: str, source: str) -> LinkKind:
    return LinkKind(key, gb_per_s * 1e9, what, source)


_PCI = "PCI-SIG specifications, 16 lanes less encoding"
_NVLINK = "NVIDIA NVLink page and the accelerator's datasheet, halved to one way"
_NETWORK = "InfiniBand Trade Association roadmap; Ethernet by name"
LINKS: Mapping[str, LinkKind] = {
    row.key: row
    for row in (
        _link("pcie3", 15.75, "PCIe 3.0 ×16", _PCI),
        _link("pcie4", 31.5, "PCIe 4.0 ×16", _PCI),
        _link("pcie5", 63.0, "PCIe 5.0 ×16", _PCI),
        _link("nvlink2", 150, "NVLink 2, 6 links (V100 SXM: 300 GB/s)", _NVLINK),
        _link("nvlink3", 300, "NVLink 3, 12 links (A100: 600 GB/s)", _NVLINK),
        _link("nvlink3-a800", 200, "NVLink 3, 8 links (A800: 400 GB/s)", "NVIDIA A800 datasheet, halved to one way"),
        _link("nvlink4", 450, "NVLink 4, 18 links (H100, H200 SXM: 900 GB/s)", _NVLINK),
        _link("nvlink4-nvl", 300, "NVLink 4 bridge (H100 NVL: 600 GB/s)", _NVLINK),
        _link("nvlink5", 900, "NVLink 5, 18 links (B200: 1.8 TB/s)", _NVLINK),
        _link("infinity4", 448, "Infinity Fabric, 7 links of 64 GB/s (MI300X: 896 GB/s)", "AMD Instinct MI300X data sheet, halved"),
        _link("memory", 20, "processes of one host", "an assumption"),
        _link("ib-edr", 12.5, "InfiniBand EDR, 100 Gb/s", _NETWORK),
        _link("ib-hdr", 25, "InfiniBand HDR, 200 Gb/s", _NETWORK),
        _link("ib-ndr", 50, "InfiniBand NDR, 400 Gb/s", _NETWORK),
        _link("ib-xdr", 100, "InfiniBand XDR, 800 Gb/s", _NETWORK),
        _link("ethernet-10", 1.25, "Ethernet, 10 Gb/s", _NETWORK),
        _link("ethernet-25", 3.125, "Ethernet, 25 Gb/s", _NETWORK),
        _link("ethernet-100", 12.5, "Ethernet with RDMA, 100 Gb/s", _NETWORK),
        _link("ethernet-400", 50, "Ethernet with RDMA, 400 Gb/s", _NETWORK),
    )
}  # fmt: skip


SERVERS: Mapping[str, Server] = {
    "t4": Server(4, "pcie3", "ethernet-25", 70, cards=1),
    "v100-16-sxm": Server(8, "nvlink2", "ib-edr", 300),
    "v100-32-sxm": Server(8, "nvlink2", "ib-edr", 300),
    "v100-16-pcie": Server(4, "pcie3", "ethernet-25", 250, cards=1),
    "v100-32-pcie": Server(4, "pcie3", "ethernet-25", 250, cards=1),
    "v100s-pcie": Server(4, "pcie3", "ethernet-25", 250, cards=1),
    "3090": Server(8, "pcie4", "ethernet-10", 350, cards=1),
    "4090": Server(8, "pcie4", "ethernet-10", 450, cards=1),
    "5090": Server(8, "pcie5", "ethernet-10", 575, cards=1),
    "l40s": Server(8, "pcie4", "ethernet-100", 350, cards=1),
    "a100-40-sxm": Server(8, "nvlink3", "ib-hdr", 400),
    "a100-80-sxm": Server(8, "nvlink3", "ib-hdr", 400),
    "a100-40-pcie": Server(8, "pcie4", "ethernet-100", 250, cards=1),
    "a100-80-pcie": Server(8, "pcie4", "ethernet-100", 300, cards=1),
    "a800-80-sxm": Server(8, "nvlink3-a800", "ib-hdr", 400),
    "a800-80-pcie": Server(8, "pcie4", "ethernet-100", 300, cards=1),
    "a800-40-active": Server(4, "pcie4", "ethernet-25", 240, cards=1),
    "h100-pcie": Server(8, "pcie5", "ib-ndr", 350),
    "h100-sxm": Server(8, "nvlink4", "ib-ndr", 700),
    "h100-nvl": Server(8, "pcie5", "ib-ndr", 400),
    "h200-sxm": Server(8, "nvlink4", "ib-ndr", 700),
    "h200-nvl": Server(8, "pcie5", "ib-ndr", 600),
    "b200": Server(8, "nvlink5", "ib-ndr", 1000),
    "mi300x": Server(8, "infinity4", "ib-ndr", 750),
    "cpu": Server(1, "memory", "ethernet-10", 200, "a server's processor, an assumption", cards=1),
}
"""By the key of the catalog."""
