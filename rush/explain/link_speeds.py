"""What the topic `links` measures, and what it takes from the catalog: copies, collectives, gradients of known models.

A message takes a latency and a time in proportion to its bytes (the alpha-beta model). `fit` finds both from timings
over many sizes, every size counting the same: by least squares of the relative error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rush.explain import units
from rush.explain.clock import stat, timed
from rush.explain.topic import Data, ExplainSettings
from rush.hardware.machine import Machine
from rush.hardware.samples import bus_factor
from rush.hardware.stopwatch import Work

KIB, MIB = 2**10, 2**20
HOST = "within host memory"
MODELS = ("gpt2-124m", "llama-3.2-1b", "llama-3.1-8b")
RANKS = 8
GRADIENT_BYTES = 4
"""Bytes of fp32 gradients, DDP's default."""
CATALOG_LINKS = (
    "ethernet-10", "ib-edr", "ib-hdr", "ib-ndr", "pcie3", "pcie4", "pcie5", "nvlink3", "nvlink4", "nvlink5",
)  # fmt: skip
REDUCED_OVER = ("ethernet-10", "ib-ndr", "pcie4", "nvlink3", "nvlink4")
HIDING = "a100-80-sxm"
"""The accelerator whose backward pass an all-reduce is compared with."""


@dataclass(frozen=True)
class AlphaBeta:
    """Seconds of a message: `latency_s` and its bytes over `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float
    worst: float
    """The largest relative distance of a timing from the line."""

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    @property
    def half_bytes(self) -> float:
        """The message of which latency takes half of the time."""
        return self.latency_s * self.bytes_per_s


def fit(points: Sequence[tuple[float, float]]) -> AlphaBeta:
    """The latency and bandwidth nearest to (bytes, seconds); neither is below zero."""
    import numpy as np

    sizes, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    found, *_ = np.linalg.lstsq(np.stack([1 / seconds, sizes / seconds], axis=1), np.ones(len(points)))
    latency, per_byte = float(found[0]), float(found[1])
    if latency < 0:
        latency, per_byte = 0.0, float((sizes / seconds).sum() / ((sizes / seconds) ** 2).sum())
    if per_byte <= 0:
        # Larger messages were no slower: the bandwidth is beyond what these sizes show.
        latency, per_byte = float(seconds.min()), float(seconds.max() / sizes.max()) * 1e-3
    off = abs((latency + sizes * per_byte) / seconds - 1)
    return AlphaBeta(latency, 1 / per_byte, float(off.max()))


def measure(settings: ExplainSettings) -> Data:
    return {
        "kind": settings.device,
        "copies": _copies(settings),
        "collectives": _collectives(settings),
        **catalog(),
    }


def _sizes(settings: ExplainSettings) -> list[int]:
    largest = 16 * MIB if settings.quick else 256 * MIB
    size, sizes = 4 * KIB, []
    while size <= largest:
        sizes.append(size)
        size *= 16 if settings.quick else 4
    return sizes


def _copies(settings: ExplainSettings) -> list[Data]:
    """Copies within the host's memory by one core; on a GPU also between host and device, and within the device."""
    import numpy as np
    import torch

    sizes = _sizes(settings)
    host = torch.randint(0, 256, (MIB,), dtype=torch.uint8).repeat(max(sizes) // MIB)
    ways: list[tuple[str, str, Any, Any]] = [(HOST, "cpu", host.numpy(), torch.empty_like(host).numpy())]
    if settings.device == "cuda":
        card, pinned = torch.empty_like(host, device="cuda"), host.pin_memory()
        ways += [
            ("host to device, page-locked", "cuda", pinned, card),
            ("device to host, page-locked", "cuda", card, pinned),
            ("host to device, ordinary", "cuda", host, card),
            ("device to host, ordinary", "cuda", card, host),
            ("within device memory", "cuda", card, torch.empty_like(card)),
        ]
    found: list[Data] = []
    parts = (len(ways) + 1) * len(sizes)
    for name, device, source, target in ways:
        rows: list[Data] = []
        for size in sizes:
            settings.progress(
                f"copies {name}, {units.size(size)}", len(found) * len(sizes) + len(rows), parts
            )
            if device == "cpu":
                # By numpy, which keeps to one core: a second one, if it is busy elsewhere, takes milliseconds to join.
                copy: Work = partial(np.copyto, target[:size], source[:size])
            else:
                copy = partial(target[:size].copy_, source[:size], non_blocking=True)
            seconds = timed(copy, device, budget_s=0.02 if settings.quick else 0.15, most=15)
            rows.append({"bytes": size, "seconds": seconds})
        found.append({"name": name, "rows": rows})
    return found


def _collectives(settings: ExplainSettings) -> Data:
    """Between all GPUs where there are several, else between two processes of this CPU."""
    from rush.hardware import probe
    from rush.hardware.collectives import measure_collectives

    gpus = settings.machine.num_devices if settings.device == "cuda" else 0
    machine: Machine = settings.machine if gpus > 1 else probe("cpu")
    ranks = gpus if gpus > 1 else 2
    settings.progress(f"collectives between {ranks} processes", 9, 10)
    measured = measure_collectives(machine, ranks, budget_s=0.4 if settings.quick else 6.0, spectrum=True)
    rows = [
        {"operation": each.operation, "bytes": sample.amount, "seconds": stat(sample.seconds)}
        for each in measured
        for sample in each.samples
    ]
    return {"backend": measured[0].backend, "ranks": ranks, "gpus": gpus, "rows": rows}


def catalog() -> Data:
    """Links by their specifications, and what the gradients of known models take over some of them: nothing measured here."""
    from rush.hardware.links import LINKS
    from rush.models.counts import count_parameters
    from rush.models.sizes import SIZES
    from rush.plan.communication import ring
    from rush.plan.target import target_of

    models = [{"name": name, "parameters": count_parameters(SIZES[name])} for name in MODELS]
    reduced = [
        {"model": model["name"], "link": link, "seconds": ring(gradient_bytes(model), RANKS, LINKS[link].bytes_per_s, 2)}
        for link in REDUCED_OVER
        for model in models
    ]  # fmt: skip
    return {
        "links": [
            {"key": key, "what": LINKS[key].what, "bytes_per_s": LINKS[key].bytes_per_s, "source": LINKS[key].source}
            for key in sorted(CATALOG_LINKS, key=lambda key: LINKS[key].bytes_per_s)
        ],
        "models": models,
        "ranks": RANKS,
        "reduced": reduced,
        "backward": {"machine": HIDING, "flops_per_s": target_of(HIDING).rate("bfloat16")},
    }  # fmt: skip


def gradient_bytes(model: Mapping[str, Any]) -> float:
    return float(GRADIENT_BYTES * model["parameters"])


def hiding_tokens(data: Data, bytes_per_s: float) -> float:
    """Tokens a rank and step from which the backward pass takes longer than the all-reduce of its gradients.

    Backward is 4 FLOPs a parameter and token; a ring moves 2 (n − 1)/n of 4 bytes a parameter: the parameters cancel.
    """
    moved = GRADIENT_BYTES * bus_factor("all_reduce", data["ranks"])
    return float(moved / bytes_per_s * data["backward"]["flops_per_s"] / 4)
