"""What shows that `fsdp` took effect: its collectives in the profile, and its units as torch holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import rush.techniques.api.contract as api
from rush.techniques.api.evidence import describe_dtypes, matmuls_took
from rush.techniques.parallel.fsdp_state import ShardedUnit, sharded_units

# (cp and tp use functional collectives, which have other names.)
GATHER, SCATTER, PASS = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "rush::forward"
PREFETCH = "FSDP::forward_prefetch"
SAME = "same"
DTYPES = {SAME: None, "bfloat16": torch.bfloat16, "float32": torch.float32}


def _units_trained(model: nn.Module, blocks: list[nn.Module]) -> int:
    """Units with gradients to reduce; with adapters the root (embedding, head) has none."""
    inside = {id(p) for block in blocks for p in block.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return sum(any(p.requires_grad for p in unit) for unit in [*(b.parameters() for b in blocks), rest])


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Every parameter of every block belongs to a unit of `fully_shard`, of each this rank holds its shard and no more,
    and the profile shows all-gathers and reduce-scatters."""
    noted = seen.facts.fsdp
    if noted is None:
        return api.Proof(False, "no parameter is sharded")
    from rush.parallel.sharded import local_tensor

    units = sharded_units(noted.tops)
    sharded = {parameter for unit in units for parameter in unit.parameters}
    named = [(name, p) for top in noted.tops for name, p in top.named_parameters()]
    missing = [name for name, p in named if id(p) not in sharded]
    held = sum(local_tensor(p).numel() for _, p in named) / sum(p.numel() for _, p in named)
    whole = sum(unit.whole for unit in units)
    communicated = all(seen.ops.get(name, 0) for name in (GATHER, SCATTER))
    alike = all(unit.ranks == noted.ranks for unit in units)
    return api.Proof(
        not missing and not whole and alike and communicated,
        f"this rank holds {held:.0%} of {len(named)} parameters in {len(units)} units over {noted.ranks} ranks; {len(missing)} are "
        f"not sharded{f', {missing[0]} among them' if missing else ''}, {whole} held whole",
    )


def _read(seen: api.Observation) -> list[ShardedUnit]:
    """The units, as torch holds them."""
    return sharded_units(seen.facts.fsdp.tops) if seen.facts.fsdp is not None else []


def stage_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Per unit and step the profile shows as many all-gathers and reduce-scatters as the stage needs, and blocks free
    gathered weights after the forward pass with stage parameters only."""
    noted = seen.facts.fsdp
    if noted is None:
        return api.Proof(False, "no parameter is sharded")
    passes = seen.micro_batches
    steps = seen.ops.get(PASS, 0) / max(1, passes)
    gathers, scatters = (seen.ops.get(name, 0) / steps if steps else 0.0 for name in (GATHER, SCATTER))
    units = list(noted.model.blocks) if knobs["unit"] == "block" else []
    blocks, trained = len(units), _units_trained(noted.model, units)
    wanted: dict[str, tuple[float, int]] = {
        "parameters": (2 * blocks * passes + passes, trained * passes),
        "gradients": (blocks + 1, trained * passes),
        "optimizer": (blocks + 1, trained),
    }
    if (
        seen.facts.pp is not None
    ):  # schedules keep gradients until the end of the step; some gather all at its start
        once, sent = blocks + noted.roots, blocks + noted.trained_roots
        wanted = dict.fromkeys(wanted, (max(gathers, once), sent))
    stage, tops = str(knobs["stage"]), {id(top) for top in noted.tops}
    reshards = {unit.reshards for unit in _read(seen) if id(unit.module) not in tops}
    as_asked = reshards <= {stage == "parameters"}
    return api.Proof(
        (gathers, scatters) == wanted[stage] and as_asked,
        f"{gathers:g} all-gathers and {scatters:g} reduce-scatters in a step of {passes} micro batches with {blocks + 1} "
        f"units; blocks {'free' if True in reshards else 'keep'} gathered weights after the forward pass",
    )


def unit_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """All blocks are units of torch's, or none is."""
    noted = seen.facts.fsdp
    modules = {id(unit.module) for unit in _read(seen)}
    blocks = list(noted.model.blocks) if noted is not None else []
    own = sum(id(block) in modules for block in blocks)
    return api.Proof(
        bool(modules) and own == (len(blocks) if knobs["unit"] == "block" else 0),
        f"{own} of {len(blocks)} blocks are units of their own",
    )


def prefetch_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Every block has as many blocks to prefetch in torch's state, forward and backward (the ends of the model fewer;
    with 1 none, torch then prefetches one itself), and above 1 the profile shows `FSDP::forward_prefetch`."""
    noted, depth = seen.facts.fsdp, int(knobs["prefetch"])
    ahead = {id(unit.module): unit.ahead for unit in _read(seen)}
    wanted, found = [], []
    for top in noted.tops if noted is not None and knobs["unit"] == "block" else []:
        blocks: list[Any] = list(top.blocks)  # type: ignore[arg-type]
        for place, block in enumerate(blocks):
            wanted.append((min(depth, len(blocks) - 1 - place), min(depth, place)) if depth > 1 else (0, 0))
            found.append(ahead.get(id(block)))
    shown = sum(count for name, count in seen.ops.items() if name.startswith(PREFETCH))
    some = any(forward for forward, _ in wanted)
    return api.Proof(
        bool(ahead) and found == wanted and (shown > 0) == some and (depth == 1 or bool(found)),
        f"blocks that each block prefetches, forward and backward: {', '.join(map(str, found)) or 'none'}; {shown} forward "
        "prefetches in the profile",
    )


def param_dtype_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """torch's units gather in this dtype; if it is not that of the shards, matmuls took their inputs in it and the shards
    stay fp32."""
    asked = str(knobs["param_dtype"])
    found = {unit.param_dtype for unit in _read(seen)}
    computed = asked == SAME or (matmuls_took(seen, asked) and "float32" in seen.weight_dtypes)
    return api.Proof(
        found == {DTYPES[asked]} and computed,
        f"units gather in {_listed(found)}; {describe_dtypes(seen)}",
    )


def reduce_dtype_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The profile shows reduce-scatters of this dtype only; with same it is the dtype of the gathered weights."""
    found = {call.dtypes[1] for call in seen.calls.get(SCATTER, {})}
    units = _read(seen)
    asked = {unit.reduce_dtype for unit in units}
    own = DTYPES[str(knobs["param_dtype"])]
    trained = {p.dtype for unit in units for p in unit.module.parameters() if p.requires_grad}
    wanted = {DTYPES[str(knobs["reduce_dtype"])] or own} if knobs["reduce_dtype"] != SAME or own else trained
    return api.Proof(
        asked == {DTYPES[str(knobs["reduce_dtype"])]}
        and found == {str(d).removeprefix("torch.") for d in wanted},
        f"reduce-scatters of {', '.join(sorted(found)) or 'none seen'}",
    )


def offload_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """torch's units offload their shards, which are in host memory, if, and only if, asked for."""
    from rush.parallel.sharded import local_tensor

    units = _read(seen)
    found = {unit.offloads for unit in units}
    where = {local_tensor(p).device.type for unit in units for p in unit.module.parameters()}
    return api.Proof(
        found == {knobs["offload"]} and (where == {"cpu"} or not knobs["offload"]),
        f"units {'offload' if True in found else 'do not offload'} their shards, which are on {', '.join(sorted(where))}",
    )


def _listed(dtypes: set[torch.dtype | None]) -> str:
    return ", ".join(sorted(str(dtype or "the dtype of the shards") for dtype in dtypes)) or "none"
