"""Which shard of a tensor this rank holds, and which rank writes what to a checkpoint.

A sharded tensor has one box of the full tensor on each rank (or a few: of fused queries, keys and values a piece of each); a
plain one is replicated. Ranks that differ only along mesh axes on which a tensor is not sharded hold replicas. Which of them
writes it, all ranks compute from the names and sizes they share, without communication: tensors are assigned by size, and one
larger than an equal load is split into rows, some for each. (Pipeline stages hold other names; what two of them hold, both
write.)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rush.parallel.ranks import AXES, Ranks
from rush.parallel.sharded import is_sharded, local_tensor, runs


@dataclass(frozen=True)
class TensorShard:
    """A box of a full tensor, with its values."""

    values: Tensor
    offset: tuple[int, ...]
    full_shape: tuple[int, ...]


@torch.no_grad()
def local_shards(tensor: Tensor) -> list[TensorShard]:
    """What this rank holds of a tensor, as views."""
    values, full_shape = local_tensor(tensor).detach(), tuple(tensor.shape)
    if not is_sharded(tensor):
        return [TensorShard(values, (0,) * tensor.dim(), full_shape)]
    if tensor.numel() and not values.numel():
        return []
    found = []
    for box in itertools.product(*(_with_local_offsets(along) for along in runs(tensor))):
        view = values
        for dim, (_, length, local) in enumerate(box):
            view = view.narrow(dim, local, length)
        found.append(TensorShard(view, tuple(begin for begin, _, _ in box), full_shape))
    assert sum(shard.values.numel() for shard in found) == values.numel(), f"{tuple(values.shape)} {found}"
    return found


def table_like(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty table with one number per block of a parameter's rows, sharded as the parameter is."""
    if not is_sharded(parameter):
        return parameter.new_empty(shape, dtype=dtype)
    from torch.distributed.tensor import DTensor

    target: Any = parameter
    own = local_tensor(parameter.detach())
    block = parameter.shape[1] // shape[1]
    assert shape[0] == parameter.shape[0], f"{shape} {tuple(parameter.shape)}"
    assert own.shape[1] % block == 0, f"a block of {block} is split: {target.placements}"
    local = own.new_empty(own.shape[0], own.shape[1] // block, dtype=dtype)
    return DTensor.from_local(
        local,
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=(shape[1], 1),
    )


def _with_local_offsets(along: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Runs as (begin, length, offset in the local tensor)."""
    offsets = itertools.accumulate((length for _, length in along), initial=0)
    return [(begin, length, offset) for (begin, length), offset in zip(along, offsets, strict=False)]


def to_write(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, list[TensorShard]]:
    """The shards that this rank writes; over all ranks each value is written once."""
    if ranks.alone:
        return {name: local_shards(tensor) for name, tensor in tensors.items()}
    groups: dict[tuple[str, ...], list[str]] = {}
    replica_axes: dict[Any, tuple[str, ...]] = {}  # thousands of tensors have a few placements
    for name, tensor in tensors.items():
        placement = _placement(tensor)
        if placement not in replica_axes:
            replica_axes[placement] = _replica_axes(tensor, ranks)
        groups.setdefault(replica_axes[placement], []).append(name)
    mine: dict[str, list[TensorShard]] = {}
    for axes, names in groups.items():
        index, count = _replica_index(axes, ranks)
        # All ranks know the full size; shards may differ by a row.
        sizes = {name: tensors[name].numel() * tensors[name].element_size() for name in names}
        equal, loads = sum(sizes.values()) / count, [0] * count
        for name in sorted(names, key=lambda name: (-sizes[name], name)):
            if count > 1 and sizes[name] > equal and tensors[name].dim() > 0:
                shards = [rows_of_box(shard, index, count) for shard in local_shards(tensors[name])]
            else:
                lightest = loads.index(min(loads))
                loads[lightest] += sizes[name]
                if lightest != index:
                    continue
                shards = local_shards(tensors[name])
            # An empty tensor has an empty shard.
            mine[name] = [shard for shard in shards if shard.values.numel() or not tensors[name].numel()]
    return mine


def rows_of_box(shard: TensorShard, index: int, count: int) -> TensorShard:
    rows = shard.values.shape[0]
    begin, end = rows * index // count, rows * (index + 1) // count
    return TensorShard(
        shard.values[begin:end], (shard.offset[0] + begin, *shard.offset[1:]), shard.full_shape
    )


def _placement(tensor: Tensor) -> Any:
    """Mesh and placements; None for a plain tensor."""
    sharded: Any = tensor
    return (sharded.device_mesh, tuple(sharded.placements)) if is_sharded(tensor) else None


def _replica_axes(tensor: Tensor, ranks: Ranks) -> tuple[str, ...]:
    """The mesh axes along which ranks hold the same shard."""
    assert ranks.mesh is not None
    sharded_over: set[str] = {"pp"}
    if is_sharded(tensor):
        sharded: Any = tensor
        for dim, placement in enumerate(sharded.placements):
            if not placement.is_replicate():
                sharded_over |= _axes_of(sharded.device_mesh.get_group(dim), ranks)
    return tuple(axis for axis in AXES if axis not in sharded_over and ranks.size(axis) > 1)


def _axes_of(group: Any, ranks: Ranks) -> set[str]:
    """The mesh axes along which the ranks of a group differ; several for a flattened group."""
    assert ranks.mesh is not None
    members = torch.distributed.get_process_group_ranks(group)
    places = torch.stack([(ranks.mesh.mesh == member).nonzero()[0] for member in members])
    return {
        axis for axis, column in zip(AXES, places.unbind(1), strict=True) if len(set(column.tolist())) > 1
    }


def _replica_index(axes: tuple[str, ...], ranks: Ranks) -> tuple[int, int]:
    """This rank's index among those that differ along these axes, and their number."""
    assert ranks.mesh is not None
    index, count = 0, 1
    for axis in axes:
        index = index * ranks.size(axis) + int(ranks.mesh.get_local_rank(axis))
        count *= ranks.size(axis)
    return index, count
