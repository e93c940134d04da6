"""How close a recipe is to its limit: the minimum time of its matmuls and attention over the measured step time.

The limit includes no norm, no cast, no update, no wait and no recomputation. Matmuls run at the rate of a large one of their
dtype, as `rush probe` measured it; attention at the best rate that `rush bench kernels flash_attention` found on the same kind
of machine, with the same head dim and the nearest sequence length. So 100 % is not reachable; the gap is what kernels, fusion
and overlap could still gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rush.models.counts import mean_keys
from rush.plan.spec import HALF, Spec, matmul_dtype, weights_of
from rush.plan.target import TargetMachine
from rush.records.kernels import KernelRecord

KERNEL = "flash_attention"
PASSES = 3.5
"""FLOPs of forward and backward over the forward pass's: seven matmuls with the recomputed scores, of which
forward has two."""


@dataclass(frozen=True)
class AttentionRate:
    head_dim: int
    sequence: int
    flops_per_s: float
    """FLOP/s of forward and backward together, in 16 bits."""


def attention_rates(records: Iterable[KernelRecord]) -> list[AttentionRate]:
    """The fastest correct attention, of any library, at each head dim and length."""
    best: dict[tuple[int, int], float] = {}
    for record in records:
        rows: list[dict[str, Any]] = [
            dict(row) for op in record["ops"] if op["op"] == KERNEL for row in op["rows"]
        ]
        for row in rows:
            if row["step"] != "both" or row["status"] != "ok" or not row.get("flops_per_s"):
                continue
            if (row.get("correctness") or {}).get("verdict") != "equal":
                continue
            at = (int(row["dims"]["head_dim"]), int(row["dims"]["sequence"]))
            best[at] = max(best.get(at, 0.0), float(row["flops_per_s"]))
    return [AttentionRate(*at, rate) for at, rate in best.items()]


def limit_s_per_token(spec: Spec, target: TargetMachine, rates: Iterable[AttentionRate]) -> float | None:
    """Seconds; None where attention is not in 16 bits, none of this head dim was measured, or one of the matmuls' dtypes was not."""
    shape, dtype = spec.shape, matmul_dtype(spec)
    per_weight = 4 if spec.effects.factor("frozen") else 6
    inside, of_head = (spec.work.name(term, dtype) for term in ("blocks.dtype", "head.dtype"))
    alike = [one for one in rates if one.head_dim == shape.head_dim]
    if dtype not in HALF or not alike or any(name not in target.matmul for name in (inside, of_head)):
        return None
    nearest = min(alike, key=lambda one: abs(math.log(one.sequence / spec.sequence)))
    keys = sum(mean_keys(shape, layer, spec.sequence) for layer in range(shape.num_layers))
    attention = PASSES * 4 * shape.num_heads * shape.head_dim * keys
    blocks = per_weight * weights_of(spec).block_linear * shape.num_layers
    head = per_weight * shape.vocab_size * shape.hidden
    return blocks / target.rate(inside) + head / target.rate(of_head) + attention / nearest.flops_per_s


def share_of_limit(
    spec: Spec, target: TargetMachine, rates: Iterable[AttentionRate], tokens_per_s: float
) -> float | None:
    """For rows of one document each: packed or padded rows have less attention than their length implies."""
    least = limit_s_per_token(spec, target, rates)
    return None if least is None else least * tokens_per_s
