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
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rush.errors import MachineError, RankLost, RecipeError, RushError
from rush.parallel.ranks import FROM_RANK_0, remote_error

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ANSWER_S = 10.0
"""How long whoever listens at the meeting point may take to answer as a store does."""
LATER_S = 5.0
"""How long a rank that cannot come tries to tell rank 0 so, and rank 0 stays until all have heard it."""
LEAVE_S = 5.0
"""When such a rank leaves: launchers end all ranks when one is gone, and rank 0 should have spoken."""


def started_rank() -> int:
    """This process's number, as its environment has it."""
    return int(os.environ.get("RANK", "0"))


def started_world() -> int:
    """How many processes were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def meet(store: Store, rank: int, world: int, card: str, timeout_s: float) -> Store:
    """Lay down this rank's card, hear what rank 0 makes of all of them, and get a part of the store for this start alone.

    A launcher's store outlives its ranks: what those of an earlier start wrote is still there, addresses of the dead included.
    So rank 0 opens a new page, and answers each rank by a word that only this one can have asked with.
    """
    from torch._C._distributed_c10d import PrefixStore

    if rank:
        page, verdict = _attend(store, rank, world, {"card": card}, timeout_s)
    else:
        page = uuid.uuid4().hex
        verdict = _preside(PrefixStore(page, store), store, page, world, card, timeout_s)
    if verdict:
        refusal = remote_error(verdict["error"], verdict["says"])
        if rank:
            refusal.add_note(FROM_RANK_0)
        raise refusal
    return PrefixStore(page, store)


def report_absent(error: RushError) -> bool:
    """Tell rank 0, which may be waiting for all, that this rank will not come, and why; whether it was heard."""
    rank, world = started_rank(), started_world()
    told = {"error": type(error).__name__, "says": f"rank {rank}: {error}"}
    with suppress(RushError, RuntimeError):
        _, verdict = _attend(meeting_point(rank, world, LATER_S), rank, world, told, LATER_S)
        return bool(verdict)
    return False


def _attend(
    store: Store, rank: int, world: int, told: dict[str, str], timeout_s: float
) -> tuple[str, dict[str, Any]]:
    """Lay down what this rank has to tell on rank 0's page, and wait for the answer to it."""
    from torch._C._distributed_c10d import PrefixStore

    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    page = ""
    while time.monotonic() < deadline:
        if store.check(["page"]) and (now := store.get("page").decode()) != page:
            page = now  # the first one found may be that of an earlier start
            PrefixStore(page, store).set(f"card/{rank}", json.dumps({"word": word, **told}))
            if "error" in told:
                PrefixStore(page, store).set("absent", "")
        answers = PrefixStore(page, store)
        if page and answers.check([word]):
            verdict: dict[str, Any] = json.loads(answers.get(word))
            answers.add("heard", 1)
            return page, verdict
        time.sleep(_pause(world))
    raise RankLost(f"rank {rank} had no answer from rank 0 within {timeout_s:g} s; is it up?")


def _preside(mine: Store, store: Store, page: str, world: int, card: str, timeout_s: float) -> dict[str, Any]:
    """Open a page, read the cards of all, and answer them."""
    store.set("page", page)
    cards = _cards(mine, world, timeout_s)
    verdict = _judge(cards, world, card, timeout_s)
    for told in cards.values():
        mine.set(told["word"], json.dumps(verdict))
    deadline = time.monotonic() + LATER_S
    # The store may be ours, and go with us.
    while verdict and mine.add("heard", 0) < len(cards) and time.monotonic() < deadline:
        time.sleep(0.05)
    return verdict


def _cards(mine: Store, world: int, timeout_s: float) -> dict[int, dict[str, str]]:
    """The cards of the other ranks: of all, or of those that came in time or before one said that it will not come."""
    deadline = time.monotonic() + timeout_s
    for rank in range(1, world):
        while not mine.check([f"card/{rank}"]) and not mine.check(["absent"]):
            if time.monotonic() > deadline:
                break
            time.sleep(_pause(world))
    came = [rank for rank in range(1, world) if mine.check([f"card/{rank}"])]
    return {rank: json.loads(mine.get(f"card/{rank}")) for rank in came}


def _pause(world: int) -> float:
    """Between two questions to the store, which thousands may ask."""
    return 0.05 if world <= 64 else 0.5


def _judge(cards: dict[int, dict[str, str]], world: int, card: str, timeout_s: float) -> dict[str, Any]:
    """What keeps these ranks from going on, if anything; said by rank 0 for all."""
    for told in cards.values():
        if "error" in told:
            return {"error": told["error"], "says": told["says"]}
    if late := [rank for rank in range(1, world) if rank not in cards]:
        return {
            "error": RankLost.__name__,
            "says": f"{_ranks(late)} did not come within {timeout_s:g} s; look at the messages of their machines, and start all "
            "of them again.",
        }
    unlike = [rank for rank, told in cards.items() if told["card"] != card]
    if not unlike:
        return {}
    return {
        "error": RecipeError.__name__,
        "says": f"{len(unlike)} of {world} ranks came with something else than rank 0, which has {card}: rank {unlike[0]} "
        f"has {cards[unlike[0]]['card']}; start all of them with the same command, recipe and installation.",
    }


def _ranks(found: list[int]) -> str:
    shown = ", ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    return f"rank{'s' * (len(found) > 1)} {shown}"


def meeting_point(rank: int, world: int, timeout_s: float) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT: rank 0's, or that of the launcher."""
    import torch.distributed as dist
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
    meeting: Store = made
    return meeting


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
    stranger.add_note(FROM_RANK_0)  # rank 0 could not listen there, and says so
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
