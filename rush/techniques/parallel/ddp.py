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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.data import Batch
from rush.errors import RecipeError
from rush.models import Decoder
from rush.recipe import Recipe
from rush.techniques.parallel import fsdp, pp

FORWARD, ALL_REDUCE, PASS = "DistributedDataParallel.forward", "c10d::allreduce_", "rush::forward"
LAYER_SUM = "_c10d_functional::all_reduce"
OF_A_STEP = 2
"""All-reduces of every step on several ranks: its counts and its loss."""


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
    made: list[nn.parallel.DistributedDataParallel] = []
    last = True

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

    def told(is_last: bool) -> None:
        nonlocal last
        last = is_last

    @contextmanager
    def quiet() -> Iterator[None]:
        if last or not knobs["send_once"]:
            yield
        else:
            with made[0].no_sync():
                yield

    def around(inner: api.Pass) -> api.Pass:
        def passes(batch: Batch, loss_scale: Tensor) -> Tensor:
            with quiet():
                return inner(batch, loss_scale)

        return passes

    build.wrap = wrap
    build.averaged_over = mesh.size()
    build.before_pass.append(told)
    build.pass_wrappers.append(around)


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
        "bucket_mb": api.KnobRange((25, 1, 5, 50, 100), "MiB of gradients per all-reduce"),
        "bucket_view": api.KnobRange(
            (True, False), "gradients are views of the buckets, instead of being copied in"
        ),
        "send_once": api.KnobRange(
            (True, False), "during accumulation reduce with the last micro batch only, instead of with each"
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
