"""Compare replicas bit for bit: ranks hash what they replicate and gather the hashes.

Replicas of a model (ddp), norms beside tensor parallelism, everything beside cp: ranks compute the same update from the
same sums and never compare weights again. A flipped bit, a missed collective or a kernel that rounds differently on one
device makes replicas drift apart, and the loss, a mean over ranks, hardly shows it. Here each rank reduces each of its
parameters (its shard, of a sharded one) to an integer on its device, and all gather those: 16 bytes a tensor. Tensors
with the same name and offsets must have the same integer. Shards that no other rank holds (fsdp alone) are not compared.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from rush.errors import Drifted
from rush.parallel.ranks import Ranks, listed
from rush.parallel.sharded import boxes, local_tensor
from rush.parallel.store_channel import StoreChannel

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAME_LIMIT = timedelta(minutes=2)


@torch.no_grad()
def check_replicas(ranks: Ranks, named: Iterable[tuple[str, nn.Parameter]], step: int) -> None:
    """Raise `Drifted` if replicas differ. All ranks call this, at the same step."""
    if ranks.mesh is None:
        return
    held = {_key(name, tensor): (name, tensor) for name, tensor in named}
    table_pk = torch.stack([row_of(key, tensor) for key, (_, tensor) in held.items()])
    replicas: dict[int, dict[int, int]] = {}
    for rank, rows in enumerate(_gather_tables(table_pk)):
        for key, value in rows:
            replicas.setdefault(key, {})[rank] = value
    drifted = [key for key, values in replicas.items() if key and len(set(values.values())) > 1]
    if drifted:
        first = drifted[0]
        name = _name(ranks, held, first, replicas[first], step)
        raise Drifted(describe(step, name, replicas[first], len(drifted)))


def _key(name: str, tensor: Tensor) -> int:
    """A number for the tensor's name and its offsets in the whole."""
    digest = hashlib.blake2b(f"{name} {boxes(tensor)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def row_of(key: int, tensor: Tensor) -> Tensor:
    """The key, and one integer of all bits."""
    hashes = torch.stack([_hash(part) for part in _plain(local_tensor(tensor.detach()))])
    return torch.stack([torch.full_like(hashes[0], key), hashes.sum()])


def _plain(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside of a tensor subclass (a quantized weight has several)."""
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in _plain(getattr(tensor, name))]


def _hash(tensor: Tensor) -> Tensor:
    """XOR of the bits of each row, and the rows summed with odd weights, so that positions count."""
    bits = tensor.contiguous().view(INTEGERS[tensor.element_size()])
    rows_r = torch.hash_tensor(bits.reshape(len(bits) if bits.dim() > 1 else bits.numel(), -1), dim=1)
    weights_r = torch.arange(1, 2 * len(rows_r), 2, device=rows_r.device)
    return (rows_r.view(torch.int64) * weights_r).sum()


def _gather_tables(table_pk: Tensor) -> list[list[list[int]]]:
    """The tables of all ranks, on the host, padded with zeros: pipeline stages have other lengths."""
    import torch.distributed as dist

    if dist.get_backend() == "gloo":
        table_pk = table_pk.cpu()
    length = torch.tensor(len(table_pk), device=table_pk.device)
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    padded = table_pk.new_zeros(int(length), table_pk.shape[1])
    padded[: len(table_pk)] = table_pk
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, padded)
    tables: list[list[list[int]]] = torch.stack(gathered).tolist()
    return tables


def _name(ranks: Ranks, held: dict[int, Any], key: int, replicas: dict[int, int], step: int) -> str:
    """The parameter's name, from the first rank that holds it."""
    assert ranks.store is not None
    channel = StoreChannel(ranks.store, f"drift/{step}", limit=NAME_LIMIT)
    if ranks.rank == min(replicas):
        channel.send("name", held[key][0])
    name: str = channel.receive("name", acknowledge=True)
    if ranks.main:
        channel.wait_acknowledged("name", ranks.world, NAME_LIMIT.total_seconds())
    return name


def describe(step: int, name: str, replicas: dict[int, int], num_drifted: int) -> str:
    (common, count), *others = Counter(replicas.values()).most_common()
    odd = [rank for rank, value in replicas.items() if value != common]
    if count > sum(other for _, other in others):
        who = f"rank{'s' * (len(odd) > 1)} {listed(odd)} hold{'s' * (len(odd) == 1)} other bits than the {count} others"
    else:
        who = f"ranks {listed(sorted(replicas))} do not hold the same bits"
    more = f", and {num_drifted - 1} more parameters differ" if num_drifted > 1 else ""
    return f"step {step}: replicas of the weights have drifted apart: {who} of {name}{more}."
