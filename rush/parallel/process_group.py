"""How processes find each other, and how they part.

torchrun (and whatever speaks its language) starts every process with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT in its environment. Joining reads them, checks that there are as many ranks as the layout takes, meets the
others (`meeting`), makes the mesh and sets a watch over who keeps whom waiting (`watching`). A process that was started
alone, for a layout of one, joins nobody.
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

from rush.errors import MachineError, RankLost, RecipeError, RushError
from rush.parallel.ranks import AXES, LABEL_AXES, Ranks
from rush.parallel.rendezvous import meet, meeting_point, started_rank, started_world
from rush.parallel.shared_gpu import gather_through_host
from rush.parallel.watchdog import Watchdog

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TIMEOUT_S = 600.0
"""How long ranks wait for each other where nothing else is said (`run.timeout_s`)."""
BACKSTOP_S = 60.0
"""How much later than our own watch torch's time limit ends an exchange."""


def shares_device() -> bool:
    """Whether ranks may share a GPU: for correctness, never for speed. NCCL refuses that, so they talk through gloo."""
    return os.environ.get("RUSH_SHARE_DEVICE") == "1"


def group_of_one() -> bool:
    """Whether a rank that is alone works as one of several, averaging gradients with itself: to see what that machinery costs,
    and that it works where there is but one GPU. `rush scale --group-of-one` asks for it."""
    return os.environ.get("RUSH_GROUP_OF_ONE") == "1"


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
    if world == 1 and not group_of_one():
        yield Ranks()
        return
    _take_device(device)
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.device_mesh import init_device_mesh

    try:
        point = (
            meeting_point(rank, world, timeout_s)
            if world > 1
            else TCPStore("localhost", 0, 1, is_master=True)
        )
        store = meet(point, rank, world, card, timeout_s)
    except dist.DistError as error:
        raise RankLost(f"rank {rank} came to the meeting, but another rank has gone: {error}.") from error
    # What torch's flight recorder keeps of the exchanges; the watch reads it.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    own_line: Store = store.clone()  # type: ignore[attr-defined]  # a wait on the other does not hold this one up
    watch = Watchdog(PrefixStore("watch", own_line), rank, world, timeout_s)
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
        with watch:
            mesh = init_device_mesh(device, tuple(layout[axis] for axis in AXES), mesh_dim_names=AXES)
            labels = mesh[LABEL_AXES]._flatten("labels").get_group()
            forced_axes = ("ddp",) if world == 1 else ()
            yield Ranks(rank, world, mesh, PrefixStore("rush", store), labels, watch, forced_axes)
            _part(PrefixStore("parting", store), rank, world, timeout_s)
        clean = True
    except (RushError, KeyboardInterrupt):
        clean = True  # all ranks leave alike, or torchrun ends the others
        raise
    except RuntimeError as error:
        if not lost(error):
            raise
        watch.exit_if_reported()
        who = "another rank, which was killed or failed (look for its message)"
        if watch.store_is_silent:
            who = "rank 0, which keeps the store where ranks meet and gives no answer: it is stopped or gone"
        raise RankLost(
            f"rank {rank} lost the connection to {who}; started again with --resume, the run goes on from its last checkpoint."
        ) from error
    finally:
        if clean:
            dist.destroy_process_group()


def _part(store: Store, rank: int, world: int, timeout_s: float) -> None:
    """Rank 0 leaves last: the store may be its own, and the others may still have to read there."""
    store.set(str(rank), "done")
    if rank == 0:
        store.wait([str(other) for other in range(world)], timedelta(seconds=timeout_s))


def lost(error: BaseException) -> bool:
    """Whether another rank has gone: torch has types for it, but not from gloo, which names its own files."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


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
