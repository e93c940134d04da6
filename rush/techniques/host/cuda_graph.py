"""CUDA graph: capture forward and backward once, replay them with one launch.

A step of a small model is thousands of kernels of a few microseconds, and launching each from Python takes
longer than running it: the GPU waits for the CPU. A captured graph holds all launches with their arguments,
and one call replays them. Arguments are addresses, so inputs and gradients are static: batches are copied
in, gradients accumulate in static memory. Every new shape is captured once. It wins where the profile shows
an idle GPU; large models gain nothing and pay with memory. Where a step is one micro batch, gradients need
not accumulate: with `gradients = "written"` every replay writes them, which saves four passes over them, in
memory of the graph's own pool. The result is bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import record_function

import rush.techniques.api.contract as api
from rush.data import Batch
from rush.errors import RecipeError
from rush.recipe import Recipe


@dataclass(frozen=True)
class CapturedGraph:
    graph: torch.cuda.CUDAGraph
    batch: Batch
    loss_scale: Tensor
    loss: Tensor
    gradients: Sequence[Tensor | None]
    """Static gradients that a replay writes, or adds to."""


class GraphedPass:
    """A pass that is captured at the first call for each shape, and replayed from then on."""

    def __init__(
        self, inner: api.Pass, parameters: Callable[[], list[nn.Parameter]], *, writes: bool = False
    ) -> None:
        self.inner = inner
        self.parameters = parameters
        self.writes = writes
        self.graphs: dict[tuple[object, ...], CapturedGraph] = {}
        self.gradients: list[Tensor] = []

    def __call__(self, batch: Batch, loss_scale: Tensor) -> Tensor:
        tensors = batch.tensors()
        shapes = tuple((name, tensor.shape) for name, tensor in tensors.items())
        if shapes not in self.graphs:
            self.graphs[shapes] = self._capture(batch, loss_scale)
        captured = self.graphs[shapes]
        for name, tensor in captured.batch.tensors().items():
            tensor.copy_(tensors[name])
        captured.loss_scale.copy_(loss_scale)
        if not self.writes:
            self._zero_gradients()
        with record_function("rush::forward"):
            captured.graph.replay()
        for parameter, gradient in zip(self.parameters(), captured.gradients, strict=True):
            parameter.grad = gradient
        return captured.loss.clone()

    def _zero_gradients(self) -> None:
        """Zero the static gradients after `zero_grad(set_to_none=True)`."""
        fresh = [
            gradient for p, gradient in zip(self.parameters(), self.gradients, strict=True) if p.grad is None
        ]
        if fresh:
            torch._foreach_zero_(fresh)

    def _capture(self, batch: Batch, loss_scale: Tensor) -> CapturedGraph:
        inputs = batch.each(torch.clone), loss_scale.clone()
        parameters = self.parameters()
        so_far = [p.grad for p in parameters]
        # Warm-up: libraries initialize at their first calls, which must not be captured.
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                for parameter in parameters:
                    parameter.grad = None
                self.inner(*inputs)
        torch.cuda.current_stream().wait_stream(aside)
        if not self.gradients and not self.writes:
            self.gradients = [torch.zeros_like(p) for p in parameters]
        for place, parameter in enumerate(parameters):
            parameter.grad = None if self.writes else self.gradients[place]
        graph = torch.cuda.CUDAGraph()
        # Thread-local capture mode: loader threads may allocate meanwhile.
        with _fresh_workspaces(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss = self.inner(*inputs)
        gradients = [p.grad for p in parameters] if self.writes else list(self.gradients)
        for parameter, gradient_so_far in zip(parameters, so_far, strict=True):
            parameter.grad = gradient_so_far
        return CapturedGraph(graph, *inputs, loss, gradients)


@contextmanager
def _fresh_workspaces() -> Iterator[None]:
    """Allocate cuBLAS workspaces in the graph's own pool, and free those of other streams."""
    torch._C._cuda_clearCublasWorkspaces()
    yield
    torch._C._cuda_clearCublasWorkspaces()


def apply(build: api.Build, knobs: api.Knobs) -> None:
    model = build.model
    writes = knobs["gradients"] == "written"

    def trained() -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.requires_grad]

    build.pass_wrappers.append(lambda inner: build.facts.note(GraphedPass(inner, trained, writes=writes)))


def check_sizes(recipe: Recipe, knobs: api.Knobs) -> None:
    """Refuse to overwrite gradients that should accumulate."""
    if knobs["gradients"] == "written" and recipe.accumulation > 1:
        raise RecipeError(
            f"technique cuda_graph: gradients is 'written', but a step here is {recipe.accumulation} micro batches, whose gradients "
            "accumulate; allowed is 'added', or set batch.micro so that a step is one micro batch."
        )


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Graphs were launched, and no matmul of a pass was launched as an operator."""
    launches = seen.ops.get("cudaGraphLaunch", 0)
    return api.Proof(
        launches > 0 and "aten::mm" not in seen.ops and "aten::addmm" not in seen.ops,
        f"{launches} graph launches in the profiled steps; operators of the passes "
        f"{'still ran one by one' if 'aten::mm' in seen.ops else 'did not run one by one'}",
    )


def _gradients_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Static gradients exist, and the profile shows that a step zeroes them, if, and only if, replays add to them."""
    noted = seen.facts.noted(GraphedPass)
    static = len(noted.gradients) if noted is not None else 0
    zeroed = seen.ops.get("aten::_foreach_zero_", 0)
    adds = knobs["gradients"] == "added"
    return api.Proof(
        noted is not None and bool(noted.graphs) and (static > 0) == adds and (zeroed > 0) == adds,
        f"{static} static gradients, zeroed {zeroed} times",
    )


technique = api.Technique(
    name="cuda_graph",
    stage=api.Stage.STEP,
    apply=apply,
    requires=(
        api.needs_cuda,
        api.Requirement(
            "with compile it needs mode default or max-autotune-no-cudagraphs, because the other modes capture "
            "their own graphs",
            lambda machine, recipe: (
                api.knob_of(recipe, "compile", "mode", "default") in ("default", "max-autotune-no-cudagraphs")
            ),
        ),
    ),
    check_sizes=check_sizes,
    knobs={
        "gradients": api.KnobRange(
            ("added", "written"),
            "whether a replay adds to static gradients, or writes them (steps of one micro batch)",
            _gradients_seen,
        )
    },
    conflicts=("cp", "ddp", "expandable_segments", "fsdp", "offload_activations", "pp", "tp"),
    claim=api.Claim(
        "tokens_per_s",
        0.12,
        regime="BERT pretraining at the largest scale of MLPerf 1.0",
        source="PyTorch blog, Accelerating PyTorch with CUDA Graphs, October 2021",
    ),
    parity=api.Parity.EXACT,
    evidence=evidence,
    memory=(
        api.MemoryEffect(
            "cuda_graph.gradients",
            1.0,
            "static gradients; none with gradients = written",
            by_knob=lambda knobs: float(knobs["gradients"] == "added"),
        ),
        api.MemoryEffect(
            "cuda_graph.pool",
            1.0,
            "the graph's memory pool stays allocated, also during validation and sampling",
        ),
    ),
    settings=(api.Setting(), api.Setting({"gradients": "written"})),
    work=(api.WorkEffect("launches.pass", 10.0),),
)
