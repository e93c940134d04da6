"""The state of `fully_shard` for each of its units, read from torch's own objects: the evidence of `fsdp` uses it.

torch keeps the settings of a unit in private state. It is read here and nowhere else; the names are those of torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ShardedUnit:
    """A module that is gathered at once, and its settings."""

    module: nn.Module
    parameters: frozenset[int]
    """Ids of its sharded parameters."""
    whole: int
    """Parameters of which this rank holds more than its shard."""
    ranks: int
    reshards: bool
    """Whether gathered weights are freed after the forward pass."""
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offloads: bool
    ahead: tuple[int, int]
    """Units that it prefetches, forward and backward, besides the one that torch prefetches itself."""


def sharded_units(roots: Iterable[nn.Module]) -> list[ShardedUnit]:
    """All units with parameters in these modules."""
    from torch.distributed.fsdp import FSDPModule

    modules = {id(module): module for root in roots for module in root.modules()}
    found = [_unit(module) for module in modules.values() if isinstance(module, FSDPModule)]
    return [unit for unit in found if unit.parameters]


def _unit(module: Any) -> ShardedUnit:
    state = module._get_fsdp_state()
    groups = list(_groups(state))
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    return ShardedUnit(
        module=module,
        parameters=frozenset(id(parameter.sharded_param) for parameter in parameters),
        whole=sum(_is_whole(parameter) for parameter in parameters),
        ranks=min((_ranks(group) for group in groups), default=1),
        reshards=any(group.post_forward_mesh_info is not None for group in groups),
        param_dtype=groups[0].mp_policy.param_dtype if groups else None,
        reduce_dtype=groups[0].mp_policy.reduce_dtype if groups else None,
        offloads=bool(parameters) and all(parameter.offload_to_cpu for parameter in parameters),
        ahead=(len(state._states_to_forward_prefetch), len(state._states_to_backward_prefetch)),
    )


def _groups(state: Any) -> Iterator[Any]:
    """One in torch 2.11, later several."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return (group for group in groups if group is not None)


def _ranks(group: Any) -> int:
    info = group.mesh_info
    return int(info.mesh.size(info.shard_mesh_dim))


def _is_whole(parameter: Any) -> bool:
    """Whether this rank's shard is longer than its part of the first dim, rounded up."""
    info, local = parameter.mesh_info, parameter.sharded_param.to_local()
    ranks = int(info.mesh.size(info.shard_mesh_dim))
    # (tp has sharded it before: `_orig_size` is what fsdp was given.)
    whole = torch.Size(parameter._orig_size)
    return bool(local.numel() > -(-whole[0] // ranks) * whole[1:].numel())
