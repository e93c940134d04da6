"""Pipeline parallelism: the model is split across its depth, each rank keeps some of the blocks.

A rank computes its blocks and sends the hidden states to the next one; gradients come back the same way.
Little is sent, between two ranks at a time, so it is the axis for slow links: between nodes. The price is the
bubble: the last rank idles until the first micro batch arrives, and at the end the first idles until
gradients return. With p ranks and m micro batches it is (p - 1) / (m + p - 1) of a step. Many micro batches
make it small. Several stages per rank (`interleaved`) make it smaller: m becomes stages × m, for as much more
communication. Zero bubble schedules move weight gradients, which no other rank needs, into the bubble. Each
rank holds weights, gradients and moments of its stages only; 1F1B holds activations of as many micro batches
as there are ranks, GPipe of all. It loses where the model fits without it, and where a step has few micro
batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

import rush.techniques.api.contract as api
from rush.data import Batch
from rush.errors import RecipeError
from rush.models.pipeline_stages import keep, split
from rush.parallel.pipeline import SCHEDULES, Pipeline, PipelineSchedule, add_peer_gradient
from rush.recipe import Recipe
from rush.techniques.api.facts import PpFacts

FORWARD = "rush::forward"
SENDS = ("c10d::send", "nccl:send")
RECEIVES = ("c10d::recv_", "nccl:recv")
TIED = "embedding.weight"


def stages_per_rank(knobs: api.Knobs) -> int:
    return int(knobs["stages"]) or SCHEDULES[str(knobs["schedule"])].min_stages


def check_sizes(recipe: Recipe, knobs: api.Knobs) -> None:
    """Refuse more stages than blocks, stages that the schedule does not support, and too few micro batches."""
    kind, ranks, each = SCHEDULES[str(knobs["schedule"])], recipe.layout.pp, stages_per_rank(knobs)
    if not kind.min_stages <= each <= kind.max_stages:
        allowed = (
            str(kind.min_stages)
            if kind.min_stages == kind.max_stages
            else f"{kind.min_stages} to {kind.max_stages}"
        )
        raise RecipeError(
            f"technique pp: stages is {each}, but schedule {kind.name} takes {allowed} on each rank; change one of them."
        )
    _check_ends(recipe, kind)
    layers = recipe.shape().num_layers
    if ranks * each > layers:
        most = [p for p in range(1, layers + 1) if p * each <= layers]
        raise RecipeError(
            f"layout.pp is {ranks} with {each} stage{'s' * (each > 1)} on each rank, which takes {ranks * each} blocks, but "
            f"{recipe.model.name} has {layers}; "
            + (f"layout.pp can be 1 to {most[-1]}." if most else f"stages can be at most {layers}.")
        )
    parts = int(api.knob_of(recipe, "accumulate", "factor", 2)) if api.used(recipe, "accumulate") else 1
    for accumulation in recipe.accumulations:
        _check_micro_batches(recipe, kind, accumulation * parts, parts)


def _check_micro_batches(recipe: Recipe, kind: PipelineSchedule, found: int, parts: int) -> None:
    ranks = recipe.layout.pp
    if not kind.takes(found, ranks):
        legal = [n for n in range(1, 4 * (found + ranks)) if n % parts == 0 and kind.takes(n, ranks)]
        near = [str(n) for n in sorted(sorted(legal, key=lambda n: abs(n - found))[:3])]
        tokens = recipe.micro * recipe.batch.sequence * recipe.data_ranks // parts
        key = "batch.total_tokens" if found == recipe.accumulation * parts else "the tokens in batch.schedule"
        raise RecipeError(
            f"a step has {found} micro batches, with which schedule {kind.name} cannot run on layout.pp={ranks}; the nearest "
            f"allowed: {', '.join(near)}. Set {key} to that many times {tokens:,}, or use schedule "
            "gpipe, which runs with any."
        )


def _check_ends(recipe: Recipe, kind: PipelineSchedule) -> None:
    """Refuse a tied embedding in two stages of one rank that are reduced with other ranks."""
    layout = recipe.layout
    together = not kind.looped and recipe.shape().tied_head
    if together and layout.ddp * layout.fsdp * layout.cp > 1:
        raise RecipeError(
            f"technique pp: schedule {kind.name} has the first and the last stage on one rank, where a tied embedding would be "
            "reduced twice; with layout.ddp, fsdp or cp use another schedule, or a model whose head is not tied."
        )


def apply(build: api.Build, knobs: api.Knobs) -> None:
    mesh, recipe = build.ranks.mesh, build.recipe
    assert mesh is not None
    kind, size, rank = (
        SCHEDULES[str(knobs["schedule"])],
        build.ranks.size("pp"),
        int(mesh.get_local_rank("pp")),
    )
    num_stages = size * stages_per_rank(knobs)
    spans = split(recipe.shape(), num_stages, recipe.batch.sequence, str(knobs["balance"]))
    rank_of = kind.stage_ranks(size, num_stages)
    parts = keep(build.model, [span for span in spans if rank_of[span.number] == rank])
    build.stages.extend(parts)
    apart = recipe.shape().tied_head and rank_of[0] != rank_of[-1]
    peer = {rank_of[0]: rank_of[-1], rank_of[-1]: rank_of[0]}.get(rank) if apart else None
    if peer is not None and rank == rank_of[-1]:
        build.tied_replicas.append(TIED)
    build.facts.pp = PpFacts(
        split=[f"rank {rank_of[span.number]}: {span}" for span in spans],
        blocks=[layer for part in parts for layer in range(part.span.start, part.span.end)],
        num_layers=recipe.shape().num_layers,
        sequence=recipe.batch.sequence,
    )

    # Hidden states are sent as they are between blocks: sequence parallelism may have sharded them.
    pieces = build.ranks.size("tp") if api.knob_of(recipe, "tp", "sequence", True) else 1

    def made(run: Any, modules: Sequence[nn.Module]) -> Pipelined:
        return Pipelined(run, kind, parts, modules, num_stages, build.weight_dtype, pieces, peer)

    build.make_passes = made


@dataclass
class Pipelined:
    """Runs the micro batches of a step in the order of a schedule, with the other ranks of the pipeline."""

    run: Any
    kind: PipelineSchedule
    parts: Sequence[Any]
    modules: Sequence[nn.Module]
    num_stages: int
    dtype: torch.dtype
    pieces: int
    """Sequence-parallel shards of a hidden state."""
    tied_with: int | None
    """The pipeline rank with the other replica of a tied embedding, if this one has one."""
    waiting: list[tuple[Batch, Tensor]] = field(default_factory=list)
    """Micro batches of this step with their loss scales."""

    def __post_init__(self) -> None:
        self.pipeline = Pipeline(
            self.kind,
            self.parts,
            self.modules,
            self.num_stages,
            self.run.ranks.mesh.get_group("pp"),
            self.run.device,
            self.run.model.shape.hidden,
            self.dtype,
            self._compute,
        )
        self.run.facts.pp.pipeline = self.pipeline
        self.run.set_innermost(self._wait)
        self.loss = torch.zeros((), device=self.run.device)

    def _wait(self, batch: Batch, loss_scale: Tensor) -> Tensor:
        self.waiting.append((batch, loss_scale))
        return torch.zeros((), device=self.run.device)

    def train(self, batches: Sequence[Batch], loss_scale: Tensor) -> Tensor:
        self.waiting.clear()
        self.loss = torch.zeros((), device=self.run.device)
        for batch in batches:
            self.loss += self.run.micro_pass(batch.to(self.run.device), loss_scale)
        self.pipeline.train(self.waiting, [self._shape(batch) for batch, _ in self.waiting])
        self._add_tied()
        # Only the last stage has the loss; on the others it is zero.
        loss: Tensor = self.run.ranks.all_reduce_stages(self.loss)
        return loss

    def evaluate(self, batches: Iterable[Batch]) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self.run.device)
        for batch in batches:
            self.loss = torch.zeros((), device=self.run.device)
            self.pipeline.evaluate((batch, torch.ones((), device=self.run.device)), self._shape(batch))
            total += self.loss
        return float(self.run.ranks.all_reduce_stages(total))

    def _compute(self, part: Any, given: tuple[Batch, Tensor], x_btd: Tensor | None) -> Tensor:
        batch, loss_scale = given
        with record_function(FORWARD), self.run.autocast():
            out: Tensor = self.run.objective.loss(partial(part.compute, x_btd), batch)
        if not part.span.is_last:
            return out
        self.loss += out.detach()
        return out * loss_scale

    def _shape(self, batch: Batch) -> tuple[int, int]:
        """Rows and positions of the hidden states of a batch."""
        rows, columns = batch.tokens_bt.shape
        return int(rows), int(columns) // self.pieces

    def _add_tied(self) -> None:
        """Sum the gradients of a tied embedding: one replica has that of the lookup, the other that of the head."""
        if self.tied_with is not None:
            add_peer_gradient(self.run.model.get_parameter(TIED), self.tied_with, self.pipeline.group)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """This rank computes some of the blocks only, and the profile shows hidden states or gradients sent and received, at
    least one per micro batch."""
    noted = seen.facts.pp
    if noted is None or noted.pipeline is None:
        return api.Proof(False, "the model is not split")
    own, layers, pipeline = noted.blocks, noted.num_layers, noted.pipeline
    sent, received = (_times(seen, names) for names in (SENDS, RECEIVES))
    micro_batches = seen.micro_batches / len(pipeline.stages)
    steps = seen.ops.get(FORWARD, 0) / max(1, seen.micro_batches)
    enough = steps > 0 and min(sent, received) >= steps * micro_batches
    return api.Proof(
        len(own) < layers and enough,
        f"this rank has blocks {', '.join(map(str, own))} of {layers}; {sent} sends and {received} receives for "
        f"{micro_batches:g} micro batches in {steps:g} step(s); the bubble of schedule {knobs['schedule']} is "
        f"{pipeline.bubble_fraction():.0%} of a step",
    )


def _schedule_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The schedule that runs the micro batches is torch's class of this name."""
    noted = seen.facts.pp
    found = type(noted.pipeline.schedule).__name__ if noted is not None and noted.pipeline is not None else ""
    return api.Proof(
        found == SCHEDULES[str(knobs["schedule"])].torch_class, f"torch's {found or 'schedule: none'}"
    )


def _stages_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """This rank runs so many stages, each with its own pass per micro batch in the profile."""
    noted = seen.facts.pp
    modules = noted.pipeline.modules if noted is not None and noted.pipeline is not None else []
    passes, given = seen.micro_batches, seen.loader_micro_batches
    return api.Proof(
        len(modules) == stages_per_rank(knobs)
        and passes % len(modules) == 0
        and passes >= given * len(modules),
        f"{len(modules)} stages on this rank; {passes} passes per step for {given} micro batches",
    )


def _balance_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The blocks of each stage are those of the split that is even by FLOPs, or by parameters."""
    noted = seen.facts.pp
    if noted is None or noted.pipeline is None:
        return api.Proof(False, "the model is not split")
    wanted = split(seen.shape, noted.pipeline.num_stages, noted.sequence, str(knobs["balance"]))
    held = {stage.span.number: (stage.span.start, len(stage.blocks)) for stage in noted.pipeline.stages}
    as_asked = all(
        held[span.number] == (span.start, span.end - span.start) for span in wanted if span.number in held
    )
    return api.Proof(as_asked, f"the split: {'; '.join(noted.split)}")


def _times(seen: api.Observation, names: Iterable[str]) -> int:
    return max(sum(count for op, count in seen.ops.items() if op.startswith(name)) for name in names)


def splits_backward(recipe: Recipe) -> bool:
    """Whether weight gradients are computed separately from the backward pass."""
    return (
        recipe.layout.pp > 1 and SCHEDULES[str(api.knob_of(recipe, "pp", "schedule", "1f1b"))].splits_backward
    )


technique = api.Technique(
    name="pp",
    summary=lambda knobs: f"{n} stages a rank" if (n := stages_per_rank(knobs)) > 1 else "",
    stage=api.Stage.TENSOR,
    after=("cp", "tp"),
    apply=apply,
    check_sizes=check_sizes,
    requires=(
        api.enabled_by_layout("pp"),
        api.Requirement(
            "a graph of the whole model cannot be split into stages; use compile with scope block",
            lambda machine, recipe: (
                not api.used(recipe, "compile") or api.knob_of(recipe, "compile", "scope", "model") == "block"
            ),
        ),
        api.Requirement(
            "a zero bubble schedule cannot split the backward pass of a compiled block; use 1f1b, gpipe or "
            "interleaved with compile",
            lambda machine, recipe: not (api.used(recipe, "compile") and splits_backward(recipe)),
        ),
        api.Requirement(
            "a zero bubble schedule runs a block's backward pass twice, which torch's selective checkpointing does not "
            "support; use checkpoint_full, or 1f1b, gpipe or interleaved",
            lambda machine, recipe: (
                not (api.used(recipe, "checkpoint_selective") and splits_backward(recipe))
            ),
        ),
    ),
    conflicts=("cuda_graph",),
    reasons=api.NO_CUDA_GRAPH,
    knobs={
        "schedule": api.KnobRange(
            tuple(SCHEDULES),
            "the schedule: 1f1b (one forward, one backward), gpipe (all forward first), interleaved "
            "(1f1b with several stages per rank), zero_bubble and zbv (weight gradients fill the bubble)",
            _schedule_seen,
        ),
        "stages": api.KnobRange(
            (0, 1, 2, 3, 4, 6, 8), "stages per rank; 0: as few as the schedule supports", _stages_seen
        ),
        "balance": api.KnobRange(
            ("flops", "parameters"),
            "what is balanced among stages: FLOPs per token, or parameters",
            _balance_seen,
        ),
    },
    claim=api.Claim(
        "tokens_per_s",
        0.10,
        regime="interleaved against plain 1F1B, GPT models on up to 3,072 A100",
        source="Narayanan et al. 2021, arXiv:2104.04473, abstract",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=(
        api.MemoryEffect(
            "parameters", 0.5, "divided by layout.pp; a tied embedding is on the first and the last rank"
        ),
        api.MemoryEffect("gradients", 0.5, "divided by layout.pp"),
        api.MemoryEffect("optimizer", 0.5, "divided by layout.pp"),
        api.MemoryEffect(
            "activations", 1.0, "1F1B: a layout.pp-th of the blocks, of layout.pp micro batches"
        ),
    ),
    settings=(),
)
