"""Where ranks meet, before they exchange anything.

At MASTER_ADDR:MASTER_PORT there is a store: rank 0's own, or the launcher's. There each rank lays down a card: what it is
about to run, or why it will not come. Rank 0 reads them all and says whether they may go on, before any of them waits for
another in an exchange, where unlike ranks would wait for ever. What is wrong is so said once, by rank 0, for all.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rush.errors import MachineError, RankLost, RecipeError, RushError
from rush.parallel.ranks import SAID, error_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ANSWER_S = 10.0
"""How long whoever listens at the meeting point may take to answer as a store does."""
LATER_S = 5.0
"""What a rank that cannot come waits with its leaving: launchers end all ranks when one is gone, and rank 0 should have spoken."""


def started_rank() -> int:
    """This process's number, as its environment has it."""
    return int(os.environ.get("RANK", "0"))


def started_world() -> int:
    """How many processes were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def tell_absent(error: RushError) -> bool:
    """Tell rank 0, which may be waiting for all, that this rank will not come, and why; whether it was heard."""
    rank, world = started_rank(), started_world()
    with suppress(RushError, RuntimeError):
        store = meeting_point(rank, world, LATER_S)
        store.set(f"card/{rank}", "")
        store.set("absent", json.dumps({"error": type(error).__name__, "says": f"rank {rank}: {error}"}))
        store.wait(["verdict"], timedelta(seconds=LATER_S))
        heard = bool(json.loads(store.get("verdict")))
        store.add("heard", 1)
        return heard
    return False


def meet(store: Store, rank: int, world: int, card: str, timeout_s: float) -> None:
    """Lay down this rank's card and hear what rank 0 makes of all of them."""
    store.set(f"card/{rank}", card)
    if rank == 0:
        verdict = _judge(store, world, card, timeout_s)
        store.set("verdict", json.dumps(verdict))
        deadline = time.monotonic() + LATER_S
        # The store may be ours, and go with us.
        while verdict and store.add("heard", 0) < world - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        store.wait(["verdict"], timedelta(seconds=timeout_s + LATER_S))
        verdict = json.loads(store.get("verdict"))
        store.add("heard", 1)
    if verdict:
        refusal = error_of(verdict["error"], verdict["says"])
        if rank:
            refusal.add_note(SAID)
        raise refusal


def _judge(store: Store, world: int, card: str, timeout_s: float) -> dict[str, Any]:
    """What keeps these ranks from going on, if anything; said by rank 0 for all."""
    deadline = time.monotonic() + timeout_s
    for rank in range(1, world):
        while not store.check([f"card/{rank}"]) and not store.check(["absent"]):
            if time.monotonic() > deadline:
                late = [r for r in range(1, world) if not store.check([f"card/{r}"])]
                return {
                    "error": RankLost.__name__,
                    "says": f"{_ranks(late)} did not come within {timeout_s:g} s; look at the messages of their machines, "
                    "and start all of them again.",
                }
            time.sleep(0.05)
    if store.check(["absent"]):
        told: dict[str, Any] = json.loads(store.get("absent"))
        return told
    cards = [store.get(f"card/{rank}").decode() for rank in range(world)]
    unlike = [rank for rank in range(world) if cards[rank] != card]
    if not unlike:
        return {}
    return {
        "error": RecipeError.__name__,
        "says": f"{len(unlike)} of {world} ranks came with something else than rank 0, which has {card}: rank {unlike[0]} "
        f"has {cards[unlike[0]]}; start all of them with the same command, recipe and installation.",
    }


def _ranks(found: list[int]) -> str:
    shown = ", ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    return f"rank{'s' * (len(found) > 1)} {shown}"


def meeting_point(rank: int, world: int, timeout_s: float) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT: rank 0's, or that of the launcher."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        raise MachineError(
            f"this is rank {rank} of {world}, but MASTER_ADDR is {address!r} and MASTER_PORT {port!r}; a launcher sets both, "
            "to where the ranks meet. Start them with torchrun, or with --nproc."
        )
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if not hosts:
        _wait_for_store(address, int(port), timeout_s)
    found: list[Any] = []

    def connect() -> None:
        # The first to come waits in here for all the others; who finds a store is through at once.
        wait_s = timeout_s if hosts else ANSWER_S
        try:
            found.append(next(rendezvous("env://", rank, world, timeout=timedelta(seconds=wait_s)))[0])
        except (dist.DistError, ValueError) as error:
            found.append(error)

    # Aside, because torch waits without a limit for an answer from somebody who is no store.
    thread = threading.Thread(target=connect, name="rush-meeting", daemon=True)
    thread.start()
    thread.join(timeout_s + ANSWER_S if hosts else ANSWER_S)
    made = found[0] if found else None
    if made is None or isinstance(made, Exception):
        raise _no_meeting(address, port, made, hosts, timeout_s)
    made.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore("meeting", made)


def _no_meeting(address: str, port: str, error: Any, hosts: bool, timeout_s: float) -> MachineError:
    says = str(error)
    if hosts and "EADDRINUSE" in says:
        return MachineError(
            f"rank 0 cannot listen at port {port} (MASTER_PORT), which another program uses; choose a free port for all ranks."
        )
    if hosts and "waiting for clients" in says:
        return RankLost(f"not all ranks came to {address}:{port} within {timeout_s:g} s ({says}).")
    if hosts:
        return MachineError(f"rank 0 cannot listen at {address}:{port} (MASTER_ADDR, MASTER_PORT): {says}.")
    stranger = MachineError(
        f"what listens at {address}:{port} (MASTER_ADDR, MASTER_PORT) is not rank 0 but another program; choose a free port "
        "for all ranks."
    )
    stranger.add_note(SAID)  # rank 0 could not listen there, and says so
    return stranger


def _wait_for_store(address: str, port: int, timeout_s: float) -> None:
    """Until somebody listens there who lets the caller speak first, as a store does."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((address, port), timeout=5.0) as line:
                line.settimeout(0.3)
                try:
                    line.recv(1)
                except TimeoutError:
                    return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankLost(
                    f"rank {started_rank()} found nobody at {address}:{port} (MASTER_ADDR, MASTER_PORT) within "
                    f"{timeout_s:g} s: {error}; is rank 0 up?"
                ) from None
            time.sleep(0.2)
        else:
            raise _no_meeting(address, str(port), None, False, timeout_s)
