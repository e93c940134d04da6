"""Bandwidth of collectives, measured between processes.

One process per device, over NCCL on GPUs; between processes of one CPU (gloo over loopback) it mostly shows that collectives
work. This module starts the ranks, waits, and ends all of them in any case; a rank is in `collective_rank`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rush.errors import MachineError, RecipeError
from rush.hardware.machine import Machine
from rush.hardware.samples import Collective, Sample

START_LIMIT_S = 120.0
"""Limit for importing torch and the rendezvous on a busy machine."""


# A rank has the sys.path of this process, and exits with it: the stdin pipe closes when the parent dies.
_CHILD = """
import json, os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
sys.path[:] = json.loads(sys.argv.pop(1))
from rush.hardware.collective_rank import main
main(sys.argv[1:])
"""


def measure_collectives(
    machine: Machine, ranks: int, *, budget_s: float = 4.0, spectrum: bool = False
) -> tuple[Collective, ...]:
    """Time collectives between `ranks` new processes, in about `budget_s` after their start.

    `spectrum`: all that layouts use, from messages bound by latency to those bound by bandwidth.
    """
    check_ranks(machine, ranks)
    backend = "nccl" if machine.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory(prefix="rush-collectives-") as name:
        folder = Path(name)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                processes.append(  # noqa: PERF401 (those started before one fails must be in the list)
                    _start(folder, rank, ranks, backend, budget_s, machine, spectrum)
                )
            _wait(processes, folder, time.monotonic() + START_LIMIT_S + 4 * budget_s)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        results = json.loads((folder / "results.json").read_bytes())
    return tuple(
        Collective(
            operation,
            backend,
            ranks,
            tuple(Sample(case, amount, tuple(seconds)) for case, amount, seconds in rows),
        )
        for operation, rows in results.items()
    )


def check_ranks(machine: Machine, ranks: int) -> None:
    """Refuse a number of processes that cannot be measured here."""
    if ranks < 2:
        raise RecipeError(f"Collectives between {ranks} processes were asked for; it takes at least 2.")
    if machine.device == "mps":
        raise MachineError("An Apple GPU has no collectives; set run.device=cpu to measure those of the CPU.")
    if machine.device == "cuda":
        room, found = machine.num_devices, f"this machine has {machine.num_devices} GPUs"
    else:
        room = max(2, machine.cpu.num_threads)
        found = f"more than {room} would wait for each other on the {machine.cpu.num_threads} cores here"
    if ranks > room:
        advice = f"Ask for 2 to {room}." if room > 1 else "Leave them out."
        raise MachineError(f"Collectives between {ranks} processes were asked for; {found}. {advice}")


def _start(
    folder: Path, rank: int, ranks: int, backend: str, budget_s: float, machine: Machine, spectrum: bool
) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, machine.cpu.num_threads // ranks))}
    if backend == "gloo":
        # All ranks are local; the host name need not resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    command = [sys.executable, "-P", "-c", _CHILD, json.dumps(sys.path)]
    with open(folder / f"rank-{rank}.log", "wb") as log:
        return subprocess.Popen(
            [
                *command,
                str(folder),
                str(rank),
                str(ranks),
                backend,
                str(budget_s),
                *(["spectrum"] if spectrum else []),
            ],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float) -> None:
    """Wait for all ranks; MachineError as soon as one fails, or at the deadline."""
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            raise MachineError(
                f"Measuring collectives between {len(processes)} processes did not end in time. "
                "Check for other processes on this machine, or leave the collectives out."
            )
        if any(process.poll() for process in processes):
            break
        time.sleep(0.02)
    for rank, process in enumerate(processes):
        if process.poll():
            lines = (folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()
            raise MachineError(
                f"Measuring collectives failed: process {rank} of {len(processes)} ended with "
                f"{process.returncode}: {lines[-1] if lines else 'no message'}"
            )
