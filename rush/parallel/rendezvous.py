"""Where ranks find each other, before the first collective.

At MASTER_ADDR:MASTER_PORT there is a store: rank 0's own, or the launcher's. Each rank writes there what it is about to run
(its *config*), or why it will not join. Rank 0 reads all of them and answers whether they may start, before any rank waits
in a collective, where ranks with different configs would hang. So rank 0 reports a problem once, for all.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rush.errors import MachineError, RankLost, RecipeError, RushError
from rush.launched import launched
from rush.parallel.ranks import listed
from rush.parallel.store_channel import FROM_RANK_0, StoreChannel, remote_error

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ANSWER_S = 10.0
"""How long the listener at the address may take to answer as a store does."""
ABSENT_S = 5.0
"""How long a rank that cannot join tries to report it, and rank 0 stays until all have read its answer."""
LEAVE_S = 5.0
"""When such a rank exits: launchers end all ranks when one is gone, and rank 0 should have printed by then."""

Entry = dict[str, str]
"""What a rank writes: a random `id`, and its `config`, or the `error` and its `message`."""


def started_rank() -> int:
    """RANK of the environment."""
    rank, world = launched("RANK", 0), started_world()
    if rank >= max(world, 1):
        raise MachineError(
            f"the environment variable RANK is {rank}, and WORLD_SIZE is {world}: a launcher counts ranks from 0. Unset both, "
            "or start the ranks with --nproc, torchrun or srun."
        )
    return rank


def started_world() -> int:
    """WORLD_SIZE of the environment."""
    return launched("WORLD_SIZE", 1)


def agree(store: Store, rank: int, world: int, config: str, timeout_s: float) -> Store:
    """Check that all ranks have the same config, and return a part of the store for this start alone.

    A launcher's store outlives its ranks: it still holds keys of an earlier start, addresses of dead ranks included. So rank 0
    chooses a new prefix, and answers each rank under an id that only this rank knows.
    """
    from torch._C._distributed_c10d import PrefixStore

    if rank:
        prefix, refusal = _join(store, rank, world, {"config": config}, timeout_s)
    else:
        prefix = uuid.uuid4().hex
        refusal = _lead(StoreChannel(store, prefix), world, config, timeout_s)
    if refusal:
        raise remote_error(refusal["error"], refusal["message"])
    return PrefixStore(prefix, store)


def report_absent(error: RushError) -> bool:
    """Report to rank 0, which may be waiting, why this rank will not join; whether rank 0 read it."""
    rank, world = started_rank(), started_world()
    entry = {"error": type(error).__name__, "message": f"rank {rank}: {error}"}
    with suppress(RushError, RuntimeError):
        _, refusal = _join(connect_store(rank, world, ABSENT_S), rank, world, entry, ABSENT_S)
        return bool(refusal)
    return False


def _join(store: Store, rank: int, world: int, entry: Entry, timeout_s: float) -> tuple[str, Entry]:
    """Write this rank's entry under rank 0's prefix; return the prefix and the answer, empty for yes."""
    own_id, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    prefix = ""
    while time.monotonic() < deadline:
        if store.check(["prefix"]) and (now := store.get("prefix").decode()) != prefix:
            prefix = now  # the first one found may be that of an earlier start
            StoreChannel(store, prefix).send(f"entry/{rank}", {"id": own_id, **entry})
            if "error" in entry:
                store.set(f"{prefix}/absent", "")
        if prefix and store.check([f"{prefix}/{own_id}"]):
            channel = StoreChannel(store, prefix)
            refusal: Entry = channel.receive(own_id)
            channel.acknowledge("answer")
            return prefix, refusal
        time.sleep(_poll_s(world))
    raise RankLost(f"rank {rank} had no answer from rank 0 within {timeout_s:g} s; is it up?")


def _lead(channel: StoreChannel, world: int, config: str, timeout_s: float) -> Entry:
    """Publish the prefix, read the entries of all ranks, and answer them."""
    channel.store.set("prefix", channel.prefix)
    entries = _entries(channel, world, timeout_s)
    refusal = _refusal(entries, world, config, timeout_s)
    for entry in entries.values():
        channel.send(entry["id"], refusal)
    if refusal:
        channel.wait_acknowledged("answer", len(entries), ABSENT_S)
    return refusal


def _entries(channel: StoreChannel, world: int, timeout_s: float) -> dict[int, Entry]:
    """The entries of all other ranks, or of those that joined in time or before one reported that it will not."""
    store, prefix, deadline = channel.store, channel.prefix, time.monotonic() + timeout_s
    for rank in range(1, world):
        while not store.check([f"{prefix}/entry/{rank}"]) and not store.check([f"{prefix}/absent"]):
            if time.monotonic() > deadline:
                break
            time.sleep(_poll_s(world))
    joined = [rank for rank in range(1, world) if store.check([f"{prefix}/entry/{rank}"])]
    return {rank: channel.receive(f"entry/{rank}") for rank in joined}


def _poll_s(world: int) -> float:
    """Thousands of ranks may poll the store."""
    return 0.05 if world <= 64 else 0.5


def _refusal(entries: dict[int, Entry], world: int, config: str, timeout_s: float) -> Entry:
    """Why these ranks cannot start together; empty if they can."""
    for entry in entries.values():
        if "error" in entry:
            return {"error": entry["error"], "message": entry["message"]}
    if late := [rank for rank in range(1, world) if rank not in entries]:
        return {
            "error": RankLost.__name__,
            "message": f"{_ranks(late)} did not join within {timeout_s:g} s; look at the messages of their machines, and start all "
            "of them again.",
        }
    other = [rank for rank, entry in entries.items() if entry["config"] != config]
    if not other:
        return {}
    return {
        "error": RecipeError.__name__,
        "message": f"{len(other)} of {world} ranks differ from rank 0, which has {config}: rank {other[0]} "
        f"has {entries[other[0]]['config']}; start all of them with the same command, recipe and installation.",
    }


def _ranks(found: list[int]) -> str:
    return f"rank{'s' * (len(found) > 1)} {listed(found)}"


def connect_store(rank: int, world: int, timeout_s: float) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT: rank 0's, or the launcher's."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        raise MachineError(
            f"this is rank {rank} of {world}, but MASTER_ADDR is {address!r} and MASTER_PORT {port!r}; a launcher sets both, "
            "to where the store is. Start the ranks with torchrun, or with --nproc."
        )
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if not hosts:
        _wait_for_store(address, int(port), timeout_s)
    found: list[Any] = []

    def connect() -> None:
        # Rank 0 waits in here for all others if it hosts the store; the others return at once.
        wait_s = timeout_s if hosts else ANSWER_S
        try:
            found.append(next(rendezvous("env://", rank, world, timeout=timedelta(seconds=wait_s)))[0])
        except (dist.DistError, ValueError) as error:
            found.append(error)

    # In a thread, because torch waits without a limit for an answer from a listener that is no store.
    thread = threading.Thread(target=connect, name="rush-rendezvous", daemon=True)
    thread.start()
    thread.join(timeout_s + ANSWER_S if hosts else ANSWER_S)
    made = found[0] if found else None
    if made is None or isinstance(made, Exception):
        raise _connect_error(address, port, made, hosts, timeout_s)
    made.set_timeout(timedelta(seconds=timeout_s))
    store: Store = made
    return store


def _connect_error(address: str, port: str, error: Any, hosts: bool, timeout_s: float) -> MachineError:
    text = str(error)
    if hosts and "EADDRINUSE" in text:
        return MachineError(
            f"rank 0 cannot listen at port {port} (MASTER_PORT), which another program uses; choose a free port for all ranks."
        )
    if hosts and "waiting for clients" in text:
        return RankLost(f"not all ranks joined at {address}:{port} within {timeout_s:g} s ({text}).")
    if hosts:
        return MachineError(f"rank 0 cannot listen at {address}:{port} (MASTER_ADDR, MASTER_PORT): {text}.")
    foreign = MachineError(
        f"what listens at {address}:{port} (MASTER_ADDR, MASTER_PORT) is not rank 0 but another program; choose a free port "
        "for all ranks."
    )
    foreign.add_note(FROM_RANK_0)  # rank 0 could not listen there, and reports it
    return foreign


def _wait_for_store(address: str, port: int, timeout_s: float) -> None:
    """Wait for a listener that lets the client send first, as a store does."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((address, port), timeout=5.0) as connection:
                connection.settimeout(0.3)
                try:
                    connection.recv(1)
                except TimeoutError:
                    return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankLost(
                    f"rank {started_rank()} found no store at {address}:{port} (MASTER_ADDR, MASTER_PORT) within "
                    f"{timeout_s:g} s: {error}; is rank 0 up?"
                ) from None
            time.sleep(0.2)
        else:
            raise _connect_error(address, str(port), None, False, timeout_s)
