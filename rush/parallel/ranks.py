"""A rank's place among the others, and the few things that ranks settle with each other.

The mesh is a block of ranks with named axes, the outermost first: pp, ddp, fsdp, cp, tp. Ranks that are neighbours
in the last axes talk most and should be neighbours on the machine. Ranks that differ in ddp or fsdp are *data
ranks*: each gets other samples. Those that differ in pp, cp or tp only work on the same ones; cp ranks on other
positions of them, so that their labels are others, too.

What a device need not see (a path, whether a folder could be opened) goes through the store that the ranks met at:
waiting there has no time limit of minutes, as collectives have, and no tensor has to be made.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rush import errors

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from rush.parallel.watchdog import Watchdog

AXES = ("pp", "ddp", "fsdp", "cp", "tp")
"""Of the mesh, in this order."""
DATA_AXES = ("ddp", "fsdp")
LABEL_AXES = (*DATA_AXES, "cp")
"""Ranks that differ in one of these hold other labels of the same step."""
PATIENCE = timedelta(days=2)
"""How long the others wait for rank 0 to prepare data."""

FROM_RANK_0 = "rank 0 says so too"

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together. Without a mesh it is alone."""

    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None
    store: Store | None = None
    label_group: ProcessGroup | None = None
    """Those that hold other labels of the same step."""
    watchdog: Watchdog | None = None
    """Knows where this rank is, and finds who keeps it waiting."""
    forced_axes: tuple[str, ...] = ()
    """Axes whose technique is on although they have one rank."""
    _calls: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def alone(self) -> bool:
        return self.mesh is None

    @property
    def main(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    @property
    def data_ranks(self) -> int:
        return 1 if self.mesh is None else self.size("ddp") * self.size("fsdp")

    @property
    def data_rank(self) -> int:
        """Which part of every step's samples is this rank's."""
        if self.mesh is None:
            return 0
        return int(self.mesh.get_local_rank("ddp")) * self.size("fsdp") + int(
            self.mesh.get_local_rank("fsdp")
        )

    @property
    def first_of_stage(self) -> bool:
        """Whether this is the first of the ranks that hold the same layers."""
        return self.mesh is None or not any(self.mesh.get_local_rank(axis) for axis in AXES if axis != "pp")

    def next_call(self) -> int:
        """A number that no other call has, the same on all ranks: for names in the store."""
        return next(self._calls)

    def size(self, axis: str) -> int:
        return 1 if self.mesh is None else int(self.mesh.size(AXES.index(axis)))

    def mesh_with_cp(self, axis: str) -> DeviceMesh:
        """The axis with cp inside of it. Parameters are replicated over cp: who sends gradients over a data axis sends
        them over cp as well."""
        assert self.mesh is not None
        if self.size("cp") == 1 or axis == "cp":
            return self.mesh[axis]
        return self.mesh["cp"] if self.size(axis) == 1 else self.mesh[(axis, "cp")]._flatten(f"{axis}_cp")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold other labels, in place. On a GPU nobody waits for it but the GPU."""
        if self.mesh is not None:
            torch.distributed.all_reduce(tensor, group=self.label_group)
        return tensor

    @property
    def stages(self) -> ProcessGroup | None:
        """The ranks of this one's pipeline, each with other layers; None where every rank has all of them."""
        return None if self.mesh is None or self.size("pp") == 1 else self.mesh.get_group("pp")

    def all_reduce_stages(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks of a pipeline, in place."""
        if self.stages is not None:
            torch.distributed.all_reduce(tensor, group=self.stages)
        return tensor

    def all_reduce_any(self, tensor: Tensor) -> Tensor:
        """More than zero on every rank if it is on one, in place; what `sum` has made equal already is left alone."""
        if self.size("pp") * self.size("tp") > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def set_phase(self, phase: str) -> None:
        """Note what this rank does now, for whoever looks for it when it does not come."""
        if self.watchdog is not None:
            self.watchdog.phase = phase

    def on_rank0(self, make: Callable[[], T]) -> T:
        """What rank 0 makes (JSON can hold it), handed to all. If it fails there, it fails everywhere alike."""
        if self.store is None:
            return make()
        key = f"rush/{self.next_call()}"
        if self.main:
            try:
                value = make()
            except BaseException as error:
                self.store.set(key, json.dumps({"error": _name(error), "says": str(error)}))
                raise
            self.store.set(key, json.dumps({"value": value}))
            return value
        self.store.wait([key], PATIENCE)
        told: dict[str, Any] = json.loads(self.store.get(key))
        if "error" in told:
            raise remote_error(told["error"], told["says"])
        found: T = told["value"]
        return found

    def all_gather_object(self, value: T) -> list[T]:
        """What each rank says (JSON can hold it), in their order, handed to all."""
        store = self.store
        if store is None:
            return [value]
        number = self.next_call()
        keys = [f"rush/{number}/{rank}" for rank in range(self.world)]
        store.set(keys[self.rank], json.dumps(value))

        def collect() -> list[T]:
            store.wait(keys, PATIENCE)
            return [json.loads(store.get(key)) for key in keys]

        return self.on_rank0(collect)

    def rank0_first(self, make: Callable[[], T]) -> T:
        """Made by rank 0 first, then by each of the others, which find done what has to be done once."""
        if self.main:
            made: list[T] = []
            self.on_rank0(lambda: made.append(make()))
            return made[0]
        self.on_rank0(lambda: None)
        return make()


def _name(error: BaseException) -> str:
    return type(error).__name__


def remote_error(name: str, says: str) -> Exception:
    """An error of another rank, to be raised here too."""
    kind = getattr(errors, name, None)
    ours = isinstance(kind, type) and issubclass(kind, errors.RushError)
    error: Exception = kind(says) if ours else RuntimeError(f"rank 0 ended with {name}: {says}")  # type: ignore[misc]
    error.add_note(FROM_RANK_0)
    return error
