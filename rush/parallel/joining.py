"""How processes find each other, and how they part.

torchrun (and whatever speaks its language) starts every process with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT in its environment. Joining reads them, checks that there are as many ranks as the layout takes, and meets
the others at a store. There each lays down a card: what it is about to run, or why it will not come. Rank 0 reads them
all and says whether they may go on, before any of them waits for another in an exchange, where unlike ranks would wait
for ever. A process that was started alone, for a layout of one, joins nobody.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from rush.errors import MachineError, RankLost, RecipeError, RushError
from rush.parallel.ranks import AXES, LABEL_AXES, SAID, Ranks, error_of
from rush.parallel.watching import Watch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TIMEOUT_S = 600.0
"""How long ranks wait for each other where nothing else is said (`run.timeout_s`)."""
ANSWER_S = 10.0
"""How long whoever listens at the meeting point may take to answer as a store does."""
LATER_S = 5.0
"""What a rank that cannot come waits with its leaving: launchers end all ranks when one is gone, and rank 0 should have spoken."""
BACKSTOP_S = 60.0
"""How much later than our own watch torch's time limit ends an exchange."""


def started_rank() -> int:
    """This process's number, as its environment has it."""
    return int(os.environ.get("RANK", "0"))


def started_world() -> int:
    """How many processes were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def shares_device() -> bool:
    """Whether ranks may share a GPU: for correctness, never for speed. NCCL refuses that, so they talk through gloo."""
    return os.environ.get("RUSH_SHARE_DEVICE") == "1"


def check_world(layout: Mapping[str, int], world: int) -> None:
    """Refuse a number of ranks that is not the product of the layout."""
    wanted = 1
    for size in layout.values():
        wanted *= size
    if wanted == world:
        return
    sizes = [f"layout.{axis} is {size}" for axis, size in layout.items() if size != 1]
    says = " and ".join(sizes) if sizes else "every size of the layout is 1"
    raise RecipeError(
        f"{says}, which takes {wanted} rank{'s' * (wanted != 1)}, but this run has {world}; start it with --nproc "
        f"{wanted}, or make the product of the layout {world}."
    )


@contextmanager
def join(
    layout: Mapping[str, int], device: str, card: str = "", timeout_s: float = TIMEOUT_S
) -> Iterator[Ranks]:
    """Be one of the ranks that the layout takes, for as long as the block lasts.

    `card` says what this rank is about to run; ranks with unlike cards are refused, all of them. `timeout_s` is how long
    a rank waits in an exchange before the run is ended and the late one is named.
    """
    rank, world = started_rank(), started_world()
    check_world(layout, world)
    if "RANK" in os.environ:
        _leave_with_parent()
    if world == 1:
        yield Ranks()
        return
    _take_device(device)
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.device_mesh import init_device_mesh

    store = _meeting_point(rank, world, timeout_s)
    try:
        _meet(store, rank, world, card, timeout_s)
    except dist.DistError as error:
        raise RankLost(f"rank {rank} came to the meeting, but another rank has gone: {error}.") from error
    # What torch's flight recorder keeps of the exchanges; the watch reads it.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    own_line: Store = store.clone()  # type: ignore[attr-defined]  # a wait on the other does not hold this one up
    watch = Watch(PrefixStore("watch", own_line), rank, world, timeout_s)
    own_gpu = device == "cuda" and not shares_device()
    dist.init_process_group(
        "nccl" if own_gpu else "gloo",
        store=PrefixStore("torch", store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s + BACKSTOP_S),
        device_id=torch.device("cuda", torch.cuda.current_device()) if own_gpu else None,
    )
    clean = False
    try:
        with watch:
            mesh = init_device_mesh(device, tuple(layout[axis] for axis in AXES), mesh_dim_names=AXES)
            labels = mesh[LABEL_AXES]._flatten("labels").get_group()
            yield Ranks(rank, world, mesh, PrefixStore("rush", store), labels, watch)
        clean = True
    except (RushError, KeyboardInterrupt):
        clean = True  # all ranks leave alike, or torchrun ends the others
        raise
    except RuntimeError as error:
        if not _lost(error):
            raise
        who = "another rank, which was killed or failed (look for its message)"
        if watch.store_is_silent:
            who = "rank 0, which keeps the store where ranks meet and gives no answer: it is stopped or gone"
        raise RankLost(
            f"rank {rank} lost the connection to {who}; started again with --resume, the run goes on from its last checkpoint."
        ) from error
    finally:
        if clean:
            dist.destroy_process_group()


def _lost(error: RuntimeError) -> bool:
    """Whether another rank has gone: torch has types for it, but not from gloo, which names its own files."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def tell_absent(error: RushError) -> bool:
    """Tell rank 0, which may be waiting for all, that this rank will not come, and why; whether it was heard."""
    rank, world = started_rank(), started_world()
    with suppress(RushError, RuntimeError):
        store = _meeting_point(rank, world, LATER_S)
        store.set(f"card/{rank}", "")
        store.set("absent", json.dumps({"error": type(error).__name__, "says": f"rank {rank}: {error}"}))
        store.wait(["verdict"], timedelta(seconds=LATER_S))
        heard = bool(json.loads(store.get("verdict")))
        store.add("heard", 1)
        return heard
    return False


def _meet(store: Store, rank: int, world: int, card: str, timeout_s: float) -> None:
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
        store.wait(["verdict"], timedelta(seconds=timeout_s + BACKSTOP_S))
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


def _meeting_point(rank: int, world: int, timeout_s: float) -> Store:
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


def _take_device(device: str) -> None:
    """One GPU for each rank of this machine."""
    if device == "mps":
        raise MachineError("An Apple GPU cannot train together with others; set run.device=cpu.")
    if device != "cuda":
        return
    local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if shares_device():
        torch.cuda.set_device(local % found)
        return
    if local >= found:
        raise MachineError(
            f"{os.environ.get('LOCAL_WORLD_SIZE', 'more')} ranks were started on this machine, which has {found} GPU(s); "
            "each rank needs one of its own. Start fewer ranks here."
        )
    torch.cuda.set_device(local)


def _leave_with_parent() -> None:
    """End this process when the one that started it is gone: a killed launcher can stop nobody."""
    parent = os.getppid()
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        # The kernel does it, to a stopped process as well. (It means the thread that started us; torchrun's is its main one.)
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="rush-parent-watch", daemon=True).start()
