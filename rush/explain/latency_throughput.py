"""What the topic `cpu-gpu` measures: chains in flight, one operation over ever more numbers, branches, ways of a warp.

On the host the chains and the branches are C (`native/chains.c`), on a GPU they are Triton programs; the operation is
torch's on both. What this machine cannot measure is None or empty, with the reason beside it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rush.errors import MachineError
from rush.explain.clock import stat, timed
from rush.explain.topic import Data, ExplainSettings
from rush.hardware.stopwatch import time_calls

SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 15 / 16, 1.0)
"""Fraction of the elements that take the branch."""
ELEMENTS = 2**16
WAYS = (1, 2, 4, 8, 16, 32)
THREADS_OF_A_MULTIPROCESSOR = 2048


def measure(settings: ExplainSettings) -> Data:
    from rush.explain.native.chains import compile_chains

    chains, cuda = compile_chains(), settings.device == "cuda"
    missing = chains if isinstance(chains, str) else None
    data: Data = {
        "kind": settings.device,
        "cores": settings.machine.cpu.num_threads,
        "lanes": None if isinstance(chains, str) else chains.lanes,
        "missing": missing,
        "no_gpu": None if cuda else _no_gpu(),
        "host_chains": [],
        "device_chains": [],
        "branches": [],
        "ways": [],
        "round_trip": None,
    }
    if not isinstance(chains, str):
        data["host_chains"] = _host_chains(chains, settings)
        data["branches"] = _branches(chains, settings)
    data["operation"] = _operation("cpu", settings)
    if cuda:
        data |= _on_device(settings)
        data["operation"] += _operation("cuda", settings)
    return data


def _no_gpu() -> str:
    import torch

    return (
        "the CPU was asked for" if torch.cuda.is_available() else "torch finds no CUDA device on this machine"
    )


def _samples(settings: ExplainSettings) -> int:
    return 5 if settings.quick else 15


def _host_chains(chains: Any, settings: ExplainSettings) -> list[Data]:
    """Chains of one core, scalar and in vectors, then of all cores."""
    from rush.explain.native.chains import COUNTS

    # A millisecond or so: a step takes at least one nanosecond.
    rounds, cores, rows = (100_000 if settings.quick else 1_000_000), settings.machine.cpu.num_threads, []
    cases = [("scalar", count) for count in COUNTS] + [("vector", count) for count in COUNTS]
    for done, (kind, count) in enumerate(cases):
        settings.progress(f"{count} {kind} chains", done, 40)
        number = count * (chains.lanes if kind == "vector" else 1)
        found = _seconds(partial(chains.run, kind, count, rounds), _samples(settings))
        rows.append({"how": kind, "chains": number, "rounds": rounds, "seconds": found})
    if cores > 1:
        settings.progress("chains on all cores", len(cases), 40)
        with ThreadPoolExecutor(cores) as pool:
            work = partial(chains.run_together, pool, cores, 4 * rounds)
            found = _seconds(work, _samples(settings))
        number = COUNTS[-1] * chains.lanes * cores
        rows.append({"how": "all cores", "chains": number, "rounds": 4 * rounds, "seconds": found})
    return rows


def _seconds(work: Any, samples: int) -> Data:
    return stat(time_calls(work, "cpu", budget_s=0.0, least=samples, most=samples, window_s=0.0))


def _branches(chains: Any, settings: ExplainSettings) -> list[Data]:
    """Seconds per element of a branch and of a select, for elements in random order and sorted."""
    import numpy as np

    generator = np.random.default_rng(0)
    x = generator.random(ELEMENTS, dtype=np.float32)
    out, rows = np.empty_like(x), []
    for done, share in enumerate(SHARES):
        settings.progress(f"a branch taken by {100 * share:.0f} % of the elements", 9 + done, 40)
        which = (generator.random(ELEMENTS) < share).astype(np.uint8)
        ordered = np.sort(which)
        cases = (
            ("branch", "random", chains.choose("by_branch", which, x, out)),
            ("branch", "sorted", chains.choose("by_branch", ordered, x, out)),
            ("select", "random", chains.choose("by_select", which, x, out)),
        )
        for way, order, work in cases:
            samples = time_calls(work, "cpu", budget_s=0.0, least=_samples(settings), most=_samples(settings))
            seconds = stat([each / ELEMENTS for each in samples])
            rows.append({"way": way, "order": order, "share": share, "seconds": seconds})
    return rows


def _operation(where: str, settings: ExplainSettings) -> list[Data]:
    """One addition of torch's over ever more numbers."""
    import torch

    largest = 20 if settings.quick else 28 if where == "cuda" else 24
    rows = []
    for done, power in enumerate(range(0, largest + 1, 4 if settings.quick else 2)):
        number = 2**power
        settings.progress(f"one operation on {number} numbers, {where}", 18 + done // 2, 40)
        x = torch.ones(number, device=where)
        out = torch.empty_like(x)
        work = partial(torch.add, x, 1.0, out=out)
        found = timed(work, where, budget_s=0.02 if settings.quick else 0.1, most=15)
        rows.append({"where": where, "numbers": number, "seconds": found})
        del x, out
    return rows


def _on_device(settings: ExplainSettings) -> Data:
    """A launch, chains on a GPU, and ways of a warp."""
    import torch

    try:
        from rush.explain.native.device import ChainPrograms
        from rush.explain.native.warps import Ways
    except ImportError as error:
        raise MachineError(
            f"the chains of a GPU are Triton programs, and Triton is not here ({error}); install it with pip install triton."
        ) from None
    multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    budget = 0.02 if settings.quick else 0.1
    # A launch must take longer than Python needs for the next one.
    rounds, way_rounds = 100_000, 10_000
    one = torch.ones(1, device="cuda")

    def there_and_back() -> None:
        one.add_(1.0)
        torch.cuda.synchronize()

    found: Data = {"multiprocessors": multiprocessors, "device_chains": [], "ways": []}
    found["round_trip"] = timed(there_and_back, "cpu", budget_s=budget, most=30)
    full = multiprocessors * THREADS_OF_A_MULTIPROCESSOR
    counts = [32, 1024, multiprocessors * 1024, full, 4 * full]
    if not settings.quick:
        counts += [128, 4096, 16 * 1024, multiprocessors * 512, 2 * full]
    for done, threads in enumerate(sorted(set(counts))):
        settings.progress(f"{threads} chains on the GPU", 26 + done, 40)
        programs = ChainPrograms(threads, rounds)
        seconds = timed(programs, "cuda", budget_s=budget, most=15)
        row = {"how": "threads", "chains": programs.threads, "rounds": rounds, "seconds": seconds}
        found["device_chains"].append(row)
    ways = Ways(2 * multiprocessors, way_rounds)
    for whole in (False, True):
        for number in WAYS:
            settings.progress(f"{number} ways", 37, 40)
            work = partial(ways, number, whole_warps=whole)
            seconds = timed(work, "cuda", budget_s=budget, most=11)
            found["ways"].append({"ways": number, "whole_warps": whole, "seconds": seconds})
    return found
