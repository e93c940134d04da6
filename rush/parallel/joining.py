"""How processes find each other, and how they part.

torchrun (and whatever speaks its language) starts every process with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT in its environment. Joining reads them, checks that there are as many ranks as the layout takes *before*
anyone waits for anyone, meets the others and makes the mesh. A process that was started alone, for a layout of
one, joins nobody.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from rush.errors import MachineError, RecipeError, RushError
from rush.parallel.ranks import AXES, DATA_AXES, Ranks


def started_rank() -> int:
    """This process's number, as its environment has it."""
    return int(os.environ.get("RANK", "0"))


def started_world() -> int:
    """How many processes were started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


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
def join(layout: Mapping[str, int], device: str) -> Iterator[Ranks]:
    """Be one of the ranks that the layout takes, for as long as the block lasts."""
    rank, world = started_rank(), started_world()
    check_world(layout, world)
    if world == 1:
        yield Ranks()
        return
    _leave_with_parent()
    _take_device(device)
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", rank, world))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=PrefixStore("torch", store),
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None,
    )
    clean = False
    try:
        mesh = init_device_mesh(device, tuple(layout[axis] for axis in AXES), mesh_dim_names=AXES)
        data = mesh[DATA_AXES]._flatten("data").get_group()
        yield Ranks(rank, world, mesh, PrefixStore("rush", store), data)
        clean = True
    except (RushError, KeyboardInterrupt):
        clean = True  # all ranks leave alike, or torchrun ends the others
        raise
    except RuntimeError as error:
        if not _lost(error):
            raise
        raise MachineError(
            f"rank {rank} lost the connection to another rank, which was killed or failed (look for its message); the run "
            "ends here and goes on from its last checkpoint with --resume."
        ) from error
    finally:
        if clean:
            dist.destroy_process_group()


def _lost(error: RuntimeError) -> bool:
    """Whether another rank has gone: torch has types for it, but not from gloo, which names its own files."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _take_device(device: str) -> None:
    """One GPU for each rank of this machine."""
    if device == "mps":
        raise MachineError("An Apple GPU cannot train together with others; set run.device=cpu.")
    if device != "cuda":
        return
    local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= found:
        raise MachineError(
            f"{os.environ.get('LOCAL_WORLD_SIZE', 'more')} ranks were started on this machine, which has {found} GPU(s); "
            "each rank needs one of its own. Start fewer ranks here."
        )
    torch.cuda.set_device(local)


def _leave_with_parent() -> None:
    """End this process when the one that started it is gone: a killed launcher can stop nobody."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="rush-parent-watch", daemon=True).start()
