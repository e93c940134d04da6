"""Data parallelism (DDP): every rank holds the whole model and works on other samples; gradients are averaged.

A step's samples are divided among the ranks. Each computes the gradient of its samples; an all-reduce gives
every rank the sum, and equal weights get equal updates, so the replicas stay equal. Gradients are reduced in
buckets while the backward pass still computes earlier layers: where links are fast enough the communication
overlaps completely. During accumulation only the last micro batch communicates. It wins whenever the model
fits one device. Nothing gets smaller: each rank holds all weights, gradients and optimizer state (see
`fsdp`), and small steps wait for the links. With fsdp it is the number of replicas of the sharded model;
then fsdp does the communication. With cp, the ranks that share a sample reduce their gradients too.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

import rush.techniques.api.contract as api
from rush.errors import RecipeError
from rush.models import Decoder
from rush.recipe import Recipe
from rush.techniques.parallel import fsdp, pp

FORWARD, ALL_REDUCE, PASS = "DistributedDataParallel.forward", "c10d::allreduce_", "rush::forward"
LAYER_SUM = "_c10d_functional::all_reduce"
COPY = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
OF_A_STEP = 2
"""All-reduces of every step on several ranks: its counts and its loss."""


@dataclass(frozen=True)
class Replicas:
    """The wrapped model."""

    wrapped: list[nn.parallel.DistributedDataParallel] = field(default_factory=list)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    if build.ranks.size("fsdp") == 1:  # fsdp replicates a sharded model
        replicate(build, knobs)


def replicate(build: api.Build, knobs: api.Knobs) -> None:
    """All-reduce the gradients of ranks with other labels and whole replicas of the parameters."""
    mesh = build.ranks.mesh_with_cp("ddp")
    if build.ranks.size("tp") > 1 or pp.splits_backward(build.recipe):
        # DistributedDataParallel supports neither sharded parameters nor weight gradients that a pipeline computes
        # separately; fully_shard with one shard does the same.
        whole: Any = type(mesh)
        one_shard = whole._concatenate([mesh, build.ranks.mesh["fsdp"]])  # type: ignore[index]
        knobs = {name: knob.default for name, knob in fsdp.technique.knobs.items()}
        fsdp.shard(build, one_shard, {**knobs, "stage": "optimizer"})
        return
    # DistributedDataParallel rebuilds its buckets after the first step, and with three ranks or more a gradient's place in its
    # bucket decides the order of the sum: a resumed run would round its first step differently. With find_unused_parameters
    # the buckets stay. (There are none.)
    fixed = build.recipe.run.deterministic and mesh.size() > 2
    made = build.facts.note(Replicas()).wrapped

    def wrap(model: Decoder) -> nn.Module:
        made.append(
            nn.parallel.DistributedDataParallel(
                model,
                process_group=mesh.get_group(),
                bucket_cap_mb=float(knobs["bucket_mb"]),
                gradient_as_bucket_view=bool(knobs["bucket_view"]),
                find_unused_parameters=fixed,
                **_no_buffer_broadcast(),
            )
        )
        return made[-1]

    def reduce_with(last: bool) -> None:
        for each in made:
            each.require_backward_grad_sync = last or not knobs["send_once"]

    build.wrap = wrap
    build.averaged_over = mesh.size()
    build.before_pass.append(reduce_with)


def check_sizes(recipe: Recipe, knobs: api.Knobs) -> None:
    """Refuse what pipeline schedules do not support."""
    if recipe.layout.pp > 1 and not knobs["send_once"]:
        raise RecipeError(
            "technique ddp: send_once is false, but with layout.pp gradients are reduced with the last micro batch; the "
            "only allowed value is true."
        )


def _no_buffer_broadcast() -> dict[str, Any]:
    """Do not broadcast buffers: they are computed, equal on every rank. (torch is about to rename the option.)"""
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The profile shows more all-reduces per step than counts and loss need, and passes through
    `DistributedDataParallel` (none with a sharded model)."""
    steps = seen.ops.get(PASS, 0) / max(1, seen.micro_batches)
    # The all-reduces of tensor parallelism have their own name as well.
    reduces = (seen.ops.get(ALL_REDUCE, 0) - seen.ops.get(LAYER_SUM, 0)) / steps if steps else 0.0
    sharded = seen.facts.fsdp is not None
    # One more for the gradient norm of a sharded model; three in a pipeline: norm, loss and the stop flag.
    own = OF_A_STEP + sharded + 3 * (seen.facts.pp is not None)
    wrapped = seen.ops.get(FORWARD, 0)
    return api.Proof(
        reduces > own and bool(wrapped) != sharded,
        f"{reduces:g} all-reduces per step, of which {own} are not for gradients; {wrapped} passes through "
        "DistributedDataParallel",
    )


def _logged(seen: api.Observation) -> list[Mapping[str, Any]]:
    """What DistributedDataParallel logs of itself, for each stage of a pipeline; empty where `fully_shard` does its work."""
    noted = seen.facts.noted(Replicas)
    wrapped: list[Any] = noted.wrapped if noted is not None else []
    return [each._get_ddp_logging_data() for each in wrapped]


def _by_fully_shard(seen: api.Observation, knobs: api.Knobs, name: str) -> api.Proof | None:
    """The proof of a knob where there are no buckets: it is at its default (`requires` refuses any other)."""
    if _logged(seen) or seen.facts.fsdp is None:
        return None
    return api.Proof(
        knobs[name] == technique.knobs[name].default, "no buckets: fully_shard reduces gradients"
    )


def _bucket_mb_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """DistributedDataParallel logs this bucket size; its buckets are no larger, but for single tensors."""
    caps = sorted({int(logged.get("bucket_cap_bytes", 0)) for logged in _logged(seen)})
    return _by_fully_shard(seen, knobs, "bucket_mb") or api.Proof(
        caps == [int(knobs["bucket_mb"]) * 2**20],
        f"buckets of up to {_listed(caps)} bytes: {_listed(_buckets(seen))}",
    )


def _bucket_view_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The profile shows copies of buckets to gradients if, and only if, those are no views."""
    if found := _by_fully_shard(seen, knobs, "bucket_view"):
        return found
    views = [logged.get("gradient_as_bucket_view") for logged in _logged(seen)]
    copies, wanted = seen.ops.get(COPY, 0), knobs["bucket_view"]
    return api.Proof(
        set(views) == {wanted} and (copies == 0) == wanted,
        f"gradients {'are' if views and all(views) else 'are not'} views of the buckets; {copies} copies to gradients",
    )


def _send_once_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The profile shows an all-reduce of each bucket once per step, or once per micro batch."""
    if found := _by_fully_shard(seen, knobs, "send_once"):
        return found
    steps = seen.ops.get(PASS, 0) / max(1, seen.micro_batches)
    # Only DistributedDataParallel's are asynchronous: the flag before the last argument.
    reduced = sum(n for call, n in seen.calls.get(ALL_REDUCE, {}).items() if call.values[-2] is True)
    buckets, passes = len(_buckets(seen)), _local_passes(seen)
    each = reduced / steps if steps else 0.0
    return api.Proof(
        buckets > 0 and each == buckets * (1 if knobs["send_once"] else passes),
        f"{each:g} all-reduces of {buckets} buckets in a step of {passes:g} micro batches",
    )


def _local_passes(seen: api.Observation) -> float:
    """Micro batches of a step; a rank with several pipeline stages has a pass of each."""
    pipeline = seen.facts.pp.pipeline if seen.facts.pp is not None else None
    return seen.micro_batches / (len(pipeline.stages) if pipeline is not None else 1)


def _buckets(seen: api.Observation) -> list[int]:
    """Bytes of each, as rebuilt after the first step."""
    listed = (
        str(logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or "")
        for logged in _logged(seen)
    )
    return [int(size) for sizes in listed for size in sizes.split(",") if size.strip()]


def _listed(sizes: list[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes) or "none seen"


technique = api.Technique(
    name="ddp",
    stage=api.Stage.SHARD,
    apply=apply,
    requires=(
        api.enabled_by_layout("ddp"),
        api.Requirement(
            "its knobs are for replicas of a whole model; with layout.fsdp, layout.tp or a zero bubble schedule remove it from "
            "techniques",
            lambda machine, recipe: (
                (recipe.layout.fsdp * recipe.layout.tp == 1 and not pp.splits_backward(recipe))
                or not any(n == "ddp" and k for n, k in recipe.technique_uses())
            ),
        ),
    ),
    conflicts=("cuda_graph",),
    reasons=api.NO_CUDA_GRAPH,
    check_sizes=check_sizes,
    knobs={
        "bucket_mb": api.KnobRange((25, 1, 5, 50, 100), "MiB of gradients per all-reduce", _bucket_mb_seen),
        "bucket_view": api.KnobRange(
            (True, False), "gradients are views of the buckets, instead of being copied in", _bucket_view_seen
        ),
        "send_once": api.KnobRange(
            (True, False),
            "during accumulation reduce with the last micro batch only, instead of with each",
            _send_once_seen,
        ),
    },
    claim=api.Claim(
        "tokens_per_s",
        0.9,
        regime="from 1 to 2 GPUs: near-linear scaling, ResNet50 and BERT, up to 256 GPUs",
        source="Li et al. 2020, arXiv:2006.15704",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=(
        api.MemoryEffect(
            "buckets",
            0.0,
            "without bucket_view a second copy of the gradients",
            by_knob=lambda knobs: float(not knobs["bucket_view"]),
        ),
    ),
    settings=(),
)
