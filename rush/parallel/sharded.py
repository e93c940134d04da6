"""Tensors of which every rank holds a part: in, out, their norm.

A sharded tensor is torch's DTensor: it has the shape of the whole and knows on which axis of the mesh it is cut.
Everything here takes plain tensors as well and leaves them as they are, so callers need not ask.
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
"""The Euclidean norm of tensors that lie here, together, in fp32."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold the rest. (Asking does not import what makes such tensors.)"""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds, in the same memory."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


@dataclass(frozen=True)
class ShardedDim:
    """One cut of a tensor: along `dim`, over the ranks of a mesh's axis. Of several equal `parts` side by side (queries,
    keys and values in one layer) every rank has its piece of each."""

    axis: int
    dim: int
    parts: int
    ranks: int
    place: int
    """Which of them this rank is."""

    def pieces(self, value: Tensor) -> list[Tensor]:
        """What each rank has of it: equal lengths, as far as there is any; the last ones get less, or nothing."""
        found: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for part in value.chunk(self.parts, self.dim):
            size = part.shape[self.dim]
            most = -(-size // self.ranks)
            for rank, pieces in enumerate(found):
                start = min(rank * most, size)
                pieces.append(part.narrow(self.dim, start, min(most, size - start)))
        return [torch.cat(pieces, self.dim) if self.parts > 1 else pieces[0] for pieces in found]

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole, from every rank's piece."""
        by_part = zip(*(piece.tensor_split(self.parts, self.dim) for piece in pieces), strict=True)
        return torch.cat([piece for part in by_part for piece in part], self.dim)


def sharded_dims(tensor: Tensor) -> list[ShardedDim]:
    """How a sharded tensor was cut, in the order it was.

    Tensor parallelism shards first, on the last axis of the mesh, and fsdp shards what is left to each rank. torch writes the
    latter down as a strided shard, so that it can be read from the left; that only holds where lengths divide. On the
    last axis a strided shard is what it says: pieces of several parts.
    """
    target: Any = tensor
    mesh, found = target.device_mesh, []
    place = mesh.get_coordinate()
    for axis in reversed(range(mesh.ndim)):
        placement = target.placements[axis]
        assert not placement.is_partial(), f"{target.placements}: what is yet to be summed has no parts"
        if not placement.is_replicate():
            parts = getattr(placement, "split_factor", 1) if axis == mesh.ndim - 1 else 1
            found.append(ShardedDim(axis, placement.dim, int(parts), mesh.size(axis), place[axis]))
    return found


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a piece of a tensor begins, and its shape."""


def runs(tensor: Tensor) -> list[list[tuple[int, int]]]:
    """What this rank holds of a sharded tensor along each dim: where each run of neighbours begins in the whole, and its length. It is one run,
    except where its rows come from several parts: then they lie one below another, in this order."""
    return _runs(tuple(tensor.shape), tuple(sharded_dims(tensor)))


@lru_cache(maxsize=4096)  # a model has thousands of tensors of a few shapes, and every save asks
def _runs(shape: tuple[int, ...], made: tuple[ShardedDim, ...]) -> list[list[tuple[int, int]]]:
    found: list[list[tuple[int, int]]] = []
    for dim, size in enumerate(shape):
        own = torch.arange(size)
        for cut in made:
            if cut.dim == dim:
                own = replace(cut, dim=0).pieces(own)[cut.place]
        breaks = (own.diff() != 1).nonzero().flatten() + 1
        found.append([(int(run[0]) if len(run) else 0, len(run)) for run in own.tensor_split(breaks)])
    return found


def boxes(tensor: Tensor) -> list[Box]:
    """Where in the whole this rank's part lies."""
    if not is_sharded(tensor):
        return [((0,) * tensor.dim(), tuple(tensor.shape))]
    return [tuple(zip(*ends, strict=True)) for ends in product(*runs(tensor))]  # type: ignore[misc]


def full_tensor(tensor: Tensor) -> Tensor:
    """All of it. For a sharded tensor every rank must ask, at the same time."""
    if not is_sharded(tensor):
        return tensor
    target: Any = tensor.detach()
    # Parts may lie on the host, but ranks talk through their devices.
    found: Tensor = target.to_local().to(target.device_mesh.device_type)
    # Each cut saw what those before it had left; its pieces have those shapes.
    shapes = [torch.empty(target.shape, device="meta")]
    made = sharded_dims(tensor)
    for cut in made:
        shapes.append(cut.pieces(shapes[-1])[cut.place])
    for cut, before in zip(reversed(made), reversed(shapes[:-1]), strict=True):
        sizes = [piece.shape for piece in cut.pieces(before)]
        most = max(size.numel() for size in sizes)
        sent = found.new_zeros(most)
        sent[: found.numel()] = found.flatten()
        heard = [torch.empty_like(sent) for _ in sizes]
        torch.distributed.all_gather(heard, sent, group=target.device_mesh.get_group(cut.axis))
        found = cut.joined([flat[: size.numel()].view(size) for flat, size in zip(heard, sizes, strict=True)])
    return found


def gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """The whole tensors, sharded ones on the host, one after another; only who wants to keep them does."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor)
        if keep:
            found[name] = full.cpu() if full is not tensor else full
    return found


@torch.no_grad()
def fill(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole value in: of a sharded tensor the part that is this rank's. No rank talks to another."""
    if not is_sharded(tensor):
        tensor.copy_(value)
        return
    target: Any = tensor
    assert target.shape == value.shape, f"{tuple(target.shape)} {tuple(value.shape)}"
    # The whole value passes through, but is never kept; every rank has it, so none needs to send it.
    for cut in sharded_dims(tensor):
        value = cut.pieces(value)[cut.place]
    target.to_local().copy_(value)


def fill_model(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Give parameters (and buffers) their values, by name; a tied one has one name. Returns the parameters without one."""
    known = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    left = {id(parameter) for parameter in model.parameters()}
    for name, value in values:
        fill(known[name], value)
        left.discard(id(known[name]))
    return [name for name, parameter in model.named_parameters() if id(parameter) in left]


def local_norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of tensors that lie here, together."""
    # In fp32 whatever the gradients are: a norm in bf16 has three digits, and clipping would inherit them.
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def total_norm(tensors: Sequence[Tensor], norm_fn: NormFn = local_norm) -> Tensor:
    """The Euclidean norm of all tensors together, in fp32; of sharded ones over all their parts."""
    by_mesh: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        by_mesh.setdefault(_sharing_groups(tensor), []).append(local_tensor(tensor))
    # Parts may lie on the host, but ranks talk through their devices.
    device = next((t.device_mesh.device_type for t in tensors if is_sharded(t)), None)  # type: ignore[attr-defined]
    squares = []
    for groups, parts in by_mesh.items():
        square = norm_fn(parts).square().to(device)
        for group in groups:
            torch.distributed.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def _sharing_groups(tensor: Tensor) -> tuple[Any, ...]:
    """The groups of ranks whose parts make up the tensor; replicas of it count once."""
    if not is_sharded(tensor):
        return ()
    whole: Any = tensor
    return tuple(
        whole.device_mesh.get_group(axis)
        for axis, placement in enumerate(whole.placements)
        if not placement.is_replicate() and whole.device_mesh.size(axis) > 1
    )


@torch.no_grad()
def scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place; every rank its own parts."""
    parts = [local_tensor(tensor) for tensor in tensors]
    torch._foreach_mul_(parts, factor.to(parts[0].device))


def reshard(model: nn.Module) -> None:
    """Let go of the parts of others that a pass without backward left here."""
    for module in model.modules():
        let_go = getattr(module, "reshard", None)
        if let_go is not None:
            let_go()
