"""Context parallelism: every sequence is sharded among ranks.

A long sequence fills a device by its activations alone, and no other axis shards them along it. Here each
rank holds all layers and a shard of the positions: activations, logits and FLOPs of a layer shrink by the
number of ranks. Only attention mixes positions, so keys and values are communicated in each block: gathered
("all_gather": one collective, the model's own attention kernel, and a row's keys and values on every rank) or
sent around a ring ("ring": the next shard is in flight while one is computed, outputs are merged by their
log-sum-exp). Under a causal mask a rank gets one chunk of the head and one of the tail, so that all do the
same work. Position ids stay those of the whole row, packed documents stay isolated across shards, gradients
are reduced together with those of the data ranks. It wins where one sample does not fit, and loses where it
does: ddp and fsdp communicate less. torch's context_parallel supports its CUDA operators only, no documents,
and patches a function of the whole process; so this uses torch's collectives and the existing kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import rush.techniques.api.contract as api
from rush.data import Batch
from rush.data.batch import IGNORED
from rush.errors import RecipeError
from rush.models import Decoder, Shape
from rush.models.layers import PLAIN_FORM, DocumentIds
from rush.parallel.context_parallel import AllGatherAttention, ChunkDocuments, SequenceSplit
from rush.recipe import Recipe
from rush.techniques.api.seams import set_attention_core, to_autocast_dtype
from rush.techniques.parallel import ddp

KERNELS = {"flash_attention": "flash on", "cudnn_attention": "cudnn", "triton_attention": "triton"}
GATHER, SEND, RING = "_c10d_functional::all_gather_into_tensor", "c10d::send", "rush::ring_attention_forward"
PASS = "rush::forward"


class RingCore(nn.Module):
    """Ring attention: keys and values travel around the ranks."""

    def __init__(self, kernel: str, group: str, balanced: bool) -> None:
        super().__init__()
        self.kernel, self.group, self.balanced = kernel, group, balanced

    def forward(
        self,
        q_bhtd: Tensor,
        k_bktd: Tensor,
        v_bktd: Tensor,
        *,
        documents: Tensor | None = None,
        query_offset: int = 0,
    ) -> Tensor:
        from rush.parallel.ring_attention import ring_attention

        assert query_offset == 0, "decoding with a cache uses the plain core"
        return ring_attention(
            *to_autocast_dtype(q_bhtd, k_bktd, v_bktd),
            documents_bs=documents,
            kernel=self.kernel,
            group=self.group,
            balanced=self.balanced,
        )


@dataclass
class BatchShard:
    """Takes a rank's shard of micro batches, and records their lengths."""

    split: SequenceSplit
    model: Decoder
    reduces_gradients: bool = False
    """Whether gradients are reduced over these ranks alone, without another data axis."""
    lengths: set[int] = field(default_factory=set)
    """Lengths of whole rows."""
    gaps: set[bool] = field(default_factory=set)
    """Whether the positions that it took have a gap: a chunk of the head and one of the tail."""
    filled: int = 0
    """Padding positions added so that rows divide."""

    def __call__(self, batch: Batch) -> Batch:
        batch = self._padded(batch)
        length = batch.tokens_bt.shape[1]
        self.lengths.add(length)
        positions_bt = batch.positions_bt
        if positions_bt is None:
            positions_bt = torch.arange(length).expand(batch.tokens_bt.shape)
        taken_t = self.split.take(torch.arange(length)[None])[0]
        self.gaps.add(bool((taken_t.diff() != 1).any()))
        each, rest = divmod(batch.padding, self.split.ranks)
        part = replace(
            batch,
            tokens_bt=self.split.take(batch.tokens_bt),
            labels_bt=self.split.take(batch.labels_bt),
            positions_bt=self.split.take(positions_bt),
            # Per rank an estimate; the sum over ranks is exact.
            padding=each + (self.split.rank < rest),
        )
        return part.pin() if batch.tokens_bt.is_pinned() else part

    def cores(self) -> list[nn.Module]:
        """The attention cores of the model's blocks."""
        return [block.get_submodule("attention").get_submodule("core") for block in self.model.blocks]

    def _padded(self, batch: Batch) -> Batch:
        """Pad rows to a whole number of chunks with positions without a label."""
        rows, length = batch.tokens_bt.shape
        missing = -length % self.split.num_chunks
        if not missing:
            return batch
        assert batch.documents_bt is None, "rows of packed documents have one length, which divides"
        self.filled += rows * missing
        return replace(
            batch,
            tokens_bt=pad(batch.tokens_bt, (0, missing)),
            labels_bt=pad(batch.labels_bt, (0, missing), value=IGNORED),
            padding=batch.padding + rows * missing,
        )


def apply(build: api.Build, knobs: api.Knobs) -> None:
    mesh, model = build.ranks.mesh_with_cp("cp"), build.model
    group, balanced = mesh.get_group().group_name, bool(knobs["balance"])
    split = SequenceSplit(mesh.size(), mesh.get_local_rank(), balanced)
    if knobs["exchange"] == "ring":
        kernel = next((KERNELS[name] for name in KERNELS if api.used(build.recipe, name)), "plain")
        kernel = f"{kernel} {build.device.type}" if kernel == "flash on" else kernel
        if kernel == "triton":
            import_module("rush.kernels.flash_attention")  # registers its operators
        set_attention_core(model, lambda form: RingCore(kernel, group, balanced), DocumentIds())
    else:
        for block in model.blocks:
            attention = block.get_submodule("attention")
            attention.core = AllGatherAttention(attention.get_submodule("core"), split, group)
        model.document_form = ChunkDocuments(model.document_form, split)
    shard = BatchShard(split, model, reduces_gradients=build.ranks.data_ranks == 1)
    build.shard_batch = build.facts.note(shard)
    if shard.reduces_gradients:
        plain = {name: knob.default for name, knob in ddp.technique.knobs.items()}
        build.shard_hooks.append(lambda build: ddp.replicate(build, plain))


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """A layer's matmuls have a rank's shard of the positions as rows. Without another data axis, gradients were reduced
    as in `ddp`."""
    cut = seen.facts.noted(BatchShard)
    if cut is None or not cut.lengths:
        return api.Proof(False, "no sequence was sharded")
    split, rows = cut.split, seen.pass_tokens
    summed = (
        ddp.evidence(seen, {})
        if cut.reduces_gradients
        else api.Proof(True, "gradients are reduced with the data ranks'")
    )
    longest = max(cut.lengths)
    held = [f"rank {rank} has {_listed(split.chunks_of(rank))}" for rank in range(split.ranks)]
    pairs = _listed(split.pairs(rank, longest) for rank in range(split.ranks))
    return api.Proof(
        any(rows in shape for shape in seen.matmul_shapes) and summed.took_effect,
        f"rows of {longest} positions in {split.num_chunks} chunks: {'; '.join(held)}; pairs attended to: {pairs}; layers with "
        f"{rows} tokens; {cut.filled} positions of padding; {summed.what}",
    )


def _exchange_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """In every pass the profile shows the collectives asked for: all-gathers, or the ring's operator with its sends."""
    cut, passes = seen.facts.noted(BatchShard), max(1, seen.ops.get(PASS, 0))
    gathers, sends, rings = (seen.ops.get(name, 0) / passes for name in (GATHER, SEND, RING))
    if knobs["exchange"] == "ring":
        exchanged = cut is not None and rings >= 1 and sends >= rings * (cut.split.ranks - 1)
    else:
        exchanged = gathers >= 1 and not rings
    return api.Proof(
        exchanged,
        f"{gathers:g} all-gathers, {rings:g} calls of ring attention and {sends:g} sends per pass",
    )


def _balance_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The positions that this rank took of its batches are a chunk of the head and one of the tail, or contiguous, and
    attention assumed the same."""
    cut = seen.facts.noted(BatchShard)
    gaps = cut.gaps if cut is not None else set()
    # (Of two ranks with two chunks each, the second has the two in the middle.)
    middle = cut is not None and cut.split.ranks - 1 == cut.split.rank
    assumed = {_assumes_balance(core) for core in cut.cores()} if cut is not None else set()
    return api.Proof(
        cut is not None and gaps == {bool(knobs["balance"]) and not middle} and assumed == {knobs["balance"]},
        f"the positions of this rank {'have a gap' if True in gaps else 'are contiguous'}; attention assumes "
        f"{'head and tail' if True in assumed else 'contiguous shards'}",
    )


def _assumes_balance(core: Any) -> bool:
    return bool(core.balanced if isinstance(core, RingCore) else core.split.balanced)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)


def check_sizes(recipe: Recipe, knobs: api.Knobs) -> None:
    """Refuse a sequence that is not a whole number of chunks, and preferences."""
    if recipe.objective.kind == "dpo":
        raise RecipeError(
            f"objective.kind is dpo and layout.cp is {recipe.layout.cp}; a preference compares whole answers, which cp would "
            "shard. The only allowed size is 1."
        )
    chunks = recipe.layout.cp * (2 if knobs["balance"] else 1)
    sequence = recipe.batch.sequence
    if sequence % chunks:
        legal = [size for size in (sequence // chunks * chunks, -(-sequence // chunks) * chunks) if size]
        raise RecipeError(
            f"batch.sequence is {sequence}, which layout.cp = {recipe.layout.cp} does not divide into {chunks} equal chunks"
            f"{' (a head and a tail for each rank)' if knobs['balance'] else ''}; allowed are multiples of {chunks}, such as "
            f"{' and '.join(map(str, legal))}."
        )


def any_form(shape: Shape) -> bool:
    """Whether layers attend in another way than causally with the usual scale."""
    return any(shape.attention_form(layer) != PLAIN_FORM for layer in range(shape.num_layers))


def _ring(recipe: Recipe) -> bool:
    return api.knob_of(recipe, "cp", "exchange", "all_gather") == "ring"


technique = api.Technique(
    name="cp",
    stage=api.Stage.TENSOR,
    after=("tp",),
    apply=apply,
    requires=(
        api.enabled_by_layout("cp"),
        api.Requirement(
            "cudnn_attention and triton_attention need as many queries as keys, which gathered keys do not have; set "
            "exchange = ring, or use flash_attention",
            lambda machine, recipe: (
                _ring(recipe) or not api.used(recipe, "cudnn_attention", "triton_attention")
            ),
        ),
        api.Requirement(
            "ring attention has no windows, no soft cap of scores and no scale of its own, which this model has; set exchange = "
            "all_gather",
            lambda machine, recipe: not _ring(recipe) or not any_form(recipe.shape()),
        ),
        api.Requirement(
            "the model's RoPE (LongRoPE) depends on the length of the whole row, and a rank sees a part of it; use fsdp or tp",
            lambda machine, recipe: recipe.shape().rope_switch is None,
        ),
        api.Requirement(
            "on a GPU the kernels of ring attention do not support packed documents; set exchange = all_gather, with "
            "flash_attention or without it",
            lambda machine, recipe: (
                not _ring(recipe)
                or not api.used(recipe, "flatten", "pack_best_fit")
                or not (
                    api.used(recipe, "triton_attention")
                    or (machine.device == "cuda" and api.used(recipe, "flash_attention"))
                )
            ),
        ),
    ),
    conflicts=("cpu_attention", "cuda_graph", "flex_attention"),
    reasons={
        **api.NO_CUDA_GRAPH,
        "cpu_attention": "its queries start where the keys do, and a rank's queries are in the middle of them; use flash_attention",
        "flex_attention": "its mask is for queries that start where the keys do, and a rank's queries are in the middle of them; "
        "use flash_attention",
    },
    check_sizes=check_sizes,
    knobs={
        "exchange": api.KnobRange(
            ("all_gather", "ring"),
            "all-gather keys and values on every rank, or ring attention",
            _exchange_seen,
        ),
        "balance": api.KnobRange(
            (True, False),
            "one chunk of the head and one of the tail on each rank, instead of contiguous positions",
            _balance_seen,
        ),
    },
    claim=api.Claim(
        "model FLOPs per second and device",
        -0.05,
        regime="Llama 3 405B on 16,384 H100: 131,072 positions on 16 ranks each, against 8,192 on one",
        source="Grattafiori et al. 2024, arXiv:2407.21783, table 4",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=(
        api.MemoryEffect("activations", 0.5, "divided by layout.cp"),
        api.MemoryEffect("scores", 0.5, "divided by layout.cp"),
        api.MemoryEffect("logits", 0.5, "divided by layout.cp"),
    ),
    settings=(),
)
