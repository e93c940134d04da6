"""Fully sharded data parallelism (ZeRO): each rank keeps a shard of the model and gathers the rest when needed.

Data parallelism holds weights, gradients and Adam's moments on every rank, 16 bytes per parameter. Here each
rank keeps 1/n. Before a block computes, its weights are all-gathered; after its backward pass the gradients
are reduce-scattered. Stage "parameters" (ZeRO-3) frees gathered weights after the forward pass of a block and
gathers them again for the backward pass: half as much communication again. "gradients" (ZeRO-2) keeps them
until the step's last backward pass; "optimizer" (ZeRO-1) also keeps unsharded gradients until then and
reduces them once per step. Between steps torch holds shards only, whatever the stage. It wins where a model
does not fit; it loses to `ddp` where it does and links are slow. With layout.ddp the sharded model is
replicated (hybrid sharding). With layout.cp the ranks that share a sample hold shards as well. `offload`
keeps the shards in host memory: the device holds a block or two, and every pass waits for PCIe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import rush.techniques.api.contract as api
from rush.errors import RecipeError
from rush.parallel import Ranks
from rush.recipe import Recipe
from rush.techniques.api.facts import FsdpFacts
from rush.techniques.parallel import fsdp_evidence, pp
from rush.techniques.parallel.fsdp_evidence import DTYPES, SAME

ZERO = {"parameters": "ZeRO-3", "gradients": "ZeRO-2", "optimizer": "ZeRO-1"}


class IntegersWithoutGradient(TorchFunctionMode):
    """Lets `fully_shard` shard quantized weights: before torch 2.12 it calls requires_grad_(True) on every sharded parameter,
    which integer tensors refuse."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.requires_grad_ and not arguments[0].is_floating_point():
            return arguments[0]
        return function(*arguments, **(options or {}))


def apply(build: api.Build, knobs: api.Knobs) -> None:
    shard(build, _mesh(build.ranks), knobs)


def shard(build: api.Build, mesh: Any, knobs: api.Knobs) -> None:
    """Shard the model over the last axis of the mesh; replicate it over the first of two."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    stage, model = str(knobs["stage"]), build.model
    blocks: list[Any] = list(model.blocks) if knobs["unit"] == "block" else []
    # Only parameters are sharded; quantized layers turn their buffers into parameters.
    for module in model.modules():
        getattr(module, "hold_as_parameters", lambda: None)()
    options: dict[str, Any] = {
        "mesh": mesh,
        # Inputs of a block have the dtype of the embedding, and RoPE angles stay fp32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[str(knobs["param_dtype"])],
            reduce_dtype=DTYPES[str(knobs["reduce_dtype"])],
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(build.device.type == "cuda")
        if knobs["offload"]
        else OffloadPolicy(),
    }
    if knobs["offload"]:
        build.weights_device = torch.device("cpu")
    if knobs["param_dtype"] != SAME:
        build.facts.rate_dtype = str(knobs["param_dtype"])
    # The backward pass begins with the root (head), so resharding it after forward would be in vain.
    roots = build.roots
    with IntegersWithoutGradient():
        for block in blocks:
            fully_shard(block, reshard_after_forward=stage == "parameters", **options)
        for root in roots:
            fully_shard(root, reshard_after_forward=False, **options)
    for unit in [*blocks, *roots]:
        # The loss scale counts the labels of all ranks, so gradients are summed.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    for root in roots if blocks else []:
        _prefetch(list(root.blocks), int(knobs["prefetch"]))
    if not build.stages:  # a pipeline does this for each stage
        build.before_pass.append(_sync_setter(model, stage))
    inside = {id(p) for block in blocks for p in block.parameters()}
    outside = [[p for p in root.parameters() if id(p) not in inside] for root in roots]
    build.facts.fsdp = FsdpFacts(
        model,
        tops=roots,
        ranks=build.ranks.size("fsdp") * build.ranks.size("cp"),
        roots=sum(bool(rest) for rest in outside),
        trained_roots=sum(any(p.requires_grad for p in rest) for rest in outside),
    )


def _mesh(ranks: Ranks) -> Any:
    """The mesh of shards; with ddp, of replicas and shards."""
    assert ranks.mesh is not None
    if ranks.size("ddp") == 1:
        return ranks.mesh_with_cp("fsdp")
    if ranks.size("cp") == 1:
        return ranks.mesh[("ddp", "fsdp")]
    whole: Any = type(ranks.mesh)
    return whole._concatenate([ranks.mesh["ddp"], ranks.mesh_with_cp("fsdp")])


def _prefetch(blocks: list[Any], depth: int) -> None:
    """Prefetch more than the one block that torch prefetches itself."""
    if depth < 2:
        return
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(0, place - depth) : place][::-1])


def _sync_setter(model: nn.Module, stage: str) -> Callable[[bool], None]:
    sharded: Any = model

    def set_sync(last: bool) -> None:
        sharded.set_is_last_backward(last)
        sharded.set_requires_gradient_sync(last or stage != "optimizer")
        # Replicas reduce the sum over all passes, once.
        sharded.set_requires_all_reduce(last)
        sharded.set_reshard_after_backward(last or stage == "parameters")

    return set_sync


def check_sizes(recipe: Recipe, knobs: api.Knobs) -> None:
    """Refuse what pipeline schedules do not support."""
    if recipe.layout.pp == 1:
        return
    schedule, stage = str(api.knob_of(recipe, "pp", "schedule", "1f1b")), str(knobs["stage"])
    allowed = ["optimizer"] if pp.splits_backward(recipe) else ["parameters", "optimizer"]
    if stage not in allowed:
        raise RecipeError(
            f"technique fsdp: stage is {stage!r}, but pp's schedule {schedule} keeps unsharded gradients until the end of a step"
            f"{', and weights between its passes' if len(allowed) == 1 else ''}; allowed with it: {', '.join(allowed)}."
        )


technique = api.Technique(
    name="fsdp",
    summary=lambda knobs: (
        f"{knobs['stage']}, {ZERO[str(knobs['stage'])]}{', CPU offload' if knobs['offload'] else ''}"
    ),
    stage=api.Stage.SHARD,
    apply=apply,
    requires=(
        api.enabled_by_layout("fsdp"),
        api.Requirement(
            "param_dtype casts fp32 weights to bf16 when they are gathered; remove techniques that change their dtype (amp_fp16, "
            "bf16_master, int8_base, pure_bf16, qlora), or leave it at same",
            lambda machine, recipe: (
                api.knob_of(recipe, "fsdp", "param_dtype", SAME) == SAME
                or not api.used(recipe, "amp_fp16", "bf16_master", "int8_base", "pure_bf16", "qlora")
            ),
        ),
        api.Requirement(
            "prefetch counts blocks, so above 1 it needs unit block; set unit to block, or prefetch to 1",
            lambda machine, recipe: (
                api.knob_of(recipe, "fsdp", "prefetch", 1) == 1
                or api.knob_of(recipe, "fsdp", "unit", "block") == "block"
            ),
        ),
        api.Requirement(
            "with offload the update runs on the host, where our kernels do not; remove adam8bit and fused_update "
            "(fused_adamw works), or set offload to false",
            lambda machine, recipe: (
                not api.knob_of(recipe, "fsdp", "offload", False)
                or not api.used(recipe, "adam8bit", "fused_update")
            ),
        ),
        api.Requirement(
            "weights are gathered between blocks, which a graph of the whole model does not allow; use compile "
            "with scope block, and fsdp with unit block",
            lambda machine, recipe: (
                not api.used(recipe, "compile")
                or (
                    api.knob_of(recipe, "compile", "scope", "model") == "block"
                    and api.knob_of(recipe, "fsdp", "unit", "block") == "block"
                )
            ),
        ),
    ),
    conflicts=("cuda_graph", "fused_projections"),
    reasons={
        **api.NO_CUDA_GRAPH,
        "fused_projections": "it needs its weights in one contiguous buffer, and each weight is gathered into its own; joining them would "
        "be the copy that it saves",
    },
    check_sizes=check_sizes,
    knobs={
        "stage": api.KnobRange(
            ("parameters", "gradients", "optimizer"),
            "what is sharded during a step: parameters too (ZeRO-3), gradients and optimizer state (ZeRO-2), or the latter "
            "only (ZeRO-1)",
            fsdp_evidence.stage_seen,
        ),
        "unit": api.KnobRange(("block", "model"), "what is gathered at once", fsdp_evidence.unit_seen),
        "prefetch": api.KnobRange((1, 2, 4), "blocks that are prefetched", fsdp_evidence.prefetch_seen),
        "param_dtype": api.KnobRange(
            (SAME, "bfloat16"),
            "dtype in which fp32 weights are gathered and computed with; shards stay fp32",
            fsdp_evidence.param_dtype_seen,
        ),
        "reduce_dtype": api.KnobRange(
            (SAME, "float32", "bfloat16"),
            "dtype in which gradients are reduced",
            fsdp_evidence.reduce_dtype_seen,
        ),
        "offload": api.KnobRange(
            (False, True),
            "shards of weights, gradients and moments in host memory, where the update runs",
            fsdp_evidence.offload_seen,
        ),
    },
    claim=api.Claim(
        "model state bytes per rank",
        -0.98,
        regime="ZeRO-3 on 64 ranks: 16 bytes a parameter become 16/64",
        source="Rajbhandari et al. 2019, arXiv:1910.02054, figure 1",
        of_memory=True,
    ),
    parity=api.Parity.CLOSE,
    evidence=fsdp_evidence.evidence,
    memory=(
        api.MemoryEffect("parameters", 0.5, "divided by layout.fsdp, and one or two blocks in full"),
        api.MemoryEffect("gradients", 0.5, "divided by layout.fsdp; unsharded with stage = optimizer"),
        api.MemoryEffect("optimizer", 0.5, "divided by layout.fsdp"),
        api.MemoryEffect(
            "gathered",
            0.0,
            "with stages gradients and optimizer all weights stay gathered until the backward pass",
            by_knob=lambda knobs: float(knobs["stage"] != "parameters" or knobs["unit"] == "model"),
        ),
        *(
            api.MemoryEffect(
                term,
                1.0,
                "2 bytes with param_dtype = bfloat16",
                size=2,
                when=lambda knobs: knobs["param_dtype"] == "bfloat16",
            )
            for term in ("gathered", "stream", "compute")
        ),
        api.MemoryEffect(
            "on_host",
            1.0,
            "with offload: weights, gradients and moments of this rank",
            when=lambda knobs: bool(knobs["offload"]),
        ),
        api.MemoryEffect(
            "unsharded_gradients",
            0.0,
            "with stage optimizer",
            by_knob=lambda knobs: float(knobs["stage"] == "optimizer" or knobs["unit"] == "model"),
        ),
    ),
    settings=(),
)
