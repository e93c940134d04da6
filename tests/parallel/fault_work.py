"""Ranks that meet with misfortune: `rush train` in forks of a process that has imported everything, with faults put in."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rush.parallel import rendezvous
from tests.forks import Process
from tests.parallel.rank_work import PRELOADED, free_port

LIMIT_S = 120.0


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, when it is about to launch which step (or, "in a save", to save it)."""

    kind: str
    rank: int
    step: int


@dataclass(frozen=True)
class Ended:
    codes: list[int]
    said: str
    seconds: float


def train(
    words: Sequence[str | Path],
    log: Path,
    *,
    world: int = 2,
    fault: Fault | None = None,
    words_of: Mapping[int, Sequence[str | Path]] | None = None,
    more: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> Ended:
    """`rush train WORDS` on ranks that find each other as under torchrun; how they ended, all by themselves.

    A rank that never comes and is not found out is killed here, and has the code -9.
    """
    surroundings = {"MASTER_PORT": str(free_port()), **(more or {})}
    log.write_text("")
    processes = []
    for rank in range(world):
        said = [str(word) for word in (words_of or {}).get(rank, words)]
        rest = (rank, world, surroundings, said, fault, str(log))
        processes.append(Process(_rank, *rest, preloaded=PRELOADED, run=False))
    began = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, began + limit_s - time.monotonic()))
    seconds = time.monotonic() - began
    for process in processes:
        process.kill()
        process.join()
        process.line.close()
    return Ended([int(process.exitcode or 0) for process in processes], log.read_text(), seconds)


def _rank(
    rank: int, world: int, surroundings: Mapping[str, str], words: list[str], fault: Fault | None, log: str
) -> None:
    torch.set_num_threads(1)
    told = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(told, 1)
    os.dup2(told, 2)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
    )
    os.environ.update(surroundings)
    rendezvous.LEAVE_S = 0.5  # no launcher here ends the others when one has left
    if fault is not None and fault.rank == rank:
        _plant(fault)
    from rush.cli import main

    main(["train", *words])


def _plant(fault: Fault) -> None:
    from rush.training import session

    if fault.kind == "killed in a save":
        from rush.records.checkpoint_store import CheckpointStore

        seal = CheckpointStore.commit

        def commit(store: Any, step: int, *rest: Any, **more: Any) -> Any:
            if step == fault.step:
                os.kill(os.getpid(), signal.SIGKILL)
            return seal(store, step, *rest, **more)

        CheckpointStore.commit = commit  # type: ignore[method-assign]
        return
    launch = session.launch_step

    def launch_step(run: Any, step: int, *rest: Any, **more: Any) -> Any:
        if step == fault.step:
            _strike(fault.kind, run)
        return launch(run, step, *rest, **more)

    session.launch_step = launch_step  # type: ignore[assignment]


def _strike(kind: str, run: Any) -> None:
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "crashed":
        raise ValueError("a bug in a rank")
    elif kind == "asleep":
        time.sleep(LIMIT_S)
    elif kind == "full":
        with (
            suppress(OSError),
            open(Path(os.environ["CHECKPOINTS"]).parent.parent / "filler", "ab", 0) as filler,
        ):
            while True:
                filler.write(bytes(512))
    elif kind == "read-only":
        folder = os.environ["CHECKPOINTS"]
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        while subprocess.run(
            ["mount", "-o", "remount,bind,ro", folder], capture_output=True, check=False
        ).returncode:
            time.sleep(0.01)  # a save is writing there
    elif kind == "flipped bit":
        from rush.parallel.sharded import local_tensor

        local_tensor(run.model.blocks[1].mlp.up.weight.detach()).view(torch.int32)[3, 5] ^= 1
    else:
        assert kind == "", kind
