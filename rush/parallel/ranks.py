"""A rank's coordinates on the device mesh, its collectives, and values that ranks share through the store.

The mesh has the axes pp, ddp, fsdp, cp, tp, outermost first. Ranks that are neighbors along the last axes communicate
most and should be neighbors on the machine. Ranks that differ in ddp or fsdp are *data ranks*: each gets other samples.
Ranks that differ only in pp, cp or tp work on the same samples; cp ranks on other positions, and so on other labels.

Values that no device needs (a path, whether a folder could be opened) go through the store: no tensor, no time limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from rush.parallel.store_channel import StoreChannel
from rush.parallel.watchdog import Wait, Watchdog

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "ddp", "fsdp", "cp", "tp")
"""The mesh axes, outermost first."""
DATA_AXES = ("ddp", "fsdp")
LABEL_AXES = (*DATA_AXES, "cp")
"""Ranks that differ in one of these hold other labels of the same step."""

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; without a mesh it is alone."""

    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None
    store: Store | None = None
    label_group: ProcessGroup | None = None
    """The ranks that hold other labels of the same step."""
    watchdog: Watchdog | None = None
    forced_axes: tuple[str, ...] = ()
    """Axes whose technique is on although they have size 1."""
    _ids: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def alone(self) -> bool:
        return self.mesh is None

    @property
    def main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    @property
    def data_ranks(self) -> int:
        return 1 if self.mesh is None else self.size("ddp") * self.size("fsdp")

    @property
    def data_rank(self) -> int:
        """This rank's index among the data ranks."""
        if self.mesh is None:
            return 0
        return int(self.mesh.get_local_rank("ddp")) * self.size("fsdp") + int(
            self.mesh.get_local_rank("fsdp")
        )

    @property
    def first_of_stage(self) -> bool:
        """Whether this is the first of the ranks with the same layers."""
        return self.mesh is None or not any(self.mesh.get_local_rank(axis) for axis in AXES if axis != "pp")

    def next_id(self) -> int:
        """A new number, the same on all ranks, for keys in the store."""
        return next(self._ids)

    def size(self, axis: str) -> int:
        return 1 if self.mesh is None else int(self.mesh.size(AXES.index(axis)))

    def mesh_with_cp(self, axis: str) -> DeviceMesh:
        """The axis flattened with cp: parameters are replicated over cp, so gradients are reduced over both."""
        assert self.mesh is not None
        if self.size("cp") == 1 or axis == "cp":
            return self.mesh[axis]
        return self.mesh["cp"] if self.size(axis) == 1 else self.mesh[(axis, "cp")]._flatten(f"{axis}_cp")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum in place over the ranks with other labels; asynchronous on a GPU."""
        if self.mesh is not None:
            torch.distributed.all_reduce(tensor, group=self.label_group)
        return tensor

    @property
    def stages(self) -> ProcessGroup | None:
        """The process group of this rank's pipeline; None without pipeline parallelism."""
        return None if self.mesh is None or self.size("pp") == 1 else self.mesh.get_group("pp")

    def all_reduce_stages(self, tensor: Tensor) -> Tensor:
        """Sum in place over the ranks of a pipeline."""
        if self.stages is not None:
            torch.distributed.all_reduce(tensor, group=self.stages)
        return tensor

    def all_reduce_any(self, tensor: Tensor) -> Tensor:
        """Make a flag positive on all ranks if it is on one, in place; `all_reduce` has settled the label ranks already."""
        if self.size("pp") * self.size("tp") > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def set_phase(self, phase: str) -> None:
        """Report to the watchdog what this rank does now."""
        if self.watchdog is not None:
            self.watchdog.phase = phase

    def waiting(self, kind: Wait) -> AbstractContextManager[None]:
        """Declare to the watchdog what the block waits for."""
        return nullcontext() if self.watchdog is None else self.watchdog.waiting(kind)

    def on_rank0(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 and broadcast its result (JSON); an error there is raised on all ranks."""
        if self.store is None:
            return make()
        channel, key = StoreChannel(self.store, "rush"), str(self.next_id())
        if self.main:
            return channel.publish(key, make)
        with self.waiting(Wait.RANK_0):
            found: T = channel.receive(key)
        return found

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all ranks (JSON), in rank order."""
        if self.store is None:
            return [value]
        channel = StoreChannel(self.store, f"rush/{self.next_id()}")
        channel.send(str(self.rank), value)

        def receive() -> list[T]:
            with self.waiting(Wait.ALL_RANKS):
                return [channel.receive(str(rank)) for rank in range(self.world)]

        return self.on_rank0(receive)

    def rank0_first(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0, then on all others, which find the work that is done once already done."""
        if self.main:
            made: list[T] = []
            self.on_rank0(lambda: made.append(make()))
            return made[0]
        self.on_rank0(lambda: None)
        return make()


def listed(ranks: Sequence[int]) -> str:
    """The first few ranks, and how many more."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
