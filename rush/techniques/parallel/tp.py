"""Tensor parallelism: every layer is sharded, and all ranks compute the same samples.

Layers that read the residual stream are sharded by outputs (colwise: whole heads, a part of the MLP's width),
those that write to it by inputs (rowwise); so a block needs one collective before and one after attention and
MLP. Embedding, LM head and loss are vocab parallel: no rank has logits of the full vocabulary. Norms over all
queries of a token (OLMo 2) gather them first. With `sequence` (sequence parallelism) residual stream and norms
are sharded along the sequence: an all-gather and a reduce-scatter replace each all-reduce, with as many bytes,
and nothing is stored twice. Weights, gradients, optimizer state and activations shrink to about 1/n, and so
does the time of a large layer. The collectives cannot overlap: it wins within a node with fast links, where a
model or its micro batch does not fit or fsdp would leave too little for each rank; across slow links it loses
to everything else. With fsdp each shard is sharded once more, and with ddp torch's fully_shard keeps the
replicas equal.
"""

from __future__ import annotations

import re
from math import gcd, prod
from typing import Any

from torch import nn

import rush.techniques.api.contract as api
from rush.errors import RecipeError
from rush.models.adapters import adapters
from rush.recipe import Recipe
from rush.techniques.api.facts import TpFacts

READERS = ("q", "k", "v", "qkv", "mlp_gate", "mlp_up")
"""Roles of colwise layers, which read the residual stream; the others write to it (rowwise)."""
PASS = "rush::forward"
QUANTIZED = (
    "quantized weights have no rows and columns that could be sharded; use lora with tp, or a quantized base with ddp, "
    "fsdp and pp"
)
GATHER, SCATTER, SUM = (
    f"_c10d_functional::{name}" for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

    from rush.parallel.tensor_parallel import (
        ColwiseLinear,
        GatheredHeads,
        GatherInput,
        ReplicatedOnHeads,
        ReplicatedOnStream,
        ResidualStream,
        RowwiseLinear,
        VocabParallelEmbedding,
    )

    assert build.ranks.mesh is not None
    mesh, model = build.ranks.mesh["tp"], build.model
    stream = ResidualStream(mesh, bool(knobs["sequence"]))
    whole, lying = Replicate(), stream.placement
    on_heads = GatheredHeads() if model.shape.qk_norm == "width" else ReplicatedOnHeads()
    plan: dict[str, ParallelStyle] = {
        "embedding": VocabParallelEmbedding(stream),
        "position_embedding": ReplicatedOnStream(stream, takes_positions=True),
        "blocks.*.attention_norm": ReplicatedOnStream(stream),
        "blocks.*.attention": GatherInput(stream),
        "blocks.*.attention.q_norm": on_heads,
        "blocks.*.attention.k_norm": on_heads,
        "blocks.*.attention_post_norm": ReplicatedOnStream(stream),
        "blocks.*.mlp_post_norm": ReplicatedOnStream(stream),
        "blocks.*.mlp_norm": ReplicatedOnStream(stream),
        "blocks.*.mlp": GatherInput(stream),
        "final_norm": ReplicatedOnStream(stream),
        "head": ColwiseParallel(input_layouts=lying, output_layouts=whole),
    }
    for role, path in model.block_linears.items():
        # GPT-2's queries, keys and values are one layer; each rank has its heads of each.
        layer = ColwiseLinear(parts=3 if role == "qkv" else 1) if role in READERS else RowwiseLinear(stream)
        plan[f"blocks.*.{path}"] = layer
    there = {re.sub(r"^blocks\.\d+\.", "blocks.*.", name) for name, _ in model.named_modules()}
    plan = {name: style for name, style in plan.items() if name in there}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    model.tie_head()
    _shard_loss(build, stream)
    build.facts.tp = TpFacts(build.ranks.size("tp"), model, build.stages)


def _shard_loss(build: api.Build, stream: Any) -> None:
    """A vocab-parallel loss: by the head itself if it supports it (`over`), else by torch."""
    from torch.distributed.tensor.parallel import loss_parallel

    from rush.parallel.tensor_parallel import VocabParallelLossHead, VocabShardLossHead, vocab_shard

    model, vocabulary = build.model, build.model.shape.vocab_size
    first, count = vocab_shard(stream, vocabulary)
    # The width of the LM head's matmuls on this rank.
    build.facts.padded_vocab_size = count
    head: Any = model.loss_head
    if hasattr(head, "over"):
        of_shard = head.over(first, vocabulary, stream.mesh.size(), stream.mesh.get_group().group_name)
        model.loss_head = VocabShardLossHead(stream, of_shard)
        build.facts.padded_vocab_size = head.width(count)
    else:
        model.loss_head = VocabParallelLossHead(stream, head)
        # Also around the loss's backward pass.
        build.step_contexts.append(loss_parallel)


def check_sizes(recipe: Recipe, knobs: api.Knobs) -> None:
    """Refuse sizes that cannot be sharded."""
    ranks, shape, cut = recipe.layout.tp, recipe.shape(), bool(knobs["sequence"])
    if ranks == 1:
        return
    divided = {
        "heads": shape.num_heads,
        "key/value heads": shape.num_kv_heads,
        "MLP width": shape.intermediate,
    }
    for what, size in divided.items():
        if size % ranks:
            common = gcd(*divided.values())
            legal = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise RecipeError(
                f"layout.tp is {ranks}, which does not divide the {what} of {recipe.model.name}, {size}: each rank has whole "
                f"heads, also of keys and values, and an equal shard of the MLP. Allowed: {legal}."
            )
    if (ranks - 1) * -(-shape.vocab_size // ranks) >= shape.vocab_size:
        raise RecipeError(
            f"layout.tp is {ranks}, which leaves a rank with an empty vocab shard (vocabulary {shape.vocab_size}); use "
            "fewer ranks or a larger vocabulary."
        )
    pieces = ranks * recipe.layout.cp
    if cut and recipe.batch.sequence % pieces:
        below = recipe.batch.sequence // pieces * pieces
        legal = f"{below:,} or {below + pieces:,}" if below else f"{pieces:,}"
        raise RecipeError(
            f"batch.sequence is {recipe.batch.sequence}, which cannot be split into {pieces} equal shards for layout.tp × "
            f'layout.cp; the nearest allowed: {legal}. Or turn off sequence parallelism: {{name = "tp", sequence = false}}.'
        )
    for packing in ("bucket", "pad"):
        shapes = int(api.knob_of(recipe, packing, "shapes", 0))
        if cut and api.used(recipe, packing) and (shapes == 0 or recipe.batch.sequence % (shapes * pieces)):
            legal = ", ".join(
                str(n) for n in (1, 2, 4, 8, 16, 32) if recipe.batch.sequence % (n * pieces) == 0
            )
            raise RecipeError(
                f"technique {packing}: shapes is {shapes}, with which {pieces} ranks cannot split all row lengths into equal "
                f'shards; allowed here: {legal}. Or turn off sequence parallelism: {{name = "tp", sequence = false}}.'
            )
    if api.used(recipe, "compile") and api.knob_of(recipe, "compile", "scope", "model") != "block":
        raise RecipeError(
            "technique compile: scope is 'model', but with layout.tp embedding and loss are torch's distributed "
            "operators, which cannot be part of a graph; the only allowed value is 'block'."
        )


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """This rank holds its shard of the blocks' matrices, and its matmuls are about 1/n of those of whole layers (a third
    more with recomputation)."""
    noted = seen.facts.tp
    if noted is None:
        return api.Proof(False, "no layer is sharded")
    from rush.parallel.sharded import local_tensor

    ranks, model = noted.ranks, noted.model
    layers: list[Any] = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights = sum(layer._parameters["weight"].numel() for layer in layers)
    # (One of an adapter's two matrices is replicated.)
    matrices = [p for name, p in model.blocks.named_parameters() if p.dim() > 1 and ".adapter." not in name]
    held = sum(local_tensor(p).numel() for p in matrices) / sum(p.numel() for p in matrices)
    # One matmul forward and two backward per weight.
    tokens = seen.micro_tokens * seen.loader_micro_batches
    # (Without the adapters' matmuls; up to three adapters of one input share one. A layer's shard may be as narrow as an
    # adapter, and is identified by both dims.)
    thin = {n * adapter.spec.rank for _, _, adapter in adapters(model) for n in (1, 2, 3)}
    parts = {tuple(sorted(local_tensor(layer._parameters["weight"]).shape)) for layer in layers}
    products = [
        prod(dims) * count
        for dims, count in seen.matmul_shapes.items()
        if not thin & set(dims) or _without(dims, seen.micro_tokens) in parts
    ]
    share = sum(products) / (3 * weights * tokens)
    return api.Proof(
        held < 1.01 / ranks and 0 < share < 1.4 / ranks,
        f"this rank holds {held:.0%} of the blocks' matrices; its matmuls are {share:.0%} of those of whole layers",
    )


def _sequence_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The profile shows at least four collectives per block and pass: all-gathers and reduce-scatters with sequence
    parallelism, all-reduces without."""
    noted = seen.facts.tp
    if noted is None:
        return api.Proof(False, "no layer is sharded")
    calls = max(1, seen.ops.get(PASS, 0) * len(noted.model.blocks) / (len(noted.stages) or 1))
    found = {
        name: sum(count for op, count in seen.ops.items() if op.startswith(name)) / calls
        for name in (GATHER, SCATTER, SUM)
    }
    exchanged = (
        found[GATHER] >= 4 <= found[SCATTER] if knobs["sequence"] else found[SUM] >= 4 > found[SCATTER]
    )
    return api.Proof(
        exchanged,
        f"{found[GATHER]:.1f} all-gathers, {found[SCATTER]:.1f} reduce-scatters and {found[SUM]:.1f} all-reduces per block and "
        "pass",
    )


def _without(dims: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """The dims of the weight in a matmul with so many tokens."""
    place = dims.index(tokens) if tokens in dims else len(dims)
    return tuple(sorted((*dims[:place], *dims[place + 1 :])))


technique = api.Technique(
    name="tp",
    stage=api.Stage.TENSOR,
    apply=apply,
    check_sizes=check_sizes,
    requires=(api.enabled_by_layout("tp"),),
    conflicts=("cuda_graph", "fused_bias", "fused_projections", "int8_base", "liger", "qlora", "vocab_pad"),
    reasons={
        **api.NO_CUDA_GRAPH,
        "fused_bias": "it needs the full outputs of layers, and each rank has a shard of them",
        "fused_projections": "it needs its weights in one contiguous buffer, and each shard has its own",
        "int8_base": QUANTIZED,
        "liger": "the library's loss needs the whole LM head; fused_loss, fused_mlp, fused_norm and fused_rope support shards",
        "qlora": QUANTIZED,
        "vocab_pad": "each rank has a vocab shard; fused_loss pads it",
    },
    knobs={
        "sequence": api.KnobRange(
            (True, False),
            "sequence parallelism: residual stream and norms are sharded along the sequence",
            _sequence_seen,
        )
    },
    claim=api.Claim(
        "FLOP/s",
        5.2,
        regime="from 1 to 8 GPUs of one machine, models that grow with them up to 8.3B: 77 % of linear",
        source="Shoeybi et al. 2019, arXiv:1909.08053; sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=(
        api.MemoryEffect("parameters", 0.5, "divided by layout.tp"),
        api.MemoryEffect("gradients", 0.5, "divided by layout.tp"),
        api.MemoryEffect("optimizer", 0.5, "divided by layout.tp"),
        api.MemoryEffect(
            "activations",
            0.5,
            "divided by layout.tp; with sequence = false the residual stream and its norms are not",
        ),
        api.MemoryEffect("scores", 0.5, "divided by layout.tp: each rank has its heads"),
        api.MemoryEffect("logits", 0.5, "divided by layout.tp: vocab shards"),
    ),
    settings=(),
)
