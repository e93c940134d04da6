"""Build a run from a checked recipe: one ordered pass over the techniques' stages.

The model is created on the meta device, the techniques of the early stages change it, then it is materialized and
initialized, then the later stages set up the optimizer, the step and the data. The order is defined only here.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from rush.data import Batch
from rush.errors import MachineError
from rush.hardware import Machine, memory_in_use
from rush.hardware.memory_use import MemoryLimit, trim_heap
from rush.libraries import hush_matmul_fallback
from rush.models import Decoder, build_model, flops_per_token
from rush.models.initial import initial_values
from rush.models.quantized import stored_values
from rush.parallel import Ranks, check_world
from rush.parallel.sharded import fill_model, is_sharded
from rush.recipe import Recipe
from rush.techniques import Build, Pass, Stage, Use, add_axes, check
from rush.techniques.api.contract import Passes
from rush.training.objectives import NextToken, Objective, objective_of
from rush.training.optimizer import build_optimizer

FORWARD = "rush::forward"
"""The profiler range around every forward pass."""


@dataclass(kw_only=True)
class Run(Build):
    """The finished build: everything a step needs."""

    optimizer: torch.optim.Optimizer
    objective: Objective = field(default_factory=NextToken)
    uses: list[Use] = field(default_factory=list)
    non_finite: Tensor | None = None
    """On the device: whether any step so far had a non-finite loss or gradient."""
    limit: MemoryLimit | None = None
    """On a CPU: the memory limit of this process."""

    def __post_init__(self) -> None:
        wrap: Callable[[Any], nn.Module] = self.wrap or (lambda root: root)
        self.wrapped = [wrap(root) for root in self.roots]
        """What training passes call: the roots, with what `wrap` (DDP) puts around each."""
        self.passes: Passes = SequentialPasses(self)
        self.set_innermost(self.forward_backward)
        if self.make_passes is not None:
            self.passes = self.make_passes(self, self.wrapped)

    def set_innermost(self, innermost: Pass) -> None:
        """Set the pass that techniques' wrappers surround."""
        self.innermost, self.micro_pass = innermost, innermost
        for wrap in self.pass_wrappers:
            self.micro_pass = wrap(self.micro_pass)

    def forward_backward(self, batch: Batch, loss_scale: Tensor) -> Tensor:
        """The plain pass over a micro batch; `micro_pass` is this with the techniques' wrappers."""
        with record_function(FORWARD), self.autocast():
            loss = self.objective.loss(self.wrapped[0], batch)
        (loss * loss_scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def local_batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's micro batches, or its shard of each."""
        return iter(batches) if self.shard_batch is None else map(self.shard_batch, batches)

    @property
    def pass_rows(self) -> int:
        """Rows (preferences: pairs) per forward pass: a micro batch, or less where a technique splits it."""
        passes = 1.0
        for use in self.uses:
            for effect in use.technique.memory:
                if effect.term == "passes" and (effect.when is None or effect.when(use.knobs)):
                    passes *= effect.factor_of(use.knobs)
        return -(-self.recipe.micro // round(passes))

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the matmuls."""
        return self.autocast_dtype or next(self.model.parameters()).dtype

    def flops_per_token(self) -> int:
        """FLOPs per token, without recomputation."""
        blocks = [layers for role, layers in self.model.linears().items() if role != "head"]
        own = [
            parameter
            for layers in blocks
            for _, layer in layers
            for parameter in layer.parameters(recurse=False)
        ]
        frozen = not any(parameter.requires_grad for parameter in own)
        return flops_per_token(self.model.shape, self.recipe.batch.sequence, frozen=frozen)

    def matmul_dtype(self) -> str:
        """The dtype of most matmul operands; tf32 where fp32 matmuls use it."""
        dtype = str(self.compute_dtype).removeprefix("torch.")
        with self._step_contexts():
            if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
                return "tf32"
        return self.facts.operand_dtype or dtype

    def rate_dtype(self) -> str:
        """The dtype whose peak rate is 100 % of MFU."""
        return self.facts.rate_dtype or self.matmul_dtype()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """The contexts of every forward pass and update, under the memory limit."""
        with self.held(), self._step_contexts():
            yield

    @contextmanager
    def _step_contexts(self) -> Iterator[None]:
        with ExitStack() as stack:
            for enter in self.step_contexts:
                stack.enter_context(enter())
            yield

    def held(self) -> AbstractContextManager[Any]:
        """Enforces the memory limit around a step or a sample."""
        return nullcontext() if self.limit is None else self.limit.held()

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision for a forward pass, where a technique asked for it."""
        return torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)


@dataclass
class SequentialPasses:
    """Micro batches one after another, each forward and backward through the whole model."""

    run: Run

    def train(self, batches: Sequence[Batch], loss_scale: Tensor) -> Tensor:
        total = torch.zeros((), device=self.run.device)
        for place, batch in enumerate(batches, 1):
            for hook in self.run.before_pass:
                hook(place == len(batches))
            total += self.run.micro_pass(batch.to(self.run.device), loss_scale)
        return total

    def evaluate(self, batches: Iterable[Batch]) -> float:
        total = 0.0
        for batch in batches:
            with self.run.autocast():
                total += float(self.run.objective.loss(self.run.model, batch))
        return total


def build(
    recipe: Recipe,
    machine: Machine,
    weights: dict[str, torch.Tensor] | None = None,
    ranks: Ranks | None = None,
) -> Run:
    """The run a recipe describes, on this machine; random weights from the seed unless given.

    A layout of several ranks is built by all of them at the same time, each with its own `ranks`.
    """
    ranks = ranks or Ranks()
    hush_matmul_fallback()
    if recipe.run.deterministic:
        # cuBLAS reads this on first use, which is after this line in every process that builds a run: with
        # another workspace it chooses other algorithms, which round differently.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    uses = add_axes(check(recipe, machine), ranks.forced_axes)
    check_world(recipe.layout.model_dump(), ranks.world)
    device = torch.device(machine.device)
    limit = _limit_memory(recipe, device)
    with torch.device("meta"):
        model = build_model(recipe.shape())
    half_made = Build(recipe=recipe, machine=machine, device=device, model=model, ranks=ranks)
    if not ranks.alone:
        half_made.loader_options |= {"rank": ranks.data_rank, "world": ranks.data_ranks}
    _apply(uses, half_made, first=Stage.ENV, last=Stage.SHARD)
    for finish in half_made.shard_hooks:
        finish(half_made)
    _materialize(half_made, weights)
    _apply(uses, half_made, first=Stage.MATERIALIZE, last=Stage.DATA)
    optimizer = build_optimizer(
        recipe, half_made.model, half_made.make_optimizer, half_made.optimizer_options
    )
    for hook in half_made.optimizer_hooks:
        hook(optimizer)
    if recipe.run.deterministic:
        half_made.step_contexts.append(deterministic)
        if any(use.technique.compiles(use.knobs) for use in uses):
            half_made.step_contexts.append(deterministic_compiler)
    return Run(**vars(half_made), optimizer=optimizer, objective=objective_of(recipe), uses=uses, limit=limit)


def _limit_memory(recipe: Recipe, device: torch.device) -> MemoryLimit | None:
    """Limit this process to a part of the device's memory, or to all of it; on a CPU returns the context that enforces it
    around a step."""
    limit = recipe.run.memory_limit_gb
    if device.type != "cuda":
        if limit is None:
            return None
        if platform.system() != "Linux":
            raise MachineError(
                f"run.memory_limit_gb is {limit:g}, but this run is on the CPU, and only Linux reports how much a step took; remove "
                "the key."
            )
        # Memory that Python and its libraries took before does not count for the run; what they freed does.
        trim_heap()
        return MemoryLimit(memory_in_use(device.type) + limit * 1e9)
    whole = torch.cuda.get_device_properties(device).total_memory
    if limit is not None and limit * 1e9 > whole:
        raise MachineError(
            f"run.memory_limit_gb is {limit:g}, more than the {whole / 1e9:.0f} GB of this device; lower it or take it out."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit * 1e9 / whole, index)
    return None


def _apply(uses: list[Use], half_made: Build, first: Stage, last: Stage) -> None:
    for use in uses:
        if first <= use.technique.stage <= last:
            use.technique.apply(half_made, use.knobs)


def _materialize(half_made: Build, weights: dict[str, torch.Tensor] | None) -> None:
    model = half_made.model
    mastered = {id(parameter) for parameter in _mastered(half_made)}
    # Trained parameters are initialized in fp32; a frozen base never exists in fp32.
    _cast(model, lambda tensor: torch.float32 if id(tensor) in mastered else half_made.weight_dtype)
    try:
        model.to_empty(device=half_made.weights_device or half_made.device)
    except torch.OutOfMemoryError:
        raise MachineError(
            f"the weights of {half_made.recipe.model.name} do not fit into {half_made.machine.summary()}; "
            "take a smaller model or a larger device."
        ) from None
    if half_made.stages or any(is_sharded(parameter) for parameter in model.parameters()):
        _fill(model, stored_values(model, _values(half_made, weights)))
    elif weights is None:
        model.init_weights(half_made.recipe.run.seed)
    else:
        model.load_state_dict(weights)
        model.init_buffers()
    for hook in half_made.weight_hooks:
        hook(model)
    masters = [(parameter, parameter.detach()) for parameter in _mastered(half_made)]
    if masters:
        _cast(model, lambda tensor: half_made.weight_dtype)
    for parameter, exact in masters:
        parameter.master = exact  # type: ignore[attr-defined]
    for module in model.modules() if half_made.weights_device is not None else []:
        # Only parameters are offloaded, not buffers.
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(half_made.device)


def _fill(model: Decoder, values: Iterable[tuple[str, Tensor]]) -> None:
    # Parameters that a technique added are its own to fill.
    missing = [name for name in fill_model(model, values) if ".adapter." not in name]
    assert not missing, f"no value for {', '.join(missing)}"
    model.init_buffers()


def _cast(model: Decoder, wanted: Callable[[torch.Tensor], torch.dtype]) -> None:
    """Give each floating tensor the dtype wanted for it; parameters stay the objects they are, sharded ones too."""
    model._apply(lambda tensor: tensor.to(wanted(tensor)) if tensor.is_floating_point() else tensor)


def _values(half_made: Build, weights: dict[str, torch.Tensor] | None) -> Iterable[tuple[str, Tensor]]:
    """The values of the parameters that this rank holds."""
    model = half_made.model
    if weights is None:
        return initial_values(model.shape, half_made.recipe.run.seed, model.holds)
    return [(name, value) for name, value in weights.items() if model.holds(name)]


def _mastered(half_made: Build) -> list[torch.nn.Parameter]:
    """The parameters that the update keeps fp32 copies of."""
    return [p for p in half_made.model.parameters() if half_made.masters and p.requires_grad]


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms only.

    torch would also fill all memory that it allocates, for programs that read uninitialized memory. Ours does not
    (`scripts/same_bits.py --diagnose` shows it), so that is disabled to save time.
    """
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


@contextmanager
def deterministic_compiler() -> Iterator[None]:
    """Disable autotuning that affects rounding: the compiler times tiles of a reduction, or padded matmuls, and takes the
    fastest, which may differ in another process."""
    from torch._inductor import config

    with config.patch(deterministic=True):
        yield
