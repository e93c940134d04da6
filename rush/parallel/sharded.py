"""Sharded tensors: local and full values, their norm.

A sharded tensor is torch's DTensor: it has the full shape and knows over which mesh axis it is sharded. All functions take
plain tensors as well and return them unchanged, so callers need not ask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

NormFn = Callable[[list[Tensor]], Tensor]
"""The L2 norm of local tensors together, in fp32."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor. (Does not import torch.distributed.tensor.)"""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds, in the same memory; `to_local` of a DTensor."""
    if not is_sharded(tensor):
        return tensor
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


@dataclass(frozen=True)
class ShardedDim:
    """A dim sharded over a mesh axis. Of several equal `parts` side by side (fused queries, keys and values) every rank has a
    piece of each."""

    axis: int
    dim: int
    parts: int
    ranks: int
    index: int
    """This rank's coordinate on the axis."""

    def pieces(self, value: Tensor) -> list[Tensor]:
        """Each rank's piece: of equal lengths, the last ones shorter or empty."""
        found: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for part in value.chunk(self.parts, self.dim):
            size = part.shape[self.dim]
            most = -(-size // self.ranks)
            for rank, pieces in enumerate(found):
                start = min(rank * most, size)
                pieces.append(part.narrow(self.dim, start, min(most, size - start)))
        return [torch.cat(pieces, self.dim) if self.parts > 1 else pieces[0] for pieces in found]

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The full value, from every rank's piece."""
        by_part = zip(*(piece.tensor_split(self.parts, self.dim) for piece in pieces), strict=True)
        return torch.cat([piece for part in by_part for piece in part], self.dim)


def sharded_dims(tensor: Tensor) -> list[ShardedDim]:
    """How a tensor is sharded, in the order in which it was.

    Tensor parallelism shards first, on the last axis of the mesh, and fsdp shards each rank's piece. torch describes the
    latter as a strided shard, so that placements can be read from the left, which only holds where lengths divide. On the
    last axis a strided shard means pieces of several parts.
    """
    target: Any = tensor
    mesh, found = target.device_mesh, []
    coordinate = mesh.get_coordinate()
    for axis in reversed(range(mesh.ndim)):
        placement = target.placements[axis]
        assert not placement.is_partial(), f"{target.placements}: a partial tensor has no shards"
        if not placement.is_replicate():
            parts = getattr(placement, "split_factor", 1) if axis == mesh.ndim - 1 else 1
            found.append(ShardedDim(axis, placement.dim, int(parts), mesh.size(axis), coordinate[axis]))
    return found


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a piece of a tensor begins, and its shape."""


def runs(tensor: Tensor) -> list[list[tuple[int, int]]]:
    """What this rank holds of a sharded tensor along each dim, as (begin in the full tensor, length) of each contiguous run: one,
    or several where its rows come from several parts."""
    return _runs(tuple(tensor.shape), tuple(sharded_dims(tensor)))


@lru_cache(maxsize=4096)  # a model has thousands of tensors of a few shapes, and every save asks
def _runs(shape: tuple[int, ...], dims: tuple[ShardedDim, ...]) -> list[list[tuple[int, int]]]:
    found: list[list[tuple[int, int]]] = []
    for dim, size in enumerate(shape):
        own = torch.arange(size)
        for sharded in dims:
            if sharded.dim == dim:
                own = replace(sharded, dim=0).pieces(own)[sharded.index]
        breaks = (own.diff() != 1).nonzero().flatten() + 1
        found.append([(int(run[0]) if len(run) else 0, len(run)) for run in own.tensor_split(breaks)])
    return found


def boxes(tensor: Tensor) -> list[Box]:
    """Where this rank's pieces lie in the full tensor."""
    if not is_sharded(tensor):
        return [((0,) * tensor.dim(), tuple(tensor.shape))]
    return [tuple(zip(*ends, strict=True)) for ends in product(*runs(tensor))]  # type: ignore[misc]


def full_tensor(tensor: Tensor) -> Tensor:
    """The full value; a collective for a sharded tensor."""
    if not is_sharded(tensor):
        return tensor
    target: Any = tensor.detach()
    # Shards may be on the host, but the collective uses the mesh's device.
    found: Tensor = target.to_local().to(target.device_mesh.device_type)
    # Each sharding divided what the ones before it left.
    shapes = [torch.empty(target.shape, device="meta")]
    dims = sharded_dims(tensor)
    for sharded in dims:
        shapes.append(sharded.pieces(shapes[-1])[sharded.index])
    for sharded, before in zip(reversed(dims), reversed(shapes[:-1]), strict=True):
        sizes = [piece.shape for piece in sharded.pieces(before)]
        most = max(size.numel() for size in sizes)
        sent = found.new_zeros(most)
        sent[: found.numel()] = found.flatten()
        gathered = [torch.empty_like(sent) for _ in sizes]
        torch.distributed.all_gather(gathered, sent, group=target.device_mesh.get_group(sharded.axis))
        pieces = [flat[: size.numel()].view(size) for flat, size in zip(gathered, sizes, strict=True)]
        found = sharded.joined(pieces)
    return found


def gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Gather full tensors one after another, sharded ones to the host; only ranks with `keep` keep them."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor)
        if keep:
            found[name] = full.cpu() if full is not tensor else full
    return found


@torch.no_grad()
def fill(tensor: Tensor, value: Tensor) -> None:
    """Copy a full value in, or this rank's shard of it. No communication."""
    if not is_sharded(tensor):
        tensor.copy_(value)
        return
    target: Any = tensor
    assert target.shape == value.shape, f"{tuple(target.shape)} {tuple(value.shape)}"
    for sharded in sharded_dims(tensor):
        value = sharded.pieces(value)[sharded.index]
    target.to_local().copy_(value)


def fill_model(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Copy values into parameters and buffers by name; return the names of parameters without a value."""
    known = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    left = {id(parameter) for parameter in model.parameters()}
    for name, value in values:
        fill(known[name], value)
        left.discard(id(known[name]))
    return [name for name, parameter in model.named_parameters() if id(parameter) in left]


def local_norm(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of local tensors together."""
    # In fp32 whatever the gradients are: a bf16 norm has three digits, and clipping would inherit them.
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def total_norm(tensors: Sequence[Tensor], norm_fn: NormFn = local_norm) -> Tensor:
    """The global L2 norm of all tensors, in fp32, over all shards."""
    by_mesh: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        by_mesh.setdefault(_sharing_groups(tensor), []).append(local_tensor(tensor))
    # Shards may be on the host, but the collective uses the mesh's device.
    device = next((t.device_mesh.device_type for t in tensors if is_sharded(t)), None)  # type: ignore[attr-defined]
    squares = []
    for groups, shards in by_mesh.items():
        square = norm_fn(shards).square().to(device)
        for group in groups:
            torch.distributed.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def _sharing_groups(tensor: Tensor) -> tuple[Any, ...]:
    """The process groups over which the tensor is sharded; replicas count once."""
    if not is_sharded(tensor):
        return ()
    sharded: Any = tensor
    return tuple(
        sharded.device_mesh.get_group(axis)
        for axis, placement in enumerate(sharded.placements)
        if not placement.is_replicate() and sharded.device_mesh.size(axis) > 1
    )


@torch.no_grad()
def scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place, each rank its own shards."""
    local = [local_tensor(tensor) for tensor in tensors]
    torch._foreach_mul_(local, factor.to(local[0].device))


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters that a forward pass without backward left behind (fsdp)."""
    for module in model.modules():
        if (free := getattr(module, "reshard", None)) is not None:
            free()
