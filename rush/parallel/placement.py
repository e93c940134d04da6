"""Where a rank's part of a tensor lies in the whole, and which rank writes what.

A sharded tensor has a box of the whole on each rank (or a few: of queries, keys and values in one layer a piece of each);
a plain one is whole on each. Ranks that differ only along axes on which a tensor is not cut hold the same. Which of
them writes it is worked out by all alike, from the names and sizes they share, so that nobody has to ask: the tensors are
dealt out by size, and one that is larger than a fair share is cut into rows, some for each. (Stages of a pipeline
hold other names; what two of them hold, both write.)
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
    """A box of a whole tensor, with its values."""

    values: Tensor
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    """The shape of all of it."""


@torch.no_grad()
def local_shards(tensor: Tensor) -> list[TensorShard]:
    """What this rank holds of a tensor; the values are the tensor's own memory."""
    values, whole = local_tensor(tensor).detach(), tuple(tensor.shape)
    if not is_sharded(tensor):
        return [TensorShard(values, (0,) * tensor.dim(), whole)]
    if tensor.numel() and not values.numel():
        return []
    found = []
    for box in itertools.product(*(_placed(along) for along in runs(tensor))):
        here = values
        for dim, (_, length, local) in enumerate(box):
            here = here.narrow(dim, local, length)
        found.append(TensorShard(here, tuple(begin for begin, _, _ in box), whole))
    assert sum(part.values.numel() for part in found) == values.numel(), f"{tuple(values.shape)} {found}"
    return found


def table_like(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty table of a number for each block of a parameter's rows, dealt out as the parameter is."""
    if not is_sharded(parameter):
        return parameter.new_empty(shape, dtype=dtype)
    from torch.distributed.tensor import DTensor

    target: Any = parameter
    own = local_tensor(parameter.detach())
    block = parameter.shape[1] // shape[1]
    assert shape[0] == parameter.shape[0], f"{shape} {tuple(parameter.shape)}"
    assert own.shape[1] % block == 0, f"a block of {block} is cut: {target.placements}"
    part = own.new_empty(own.shape[0], own.shape[1] // block, dtype=dtype)
    return DTensor.from_local(
        part,
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=(shape[1], 1),
    )


def _placed(along: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Runs with their places among what this rank holds."""
    places = itertools.accumulate((length for _, length in along), initial=0)
    return [(begin, length, place) for (begin, length), place in zip(along, places, strict=False)]


def to_write(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, list[TensorShard]]:
    """The parts of these tensors that this rank is to write. Over all ranks, each value is written once."""
    if ranks.alone:
        return {name: local_shards(tensor) for name, tensor in tensors.items()}
    alike: dict[tuple[str, ...], list[str]] = {}
    copied_along: dict[Any, tuple[str, ...]] = {}  # thousands of tensors are cut in a few ways
    for name, tensor in tensors.items():
        cut = _cut(tensor)
        if cut not in copied_along:
            copied_along[cut] = _copied_along(tensor, ranks)
        alike.setdefault(copied_along[cut], []).append(name)
    mine: dict[str, list[TensorShard]] = {}
    for axes, names in alike.items():
        number, count = _place(axes, ranks)
        # The size of the whole is known to all; parts may differ by a row.
        sizes = {name: tensors[name].numel() * tensors[name].element_size() for name in names}
        fair, loads = sum(sizes.values()) / count, [0] * count
        for name in sorted(names, key=lambda name: (-sizes[name], name)):
            if count > 1 and sizes[name] > fair and tensors[name].dim() > 0:
                parts = [_rows(part, number, count) for part in local_shards(tensors[name])]
            else:
                lightest = loads.index(min(loads))
                loads[lightest] += sizes[name]
                if lightest != number:
                    continue
                parts = local_shards(tensors[name])
            # Of an empty tensor the empty part is all there is.
            mine[name] = [part for part in parts if part.values.numel() or not tensors[name].numel()]
    return mine


def _rows(part: TensorShard, number: int, count: int) -> TensorShard:
    rows = part.values.shape[0]
    begin, end = rows * number // count, rows * (number + 1) // count
    return TensorShard(part.values[begin:end], (part.offset[0] + begin, *part.offset[1:]), part.whole)


def _cut(tensor: Tensor) -> Any:
    """What tensors that are cut alike have in common; None for one that is whole."""
    sharded: Any = tensor
    return (sharded.device_mesh, tuple(sharded.placements)) if is_sharded(tensor) else None


def _copied_along(tensor: Tensor, ranks: Ranks) -> tuple[str, ...]:
    """The axes along which ranks hold the same part of a tensor."""
    assert ranks.mesh is not None
    cut: set[str] = {"pp"}
    if is_sharded(tensor):
        sharded: Any = tensor
        for dim, placement in enumerate(sharded.placements):
            if not placement.is_replicate():
                cut |= _axes_of(sharded.device_mesh.get_group(dim), ranks)
    return tuple(axis for axis in AXES if axis not in cut and ranks.size(axis) > 1)


def _axes_of(group: Any, ranks: Ranks) -> set[str]:
    """The axes of the mesh along which the ranks of a group differ; the group may be of several axes in one."""
    assert ranks.mesh is not None
    members = torch.distributed.get_process_group_ranks(group)
    places = torch.stack([(ranks.mesh.mesh == member).nonzero()[0] for member in members])
    return {
        axis for axis, column in zip(AXES, places.unbind(1), strict=True) if len(set(column.tolist())) > 1
    }


def _place(axes: tuple[str, ...], ranks: Ranks) -> tuple[int, int]:
    """This rank's number among those that differ along these axes, and how many they are."""
    assert ranks.mesh is not None
    number, count = 0, 1
    for axis in axes:
        number = number * ranks.size(axis) + int(ranks.mesh.get_local_rank(axis))
        count *= ranks.size(axis)
    return number, count
