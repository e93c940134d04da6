"""Tensor parallelism: every layer is cut, and each rank computes its part of it for the same samples.

The layers that read the residual stream are cut by outputs (whole heads, part of the MLP's width), those that write to it
by inputs; so a block needs one exchange where attention and MLP begin and one where they end. Embedding, head and loss
are cut by words: the logits of all words exist on no rank. With `sequence`, what lies between (stream and norms) is cut
along the sequence: a gather and a scatter take the place of each sum, with as many bytes, and nothing is kept twice.
Weights, gradients, optimizer state and activations shrink to about 1/n, and so does the time of a large layer. The
exchanges wait for nothing and nothing can hide them: it wins inside a machine with fast links, where a model or its
micro batch does not fit or fsdp would leave too little for each rank; across slow links it loses to everything else.
Beside fsdp each rank's part is cut once more, and beside ddp torch's fully_shard keeps the copies equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, prod
from typing import Any

from torch import nn

from rush.errors import RecipeError
from rush.models.adapters import adapters
from rush.recipe import Knob, Recipe
from rush.techniques.api.contract import (
    NO_CUDA_GRAPH,
    Build,
    Claim,
    KnobRange,
    MemoryEffect,
    Observation,
    Parity,
    Proof,
    Stage,
    Technique,
    enabled_by_layout,
    knob_of,
    used,
)

READERS = ("q", "k", "v", "qkv", "mlp_gate", "mlp_up")
"""Roles of the layers that read the stream; the others write to it."""
PASS = "rush::forward"
IN_CODES = (
    "codes are stored without rows and columns that could be dealt out; lora stands beside tp, and a base in codes beside "
    "ddp, fsdp and pp"
)
GATHER, SCATTER, SUM = (
    f"_c10d_functional::{name}" for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
)


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

    from rush.parallel.tensor_parallel import (
        ColwiseLinear,
        GatherInput,
        ReplicatedOnStream,
        ResidualStream,
        RowwiseLinear,
        VocabParallelEmbedding,
    )

    assert build.ranks.mesh is not None
    mesh, model = build.ranks.mesh["tp"], build.model
    stream = ResidualStream(mesh, bool(knobs["sequence"]))
    whole, lying = Replicate(), stream.placement
    plan: dict[str, ParallelStyle] = {
        "embedding": VocabParallelEmbedding(stream),
        "position_embedding": ReplicatedOnStream(stream, takes_positions=True),
        "blocks.*.attention_norm": ReplicatedOnStream(stream),
        "blocks.*.attention": GatherInput(stream),
        "blocks.*.mlp_norm": ReplicatedOnStream(stream),
        "blocks.*.mlp": GatherInput(stream),
        "final_norm": ReplicatedOnStream(stream),
        "head": ColwiseParallel(input_layouts=lying, output_layouts=whole),
    }
    for role, path in model.block_linears.items():
        # Queries, keys and values of GPT-2 are one layer, and each rank has its heads of each.
        layer = ColwiseLinear(parts=3 if role == "qkv" else 1) if role in READERS else RowwiseLinear(stream)
        plan[f"blocks.*.{path}"] = layer
    there = {name for name, _ in model.named_children()}
    plan = {name: style for name, style in plan.items() if name.split(".")[0] in there}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    model.tie_head()
    _divide_loss(build, stream)
    build.facts["tp"] = {"ranks": build.ranks.size("tp"), "model": model, "stages": build.stages}


def _divide_loss(build: Build, stream: Any) -> None:
    """A loss over all words, of which each rank has some: by the head itself if it knows how (`over`), else by torch."""
    from torch.distributed.tensor.parallel import loss_parallel

    from rush.parallel.tensor_parallel import VocabParallelLossHead, VocabShardLossHead, vocab_shard

    model, vocabulary = build.model, build.model.shape.vocab_size
    first, count = vocab_shard(stream, vocabulary)
    # As wide as the head's products are here.
    build.facts["padded_vocab_size"] = count
    head: Any = model.loss_head
    if hasattr(head, "over"):
        of_own_words = head.over(first, vocabulary, stream.mesh.size(), stream.mesh.get_group().group_name)
        model.loss_head = VocabShardLossHead(stream, of_own_words)
        build.facts["padded_vocab_size"] = head.width(count)
    else:
        model.loss_head = VocabParallelLossHead(stream, head)
        # The backward pass of the loss belongs inside as well.
        build.step_contexts.append(loss_parallel)


def check_sizes(recipe: Recipe, knobs: Mapping[str, Knob]) -> None:
    """Refuse sizes that cannot be cut."""
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
                f"heads, keys and values among them, and an equal part of the MLP. Allowed: {legal}."
            )
    if (ranks - 1) * -(-shape.vocab_size // ranks) >= shape.vocab_size:
        raise RecipeError(
            f"layout.tp is {ranks}, which leaves a rank without any of the {shape.vocab_size} words of the vocabulary; take "
            "fewer ranks or a larger vocabulary."
        )
    pieces = ranks * recipe.layout.cp
    if cut and recipe.batch.sequence % pieces:
        below = recipe.batch.sequence // pieces * pieces
        legal = f"{below:,} or {below + pieces:,}" if below else f"{pieces:,}"
        raise RecipeError(
            f"batch.sequence is {recipe.batch.sequence}, which cannot be cut into {pieces} equal pieces for layout.tp × "
            f'layout.cp; the nearest allowed: {legal}. Or leave the stream whole: {{name = "tp", sequence = false}}.'
        )
    for packing in ("bucket", "pad"):
        shapes = int(knob_of(recipe, packing, "shapes", 0))
        if cut and used(recipe, packing) and (shapes == 0 or recipe.batch.sequence % (shapes * pieces)):
            legal = ", ".join(
                str(n) for n in (1, 2, 4, 8, 16, 32) if recipe.batch.sequence % (n * pieces) == 0
            )
            raise RecipeError(
                f"technique {packing}: shapes is {shapes}, with which rows have lengths that {pieces} ranks cannot cut into equal "
                f'pieces; allowed here: {legal}. Or leave the stream whole: {{name = "tp", sequence = false}}.'
            )
    if used(recipe, "compile") and knob_of(recipe, "compile", "scope", "model") != "block":
        raise RecipeError(
            "technique compile: scope is 'model', but beside layout.tp embedding and loss are torch's own distributed "
            "operators, which stay outside of a graph; the only allowed value is 'block'."
        )


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """This rank holds its part of the blocks' matrices; its matrix products are about 1/n of those of whole layers (a third
    more, where all is recomputed); and the profile shows at least four exchanges of the stream for each block and pass:
    gathers and scatters with `sequence`, sums without."""
    if "tp" not in seen.facts:
        return Proof(False, "no layer is cut")
    from rush.parallel.sharded import local_tensor

    ranks, model, stages = (seen.facts["tp"][key] for key in ("ranks", "model", "stages"))
    layers: list[Any] = [module for module in model.modules() if isinstance(module, nn.Linear)]
    weights = sum(layer._parameters["weight"].numel() for layer in layers)
    # (Of an adapter one of two thin matrices is whole on every rank.)
    matrices = [p for name, p in model.blocks.named_parameters() if p.dim() > 1 and ".adapter." not in name]
    held = sum(local_tensor(p).numel() for p in matrices) / sum(p.numel() for p in matrices)
    # A token is multiplied with each weight once forward and twice backward.
    tokens = seen.facts["micro_tokens"] * seen.facts["loader_micro_batches"]
    # (Products with an adapter's rank are not the layers'; up to three adapters of one input share one. A layer's part may be
    # as narrow, and is known by both of its sides.)
    thin = {n * adapter.spec.rank for _, _, adapter in adapters(model) for n in (1, 2, 3)}
    parts = {tuple(sorted(local_tensor(layer._parameters["weight"]).shape)) for layer in layers}
    products = [
        prod(dims) * count
        for dims, count in seen.matmul_shapes.items()
        if not thin & set(dims) or _without(dims, seen.facts["micro_tokens"]) in parts
    ]
    share = sum(products) / (3 * weights * tokens)
    calls = max(1, seen.ops.get(PASS, 0) * len(model.blocks) / (len(stages) or 1))
    found = {
        name: sum(count for op, count in seen.ops.items() if op.startswith(name)) / calls
        for name in (GATHER, SCATTER, SUM)
    }
    exchanged = (
        found[GATHER] >= 4 <= found[SCATTER] if knobs["sequence"] else found[SUM] >= 4 > found[SCATTER]
    )
    return Proof(
        held < 1.01 / ranks and 0 < share < 1.4 / ranks and exchanged,
        f"this rank holds {held:.0%} of the blocks' matrices; its products are {share:.0%} of those of whole layers; "
        f"{found[GATHER]:.1f} gathers, {found[SCATTER]:.1f} scatters and {found[SUM]:.1f} sums for each block and pass",
    )


def _without(dims: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """The sides of the weight in a product with so many tokens."""
    place = dims.index(tokens) if tokens in dims else len(dims)
    return tuple(sorted((*dims[:place], *dims[place + 1 :])))


technique = Technique(
    name="tp",
    stage=Stage.TENSOR,
    apply=apply,
    check_sizes=check_sizes,
    requires=(enabled_by_layout("tp"),),
    conflicts=("cuda_graph", "fused_bias", "fused_projections", "int8_base", "liger", "qlora", "vocab_pad"),
    reasons={
        **NO_CUDA_GRAPH,
        "fused_bias": "it takes the outputs of layers whole, and each rank has a part of them",
        "fused_projections": "it multiplies with weights that lie one below another in memory, and each rank's part of a weight "
        "has a place of its own",
        "int8_base": IN_CODES,
        "liger": "the library's loss takes a whole head; fused_loss, fused_mlp, fused_norm and fused_rope take a rank's part",
        "qlora": IN_CODES,
        "vocab_pad": "ranks have parts of the vocabulary, each of its own width; fused_loss pads a rank's own words",
    },
    knobs={
        "sequence": KnobRange(
            (True, False), "between layers each rank has its piece of the sequence, instead of all of it"
        ),
    },
    claim=Claim(
        "arithmetic per second",
        5.2,
        regime="from 1 to 8 GPUs of one machine, models that grow with them up to 8.3B: 77 % of linear",
        source="Shoeybi et al. 2019, arXiv:1909.08053; the sequence cut: Korthikanti et al. 2022, arXiv:2205.05198",
    ),
    parity=Parity.CLOSE,
    evidence=evidence,
    memory=(
        MemoryEffect("parameters", 0.5, "divided by layout.tp"),
        MemoryEffect("gradients", 0.5, "divided by layout.tp"),
        MemoryEffect("optimizer", 0.5, "divided by layout.tp"),
        MemoryEffect(
            "activations",
            0.5,
            "divided by layout.tp; with sequence = false the stream and its norms stay whole",
        ),
        MemoryEffect("scores", 0.5, "divided by layout.tp: each rank has its heads"),
        MemoryEffect("logits", 0.5, "divided by layout.tp: each rank has its words"),
    ),
    settings=(),
)
