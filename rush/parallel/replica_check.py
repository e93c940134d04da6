"""Copies that must be equal, compared: what several ranks hold alike is hashed and the hashes are exchanged.

Copies of a model (ddp), norms beside tensor parallelism, everything beside cp: ranks compute the same update from the
same sums and never look at each other's weights again. A flipped bit, a missed exchange or a kernel that rounds differently
on one device makes the copies drift apart, and the loss, which is a mean over ranks, hardly shows it. Here each rank
reduces each of its parameters (its part, of a sharded one) to an integer on its device, and the ranks exchange those: 16
bytes a tensor. What has the same name and the same place in the whole must have the same integer. Parts that nobody else
holds (fsdp alone) are compared with nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from rush.errors import Drifted
from rush.parallel.ranks import Ranks
from rush.parallel.sharded import boxes, local_tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAME_LIMIT = timedelta(minutes=2)


@torch.no_grad()
def check_replicas(ranks: Ranks, named: Iterable[tuple[str, nn.Parameter]], step: int) -> None:
    """Refuse to go on if ranks hold unlike copies. All ranks call this, at the same step."""
    if ranks.mesh is None:
        return
    held = {_key(name, tensor): (name, tensor) for name, tensor in named}
    table_pk = torch.stack([_row(key, tensor) for key, (_, tensor) in held.items()])
    tables = _exchange(table_pk)
    copies: dict[int, dict[int, int]] = {}
    for rank, rows in enumerate(tables):
        for key, value in rows:
            copies.setdefault(key, {})[rank] = value
    drifted = [key for key, values in copies.items() if key and len(set(values.values())) > 1]
    if drifted:
        first = drifted[0]
        name = _name(ranks, held, first, copies[first], step)
        raise Drifted(_say(step, name, copies[first], len(drifted)))


def _key(name: str, tensor: Tensor) -> int:
    """What this rank holds, as a number: the tensor's name and which part of it."""
    digest = hashlib.blake2b(f"{name} {boxes(tensor)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _row(key: int, tensor: Tensor) -> Tensor:
    """The key, and one integer made of all bits."""
    hashes = torch.stack([_hash(part) for part in _plain(local_tensor(tensor.detach()))])
    return torch.stack([torch.full_like(hashes[0], key), hashes.sum()])


def _plain(tensor: Tensor) -> list[Tensor]:
    """The tensors that make up one, which may be quantized into several."""
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in _plain(getattr(tensor, name))]


def _hash(tensor: Tensor) -> Tensor:
    """torch's exclusive or of the bits of each row, and the rows added with odd weights, so that places count."""
    bits = tensor.contiguous().view(INTEGERS[tensor.element_size()])
    rows_r = torch.hash_tensor(bits.reshape(len(bits) if bits.dim() > 1 else bits.numel(), -1), dim=1)
    weights_r = torch.arange(1, 2 * len(rows_r), 2, device=rows_r.device)
    return (rows_r.view(torch.int64) * weights_r).sum()


def _exchange(table_pk: Tensor) -> list[list[list[int]]]:
    """The tables of all ranks, on the host; they may be of unlike lengths (other layers), so zeros fill them up."""
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


def _name(ranks: Ranks, held: dict[int, Any], key: int, copies: dict[int, int], step: int) -> str:
    """The parameter's name, from the first rank that holds it."""
    assert ranks.store is not None
    if ranks.rank == min(copies):
        ranks.store.set(f"drift/{step}", json.dumps(held[key][0]))
    ranks.store.wait([f"drift/{step}"], NAME_LIMIT)
    name: str = json.loads(ranks.store.get(f"drift/{step}"))
    heard = ranks.store.add(f"drift/{step}/heard", 1)
    # Rank 0 keeps the store, and this is the end of the run: it stays until all have heard.
    limit = time.monotonic() + NAME_LIMIT.total_seconds()
    while ranks.rank == 0 and heard < ranks.world and time.monotonic() < limit:
        time.sleep(0.02)
        heard = ranks.store.add(f"drift/{step}/heard", 0)
    return name


def _say(step: int, name: str, copies: dict[int, int], num_drifted: int) -> str:
    (common, count), *others = Counter(copies.values()).most_common()
    odd = [rank for rank, value in copies.items() if value != common]
    if count > sum(other for _, other in others):
        who = f"rank{'s' * (len(odd) > 1)} {_listed(odd)} hold{'s' * (len(odd) == 1)} other bits than the {count} others"
    else:
        who = f"ranks {_listed(sorted(copies))} do not hold the same bits"
    more = f", and {num_drifted - 1} more parameters differ" if num_drifted > 1 else ""
    return f"step {step}: copies of the weights have drifted apart: {who} of {name}{more}."


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
