"""Pipeline parallelism on torch.distributed.pipelining: schedules, stages of a rank, communication between stages.

A schedule gives the order of a rank's forward and backward passes and of its sends and receives. Stages send hidden states and
their gradients; everything else of a micro batch each rank reads for itself. A schedule has buffers of one size, so where
micro batches differ in size, hidden states are padded to the largest seen so far: then no step reallocates buffers.

Shapes: b batch, t position, d hidden, n tokens with padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rush.parallel.sharded import is_sharded, local_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Compute = Callable[[Any, Any, Tensor | None], Tensor]
"""(stage module, micro batch, received hidden state) -> hidden state; the last stage returns the loss."""


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule of torch.distributed.pipelining."""

    name: str
    torch_class: str
    min_stages: int
    max_stages: int
    """Stages per rank."""
    looped: bool = True
    """Whether stages are assigned round-robin; else in a V: the first rank has the first and the last."""
    splits_backward: bool = False
    """Whether weight gradients are computed apart from input gradients, to fill the bubble."""

    def stage_ranks(self, num_ranks: int, num_stages: int) -> list[int]:
        """The rank of each stage."""
        there_and_back = [*range(num_ranks), *reversed(range(num_ranks))]
        return [
            stage % num_ranks if self.looped else there_and_back[stage % (2 * num_ranks)]
            for stage in range(num_stages)
        ]

    def takes(self, micro_batches: int, num_ranks: int) -> bool:
        """Whether the schedule supports this number of micro batches per step."""
        if self.name == "1f1b":
            return micro_batches >= num_ranks
        if self.name in ("interleaved", "zero_bubble"):
            return micro_batches % max(1, micro_batches // num_ranks) == 0
        return micro_batches >= 1


SCHEDULES: Mapping[str, PipelineSchedule] = {
    kind.name: kind
    for kind in (
        PipelineSchedule("1f1b", "Schedule1F1B", 1, 1),
        PipelineSchedule("gpipe", "ScheduleGPipe", 1, 1),
        PipelineSchedule("interleaved", "ScheduleInterleaved1F1B", 2, 8),
        PipelineSchedule("zero_bubble", "ScheduleInterleavedZeroBubble", 1, 8, splits_backward=True),
        PipelineSchedule("zbv", "ScheduleZBVZeroBubble", 2, 2, looped=False, splits_backward=True),
    )
}


@dataclass
class Pipeline:
    """This rank's stages and their schedule."""

    kind: PipelineSchedule
    stages: Sequence[Any]
    """Modules with a `span` and a `call`, in order."""
    modules: Sequence[nn.Module]
    """The same, each wrapped (fsdp, ddp)."""
    num_stages: int
    group: ProcessGroup
    device: torch.device
    hidden: int
    dtype: torch.dtype
    compute: Compute
    schedule: Any = None
    _made_for: tuple[int, tuple[int, ...]] = (0, ())
    """Micro batches, and the shape that is sent: [b, t, d], or [n, d] where shapes differ."""
    _rank_of: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rank_of = self.kind.stage_ranks(self.group.size(), self.num_stages)
        self._comm_device = _comm_device(self.group, self.device)

    def train(self, items: Sequence[Any], shapes: Sequence[tuple[int, int]]) -> None:
        """Forward and backward of all micro batches; `shapes` are the [b, t] of their hidden states."""
        self._fit(shapes)
        for stage in self.stages:
            stage.call = self._calls(stage, iter(items), iter(shapes))
        # The loss is part of the last stage; the schedule's targets are placeholders.
        has_last = any(stage.span.is_last for stage in self.stages)
        self.schedule.step(target=torch.zeros(len(items)) if has_last else None, return_outputs=False)

    @torch.no_grad()
    def evaluate(self, item: Any, shape: tuple[int, int]) -> Tensor | None:
        """The forward pass of one micro batch; the last stage's output on its rank, None on others."""
        import torch.distributed as dist

        x_btd: Tensor | None = None
        for stage in self.stages:
            number, me = stage.span.number, self.group.rank()
            if number > 0 and self._rank_of[number - 1] != me:
                received = torch.empty(*shape, self.hidden, dtype=self.dtype, device=self._comm_device)
                dist.recv(received, group=self.group, group_src=self._rank_of[number - 1])
                x_btd = received.to(self.device)
            stage.call = lambda *arrived, stage=stage: self.compute(stage, item, *(arrived or (None,)))
            x_btd = stage(*([] if number == 0 else [x_btd]))
            if stage.span.is_last:
                return x_btd
            if self._rank_of[number + 1] != me:
                dist.send(
                    x_btd.to(self._comm_device).contiguous(),
                    group=self.group,
                    group_dst=self._rank_of[number + 1],
                )
        return None

    def bubble_fraction(self) -> float:
        """The pipeline bubble by the schedule's order, if a backward pass takes two forward passes and stages are equal."""
        orders = self.schedule.pipeline_order
        return bubble_fraction(
            {
                rank: [(a.stage_index, a.computation_type.value) for a in order if a is not None]
                for rank, order in orders.items()
            }
        )

    def _calls(
        self, stage: Any, items: Iterator[Any], shapes: Iterator[tuple[int, int]]
    ) -> Callable[..., Tensor]:
        """The call of a stage for its next micro batch: schedules keep their order."""

        def call(*arrived: Tensor) -> Tensor:
            item, (rows, columns) = next(items), next(shapes)
            padded = len(self._made_for[1]) == 2
            x_btd: Tensor | None = None
            if arrived:
                x_btd = arrived[0].to(self.device)
                if padded:
                    x_btd = x_btd[: rows * columns].view(rows, columns, self.hidden)
            out = self.compute(stage, item, x_btd)
            if stage.span.is_last:
                return out
            out = out.to(self._comm_device)
            if not padded:
                return out
            rest = out.new_zeros(self._made_for[1][0] - rows * columns, self.hidden)
            return torch.cat((out.flatten(0, 1), rest))

        return call

    def _fit(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Build a schedule for these shapes, unless the current one fits."""
        count, dims = self._made_for
        longest = max(rows * columns for rows, columns in shapes)
        if len(dims) == 3:
            fits = all(shape == dims[:2] for shape in shapes)
            longest = max(longest, dims[0] * dims[1])
        else:
            fits = bool(dims) and longest <= dims[0]
            longest = max(longest, *dims[:1], 0)
        if fits and count == len(shapes):
            return
        if not fits:
            alike = not dims and len(set(shapes)) == 1
            dims = (*shapes[0], self.hidden) if alike else (longest, self.hidden)
        self._made_for = (len(shapes), dims)
        self.schedule = self._build_schedule(len(shapes), dims)

    def _build_schedule(self, count: int, dims: tuple[int, ...]) -> Any:
        from torch.distributed import pipelining

        def like(*sizes: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=True)

        class OwnStage(pipelining.PipelineStage):
            def _get_init_p2p_neighbors_ops(self) -> list[Any]:
                """Drop the send from a rank to itself that torch 2.11 makes where a V turns: gloo cannot."""
                return [
                    op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank
                ]

        stages = [
            OwnStage(
                module,
                stage.span.number,
                self.num_stages,
                self._comm_device,
                # Given, so that torch need not infer them with a pass.
                input_args=() if stage.span.is_first else (like(*dims),),
                output_args=(like(dtype=torch.float32) if stage.span.is_last else like(*dims),),
                group=self.group,
            )
            for stage, module in zip(self.stages, self.modules, strict=True)
        ]
        make: Any = getattr(pipelining, self.kind.torch_class)
        own = stages if self.kind.max_stages > 1 else stages[0]
        # The loss is scaled already.
        return make(own, count, loss_fn=lambda loss, _: loss, scale_grads=False)


def bubble_fraction(orders: Mapping[int, Sequence[tuple[int, str]]]) -> float:
    """The idle fraction of all ranks with these orders of (stage, F forward, B backward, I and W its halves)."""
    cost = {"F": 1, "B": 2, "I": 1, "W": 1}
    last = max(stage for order in orders.values() for stage, _ in order)
    done: dict[tuple[int, str, int], float] = {}
    clock = dict.fromkeys(orders, 0.0)
    counts: Counter[tuple[int, str]] = Counter()
    left = {rank: [action for action in order if action[1] in cost] for rank, order in orders.items()}
    work = sum(cost[what] for order in left.values() for _, what in order)
    while any(left.values()):
        moved = False
        for rank, order in left.items():
            while order:
                stage, what = order[0]
                back = "B" if what in "BI" else what
                number = counts[stage, back]
                needs = [(stage, "F", number)] if what in "BI" else []
                if what == "F" and stage > 0:
                    needs = [(stage - 1, "F", number)]
                elif what in "BI" and stage < last:
                    needs.append((stage + 1, "B", number))
                if not all(need in done for need in needs):
                    break
                order.pop(0)
                clock[rank] = max([clock[rank], *(done[need] for need in needs)]) + cost[what]
                done[stage, back, number] = clock[rank]
                counts[stage, back] += 1
                moved = True
        assert moved, "a deadlock in the schedule"
    return 1 - work / (len(orders) * max(clock.values()))


def add_peer_gradient(parameter: nn.Parameter, peer: int, group: ProcessGroup) -> None:
    """Sum the gradient of a tied parameter with that of a peer, which does the same, so that both have the same bits."""
    import torch.distributed as dist

    if parameter.grad is None:
        return
    if is_sharded(parameter):
        # Its placement may differ from the parameter's.
        sharded: Any = parameter
        parameter.grad = sharded.grad.redistribute(placements=sharded.placements)
    own = local_tensor(parameter.grad)
    tensor = own.to(_comm_device(group, own.device)).contiguous()
    theirs = torch.empty_like(tensor)
    sent = [
        dist.P2POp(dist.isend, tensor, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(sent):
        work.wait()
    own.add_(theirs.to(own.device))


def gather_stages(
    tensors: Mapping[str, Tensor],
    group: ProcessGroup,
    device: torch.device,
    keep_on: torch.device | None = None,
) -> dict[str, Tensor]:
    """Gather the tensors of all pipeline ranks, by name, on the first of them; the others get their own back. They are sent from
    and to `device`, and kept there or on `keep_on`."""
    import torch.distributed as dist

    listed: list[Any] = [None] * group.size()
    dist.all_gather_object(listed, {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}, group=group)
    found, me, comm_device = dict(tensors), group.rank(), _comm_device(group, device)
    for rank, names in enumerate(listed):
        for name, (shape, dtype) in names.items():
            if any(name in earlier for earlier in listed[:rank]):
                continue
            if rank == me and me != 0:
                dist.send(tensors[name].to(comm_device).contiguous(), group=group, group_dst=0)
            elif rank != 0 and me == 0:
                received = torch.empty(shape, dtype=dtype, device=comm_device)
                dist.recv(received, group=group, group_src=rank)
                found[name] = received.to(keep_on or device)
    return found


def _comm_device(group: ProcessGroup, device: torch.device) -> torch.device:
    """The device from which tensors are sent: gloo, which ranks that share a GPU use, sends from host memory."""
    import torch.distributed as dist

    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device
