"""Join the process group, and leave it.

torchrun (and whatever sets its variables) starts every process with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. `join` checks that there are as many ranks as the layout takes, meets the others (`rendezvous`), makes the
mesh and starts the watchdog. A process that was started alone, for a layout of one, joins nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from rush.errors import CannotWrite, MachineError, RankLost, RecipeError, RushError
from rush.launched import launched
from rush.parallel.ranks import AXES, LABEL_AXES, Ranks
from rush.parallel.rendezvous import agree, connect_store, started_rank, started_world
from rush.parallel.shared_gpu import gather_through_host
from rush.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TIMEOUT_S = 600.0
"""Default of `run.timeout_s`: how long ranks wait for each other."""
BACKSTOP_S = 60.0
"""How much later than the watchdog torch's own timeout ends a collective."""


def shares_device() -> bool:
    """Whether ranks may share a GPU: for correctness, never for speed. NCCL refuses that, so they use gloo."""
    return os.environ.get("RUSH_SHARE_DEVICE") == "1"


def group_of_one() -> bool:
    """Whether a single rank forms a process group and averages gradients with itself, to measure what that costs
    (`rush scale --group-of-one`)."""
    return os.environ.get("RUSH_GROUP_OF_ONE") == "1"


def check_world(layout: Mapping[str, int], world: int) -> None:
    """Refuse a world size that is not the product of the layout."""
    wanted = 1
    for size in layout.values():
        wanted *= size
    if wanted == world:
        return
    sizes = [f"layout.{axis} is {size}" for axis, size in layout.items() if size != 1]
    sizes_text = " and ".join(sizes) if sizes else "every size of the layout is 1"
    raise RecipeError(
        f"{sizes_text}, which takes {wanted} rank{'s' * (wanted != 1)}, but this run has {world}; start it with --nproc "
        f"{wanted}, or make the product of the layout {world}."
    )


@contextmanager
def join(
    layout: Mapping[str, int], device: str, config: str = "", timeout_s: float = TIMEOUT_S
) -> Iterator[Ranks]:
    """Be one of the ranks that the layout takes, for as long as the block lasts.

    `config` names what this rank is about to run; all ranks are refused if it differs. After `timeout_s` in a collective the
    run ends and the late rank is reported.
    """
    rank, world = started_rank(), started_world()
    check_world(layout, world)
    if "RANK" in os.environ:
        _exit_with_parent()
    if world == 1 and not group_of_one():
        yield Ranks()
        return
    _take_device(device)
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.device_mesh import init_device_mesh

    try:
        server = (
            connect_store(rank, world, timeout_s)
            if world > 1
            else TCPStore("localhost", 0, 1, is_master=True)
        )
        store = agree(server, rank, world, config, timeout_s)
    except dist.DistError as error:
        raise RankLost(f"rank {rank} joined, but another rank has gone: {error}.") from error
    # Entries of torch's flight recorder, which the watchdog reads.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    own_store: Store = store.clone()  # type: ignore[attr-defined]  # a wait on the other does not block this one
    watchdog = Watchdog(PrefixStore("watchdog", own_store), rank, world, timeout_s)
    own_gpu = device == "cuda" and not shares_device()
    if device == "cuda" and not own_gpu:
        gather_through_host()
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
        with watchdog:
            mesh = init_device_mesh(device, tuple(layout[axis] for axis in AXES), mesh_dim_names=AXES)
            labels = mesh[LABEL_AXES]._flatten("labels").get_group()
            forced = ("ddp",) if world == 1 else ()
            yield Ranks(rank, world, mesh, PrefixStore("rush", store), labels, watchdog, forced)
            _leave(PrefixStore("leaving", store), rank, world, timeout_s)
        clean = True
    except (RushError, KeyboardInterrupt) as error:
        clean = True
        if isinstance(error, CannotWrite):  # any other ends all ranks in the same way
            watchdog.claim_report()
        raise
    except (Exception, SystemExit) as error:
        if not lost(error):
            watchdog.claim_report()
            raise
        watchdog.exit_if_reported()
        who = "another rank, which was killed or failed (look for its message)"
        if watchdog.store_is_silent:
            who = "rank 0, which hosts the store and does not answer: it is stopped or gone"
        raise RankLost(
            f"rank {rank} lost the connection to {who}; restart with --resume to continue from the last checkpoint."
        ) from error
    finally:
        if clean:
            dist.destroy_process_group()


def _leave(store: Store, rank: int, world: int, timeout_s: float) -> None:
    """Rank 0 leaves last: it may host the store, which the others may still read."""
    store.set(str(rank), "done")
    if rank == 0:
        store.wait([str(other) for other in range(world)], timedelta(seconds=timeout_s))


def lost(error: BaseException) -> bool:
    """Whether another rank is gone: torch has error types for it, gloo only names its source files."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


def _take_device(device: str) -> None:
    """One GPU for each rank of this machine."""
    if device == "mps":
        raise MachineError("An Apple GPU cannot train on several ranks; set run.device=cpu.")
    if device != "cuda":
        return
    local, found = launched("LOCAL_RANK", 0), torch.cuda.device_count()
    if shares_device():
        torch.cuda.set_device(local % found)
        return
    if local >= found:
        raise MachineError(
            f"{os.environ.get('LOCAL_WORLD_SIZE', 'more')} ranks were started on this machine, which has {found} GPU(s); "
            "each rank needs one of its own. Start fewer ranks here."
        )
    torch.cuda.set_device(local)


def _exit_with_parent() -> None:
    """End this process when its parent is gone: a killed launcher cannot stop it."""
    parent = os.getppid()
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        # The kernel does it, to a stopped process as well. (It follows the thread that started us; torchrun's is its main one.)
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=poll, name="rush-parent", daemon=True).start()
