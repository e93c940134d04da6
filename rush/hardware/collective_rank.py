"""One rank of the processes that time collectives; started by `collectives`.

All ranks must call the same collectives in the same order, or they deadlock: every decision (repeats, when to stop) is made from
values that all ranks share. A repeat starts at a barrier and counts with its slowest rank. Results are checked before timing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rush.files import write_json_atomic

SIZES = {"gloo": (2**16, 2**20, 2**24), "nccl": (2**20, 2**25, 2**28)}
SPECTRUM = {"gloo": tuple(2**k for k in range(10, 25, 2)), "nccl": tuple(2**k for k in range(10, 31, 2))}
"""From messages bound by latency to those bound by bandwidth."""
Row = tuple[str, float, list[float]]


def main(words: list[str]) -> None:
    """Run one rank. Arguments: folder, rank, number of ranks, backend, budget in seconds, perhaps `spectrum`."""
    folder, rank, ranks, backend, budget_s = (
        Path(words[0]), int(words[1]), int(words[2]), words[3], float(words[4])
    )  # fmt: skip
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        if words[5:] == ["spectrum"]:
            results = spectrum(rank, ranks, device, backend, budget_s)
        else:
            verify(rank, ranks, device)
            case_s = budget_s / (2 * len(SIZES[backend]))
            results = {
                "all_reduce": measure(reduce_case, SIZES[backend], rank, ranks, device, case_s),
                "all_gather": measure(gather_case, SIZES[backend], rank, ranks, device, case_s),
            }
    finally:
        dist.destroy_process_group()
    if rank == 0:
        write_json_atomic(folder / "results.json", results)


def verify(rank: int, ranks: int, device: torch.device) -> None:
    mine = torch.full((1000,), rank + 1.0, device=device)
    everyone = torch.empty(1000 * ranks, device=device)
    dist.all_gather_into_tensor(everyone, mine)
    dist.all_reduce(mine)
    each = torch.arange(1.0, ranks + 1, device=device)
    if not torch.equal(everyone, each.repeat_interleave(1000)) or not bool((mine == each.sum()).all()):
        sys.exit("the collectives return wrong numbers; these devices cannot train together")


Case = tuple[Callable[[], object], Callable[[], object], float]


def spectrum(
    rank: int, ranks: int, device: torch.device, backend: str, budget_s: float
) -> dict[str, list[Row]]:
    """All collectives that layouts use, over message sizes, in an initialized process group."""
    verify(rank, ranks, device)
    case_s = budget_s / (len(OPERATIONS) * len(SPECTRUM[backend]))
    return {
        name: measure(make, SPECTRUM[backend], rank, ranks, device, case_s)
        for name, make in OPERATIONS.items()
    }


def reduce_case(size_bytes: int, ranks: int, source: Tensor) -> Case:
    """(setup before each repeat, the collective, bytes of the full buffer)."""
    buffer = source[: size_bytes // source.itemsize].clone()
    # Restored each time: repeated sums would overflow.
    return (
        lambda: buffer.copy_(source[: buffer.numel()]),
        lambda: dist.all_reduce(buffer),
        float(buffer.nbytes),
    )


def gather_case(size_bytes: int, ranks: int, source: Tensor) -> Case:
    mine = source[: size_bytes // source.itemsize // ranks].clone()
    everyone = mine.new_empty(mine.numel() * ranks)
    return (
        lambda: None,
        lambda: dist.all_gather_into_tensor(everyone, mine),
        float(everyone.nbytes),
    )


def scatter_case(size_bytes: int, ranks: int, source: Tensor) -> Case:
    mine = source.new_empty(size_bytes // source.itemsize // ranks)
    everyone = source[: mine.numel() * ranks].clone()
    return lambda: None, lambda: dist.reduce_scatter_tensor(mine, everyone), float(everyone.nbytes)


def send_case(size_bytes: int, ranks: int, source: Tensor) -> Case:
    """Every rank sends to the next and receives from the previous one, as pipeline stages do."""
    mine = source[: size_bytes // source.itemsize].clone()
    got, rank = torch.empty_like(mine), dist.get_rank()

    def send_recv() -> None:
        pair = [
            dist.P2POp(dist.isend, mine, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, got, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return lambda: None, send_recv, float(mine.nbytes)


OPERATIONS = {
    "all_reduce": reduce_case,
    "all_gather": gather_case,
    "reduce_scatter": scatter_case,
    "send": send_case,
}


def measure(
    make: Callable[[int, int, Tensor], Case],
    sizes: tuple[int, ...],
    rank: int,
    ranks: int,
    device: torch.device,
    case_s: float,
) -> list[Row]:
    generator = torch.Generator(device).manual_seed(rank)
    source = torch.randn(max(sizes) // 4, device=device, generator=generator)
    rows: list[Row] = []
    for size_bytes in sizes:
        # At the rate of the last size, would three repeats exceed the budget of a case?
        if rows and 3 * min(rows[-1][2]) * size_bytes / rows[-1][1] > 4 * case_s:
            break
        before, collective, amount = make(size_bytes, ranks, source)
        time_together(before, collective, 2, device)
        (once,) = time_together(before, collective, 1, device)
        repeats = max(3, min(30, int(case_s / once)))
        rows.append((str(size_bytes), amount, time_together(before, collective, repeats, device)))
    return rows


def time_together(
    before: Callable[[], object], collective: Callable[[], object], repeats: int, device: torch.device
) -> list[float]:
    """Seconds of each repeat on the slowest rank; the same list on all ranks."""
    seconds = []
    for _ in range(repeats):
        before()
        dist.barrier()
        _synchronize(device)
        began = time.perf_counter()
        collective()
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(value) for value in slowest]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
