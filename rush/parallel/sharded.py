"""Tensors of which every rank holds a part: in, out, their norm.

A sharded tensor is torch's DTensor: it has the shape of the whole and knows on which axis of the mesh it is cut.
Everything here takes plain tensors as well and leaves them as they are, so callers need not ask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether other ranks hold the rest. (Asking does not import what makes such tensors.)"""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds, in the same memory."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def whole(tensor: Tensor) -> Tensor:
    """All of it. For a sharded tensor every rank must ask, at the same time."""
    if not is_sharded(tensor):
        return tensor
    full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full


def gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """The whole tensors, sharded ones on the host, one after another; only who wants to keep them does."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if keep:
            found[name] = full.cpu() if full is not tensor else full
    return found


@torch.no_grad()
def fill(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole value in: of a sharded tensor the part that is this rank's. No rank talks to another."""
    if not is_sharded(tensor):
        tensor.copy_(value)
        return
    from torch.distributed.tensor import distribute_tensor

    target: Any = tensor
    assert target.shape == value.shape, f"{tuple(target.shape)} {tuple(value.shape)}"
    # The whole value passes through, but is never kept; every rank has it, so none needs to send it.
    part = distribute_tensor(
        value.to(target.device), target.device_mesh, target.placements, src_data_rank=None
    )
    target.to_local().copy_(part.to_local())


def fill_model(model: nn.Module, values: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Give parameters (and buffers) their values, by name; a tied one has one name. Returns the parameters without one."""
    left = {id(parameter) for parameter in model.parameters()}
    for name, value in values:
        owner, _, own = name.rpartition(".")
        tensor = getattr(model.get_submodule(owner), own)
        fill(tensor, value)
        left.discard(id(tensor))
    return [name for name, parameter in model.named_parameters() if id(parameter) in left]


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors together, in fp32; of sharded ones over all their parts."""
    by_mesh: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        by_mesh.setdefault(_sharing_groups(tensor), []).append(own_part(tensor))
    squares = []
    for groups, parts in by_mesh.items():
        square = _norm(parts).square()
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
        if placement.is_shard()
    )


def _norm(tensors: list[Tensor]) -> Tensor:
    # In fp32 whatever the gradients are: a norm in bf16 has three digits, and clipping would inherit them.
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


@torch.no_grad()
def scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place; every rank its own parts."""
    torch._foreach_mul_([own_part(tensor) for tensor in tensors], factor)


def reshard(model: nn.Module) -> None:
    """Let go of the parts of others that a pass without backward left here."""
    for module in model.modules():
        let_go = getattr(module, "reshard", None)
        if let_go is not None:
            let_go()
