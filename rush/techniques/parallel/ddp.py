"""Data parallelism: every rank holds the whole model, works on other samples, and the gradients are averaged.

A step's samples are dealt out to the ranks. Each computes the gradient of its part; an all-reduce gives every rank
the gradient of all, and equal weights get equal updates, so the copies stay equal. Gradients are sent in buckets
while the backward pass is still at work on earlier layers: where links are fast enough the exchange hides behind
it. During accumulation nothing is sent but with the last micro batch. Wins whenever the model fits one device.
Nothing gets smaller: each rank holds all weights, gradients and optimizer state (see `fsdp`), and small steps wait
for the links. Beside fsdp it is the number of copies of the sharded model; then fsdp does the sending. Beside cp, the
ranks that share a sample send their gradients along.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rush.data import Batch
from rush.errors import RecipeError
from rush.models import Decoder
from rush.recipe import Knob, Recipe
from rush.techniques.api.contract import (
    NO_CUDA_GRAPH,
    Build,
    Claim,
    KnobRange,
    MemoryEffect,
    Observation,
    Parity,
    Pass,
    Proof,
    Requirement,
    Stage,
    Technique,
    enabled_by_layout,
)
from rush.techniques.parallel import fsdp, pp

FORWARD, ALL_REDUCE, PASS = "DistributedDataParallel.forward", "c10d::allreduce_", "rush::forward"
LAYER_SUM = "_c10d_functional::all_reduce"
OF_A_STEP = 2
"""All-reduces that every step on several ranks makes: its counts and its loss."""


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    if build.ranks.size("fsdp") == 1:  # the copies of a sharded model are made and kept equal by fsdp
        replicate(build, knobs)


def replicate(build: Build, knobs: Mapping[str, Knob]) -> None:
    """Sum the gradients of all ranks that hold other labels and whole copies of the parameters."""
    mesh = build.ranks.mesh_with_cp("ddp")
    if build.ranks.size("tp") > 1 or pp.splits_backward(build.recipe):
        # torch's DistributedDataParallel knows no parameters in parts, and sees no gradients that a pipeline computes apart;
        # fully_shard with one shard does the same to them.
        whole: Any = type(mesh)
        one_shard = whole._concatenate([mesh, build.ranks.mesh["fsdp"]])  # type: ignore[index]
        knobs = {name: knob.default for name, knob in fsdp.technique.knobs.items()}
        fsdp.shard(build, one_shard, {**knobs, "stage": "optimizer"})
        return
    # After its first step DistributedDataParallel deals gradients out to buckets anew, and where one lies in its bucket decides in
    # which order three ranks or more add it up: a resumed run would round its first step otherwise. If it has to look for
    # parameters without a gradient it leaves the buckets as they are. (It finds none, and would say so from C++.)
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
                **_keep_buffers(),
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

    def around(inner: Pass) -> Pass:
        def passes(batch: Batch, loss_scale: Tensor) -> Tensor:
            with quiet():
                return inner(batch, loss_scale)

        return passes

    build.wrap = wrap
    build.averaged_over = mesh.size()
    build.before_pass.append(told)
    build.pass_wrappers.append(around)


def check_sizes(recipe: Recipe, knobs: Mapping[str, Knob]) -> None:
    """Refuse what a pipeline's schedules do not do with copies of a stage."""
    if recipe.layout.pp > 1 and not knobs["send_once"]:
        raise RecipeError(
            "technique ddp: send_once is false, but beside layout.pp gradients are sent with the last micro batch; the "
            "only allowed value is true."
        )


def _keep_buffers() -> dict[str, Any]:
    """Do not send buffers before every pass: they are computed, alike everywhere. (torch is about to rename the option.)"""
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """The profile shows more all-reduces in a step than its counts and its loss need, and passes through
    `DistributedDataParallel` (or, of a sharded model, none)."""
    steps = seen.ops.get(PASS, 0) / max(1, seen.micro_batches)
    # The sums of layers that are cut (tp) come under their own name as well.
    reduces = (seen.ops.get(ALL_REDUCE, 0) - seen.ops.get(LAYER_SUM, 0)) / steps if steps else 0.0
    sharded = "fsdp_model" in seen.facts
    # Of a sharded model the gradient's norm takes one more, of a pipeline its norm, its loss and the wish to stop.
    own = OF_A_STEP + sharded + 3 * ("pp" in seen.facts)
    wrapped = seen.ops.get(FORWARD, 0)
    return Proof(
        reduces > own and bool(wrapped) != sharded,
        f"{reduces:g} all-reduces in a step, of which {own} are not for gradients; {wrapped} passes through "
        "DistributedDataParallel",
    )


technique = Technique(
    name="ddp",
    stage=Stage.SHARD,
    apply=apply,
    requires=(
        enabled_by_layout("ddp"),
        Requirement(
            "its knobs are for copies of a whole model; beside layout.fsdp, layout.tp or a zero bubble schedule leave it out of "
            "techniques",
            lambda machine, recipe: (
                (recipe.layout.fsdp * recipe.layout.tp == 1 and not pp.splits_backward(recipe))
                or not any(n == "ddp" and k for n, k in recipe.technique_uses())
            ),
        ),
    ),
    conflicts=("cuda_graph",),
    reasons=NO_CUDA_GRAPH,
    check_sizes=check_sizes,
    knobs={
        "bucket_mb": KnobRange((25, 1, 5, 50, 100), "MiB of gradients that are sent together"),
        "bucket_view": KnobRange((True, False), "gradients live in the buckets, instead of being copied in"),
        "send_once": KnobRange(
            (True, False), "during accumulation send with the last micro batch only, instead of with each"
        ),
    },
    claim=Claim(
        "tokens_per_s",
        0.9,
        regime="from 1 to 2 GPUs: near-linear scaling, ResNet50 and BERT, up to 256 GPUs",
        source="Li et al. 2020, arXiv:2006.15704",
    ),
    parity=Parity.CLOSE,
    evidence=evidence,
    memory=(
        MemoryEffect(
            "buckets",
            0.0,
            "without bucket_view a second copy of the gradients",
            by_knob=lambda knobs: float(not knobs["bucket_view"]),
        ),
    ),
    settings=(),
)
