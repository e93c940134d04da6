"""Parity traces: same weights, same real batches, a few steps, to be compared with plain fp32.

A trace is the loss and the gradient norm of every step, the gradient of every tensor at step one, the initial weights and how far
they moved in the first steps, and whether each moved at all. The gradients of a small
model are kept whole. Those of a large one are sketched: each value gets a random sign and is added to one of a thousand sums.
The sketch is linear and keeps norms in expectation, so the norm of the difference of two sketches is that of the difference of
the gradients, within a few per cent.

The batch is the ladder's, not the rung's: comparing curves on different batches would compare two data orders.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rush.data import Batch
from rush.files import replacing
from rush.hardware import Machine
from rush.hub.folders import starting_weights
from rush.lab.ladder.ladder_file import change
from rush.lab.trial.step_log import Flow, StepLog
from rush.models import Shape, build_model
from rush.recipe import Recipe
from rush.recipe_io import parse
from rush.techniques import Parity, registry
from rush.training.build import Run, build
from rush.training.corpus import Corpus
from rush.training.epochs import with_steps
from rush.training.schedule import learning_rate
from rush.training.step import StepResult, clip_factor, train_step

WHOLE_UP_TO = 8_000_000
"""Parameters up to which gradients are kept whole."""
SKETCH = 1024
MOVED_STEPS = 3
"""Steps after which the movement of the weights is compared: early enough that rounding has not grown."""
INITIAL, MOVED = "initial/", "moved/"
"""Prefixes of the sketches of weights, beside the gradients."""


@dataclass(frozen=True)
class Trace:
    log: StepLog
    flow: Flow
    """Over the first steps."""
    unmoved: list[str]
    """Trained tensors that did not change since before the first step."""
    weights: str
    """The dtype of the trained weights, or of their masters."""
    dtype: str
    """The matmul dtype."""

    @property
    def losses(self) -> list[float]:
        return self.log.losses

    @property
    def grad_norms(self) -> list[float]:
        return self.log.grad_norms

    @property
    def skipped(self) -> int:
        """Skipped updates, as with loss scaling."""
        return self.log.skipped

    def to_dict(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "skipped": self.skipped,
            "steps": self.log.to_dict(),
            "flow": self.flow.to_dict(),
            "unmoved": self.unmoved,
            "moved_steps": min(MOVED_STEPS, len(self.losses)),
            "weights": self.weights,
            "dtype": self.dtype,
        }


def without_speed(recipe: Recipe) -> Recipe:
    """The recipe with only the techniques that decide what is learned: none, or adapters and their base."""
    known = registry()
    kept = [
        entry
        for entry, (name, _) in zip(recipe.techniques, recipe.technique_uses(), strict=True)
        if name in known and known[name].parity is Parity.CHANGES
    ]
    return recipe.model_copy(update={"techniques": kept})


def without_rounding(recipe: Recipe, machine: Machine) -> Recipe | None:
    """The recipe without the techniques that round more than fp32 does, those that need them, and compilers; None where it has none
    that rounds, or nothing else is left to judge."""
    known, rounds = registry(), False
    entries = []
    for entry, (name, knobs) in zip(recipe.techniques, recipe.technique_uses(), strict=True):
        technique = known[name]
        chosen = {key: knobs.get(key, values.default) for key, values in technique.knobs.items()}
        rounds |= technique.relative_error > 0
        if not technique.relative_error and not technique.compiles(chosen):
            entries.append((entry, technique))
    while rounds:
        left = recipe.model_copy(update={"techniques": [entry for entry, _ in entries]})
        fit = [pair for pair in entries if all(need.met(machine, left) for need in pair[1].requires)]
        if len(fit) == len(entries):
            judged = any(technique.parity is not Parity.CHANGES for _, technique in entries)
            return left if judged else None
        entries = fit
    return None


def parity_recipe(recipe: Recipe, base: Recipe, steps: int, changes: Mapping[str, Any]) -> Recipe:
    """The recipe on the base's batch, with a warmup over all these steps.

    Two recipes that differ only in their batch give the same parity recipe. `changes` are the ladder's own.
    """
    tree = recipe.model_dump(exclude_none=True)
    tree["batch"] = base.batch.model_dump(exclude_none=True)
    tree["schedule"] = {"kind": "constant", "steps": steps, "warmup": steps}
    tree["run"] = {
        "seed": recipe.run.seed,
        "deterministic": recipe.run.deterministic,
        "device": recipe.run.device,
    }
    tree["about"] = ""
    tree["techniques"].sort(key=lambda entry: entry["name"] if isinstance(entry, dict) else entry)
    change(tree, changes)
    return parse(tree)


def trace(
    recipe: Recipe,
    machine: Machine,
    corpus: Corpus,
    gradients: Path,
    *,
    rounded: bool = False,
    steps: int | None = None,
    as_timed: bool = False,
    at_least: int = 0,
    budget_s: float = math.inf,
) -> Trace:
    """Run the recipe's steps, or so many `steps`. `gradients` (safetensors) gets those of the first, and sketches of the initial
    weights and of how far they moved in the first few.

    The perturbed reference run starts from weights `rounded` to bf16: its distance shows how rounding errors grow. `as_timed`: on
    the batches of a timing. Past `budget_s` seconds no step beyond `at_least` is begun.
    """
    weights = starting_weights(recipe)
    run = build(recipe, machine, weights)
    if rounded:
        with torch.no_grad():
            for parameter in run.model.parameters():
                if parameter.requires_grad:  # a frozen base may be quantized
                    parameter.copy_(parameter.bfloat16())
    log, flow = StepLog(), Flow()
    log.watch(run)
    corpus = corpus.ready_for(run, weights, None)
    start, kept = _sketched(run), dict[str, torch.Tensor]()
    kept |= {f"{INITIAL}{name}": value for name, value in start.items()}
    # The same documents in every step, so that different packings can be compared.
    samples = None if as_timed else recipe.micro * recipe.accumulation
    began = time.monotonic()
    with corpus.loader(recipe, run.loader_options, same_samples=samples) as loader:
        run.recipe = recipe = with_steps(recipe, loader)
        steps = steps or recipe.steps
        for step in range(1, steps + 1):
            if step > at_least and time.monotonic() - began > budget_s:
                break
            batches = list(loader.next_step())
            log.looking = flow if step <= MOVED_STEPS else None
            log.given(batches)
            if step == 1:
                result, first = _first_step(run, batches)
                kept |= first
            else:
                lr = learning_rate(recipe, min(step, recipe.steps))
                result = train_step(run, step, lr, batches)
            log.launched()
            log.result(result)
            if step == min(MOVED_STEPS, steps):
                now = _sketched(run)
                kept |= {f"{MOVED}{name}": now[name] - start[name] for name in start}
    end = _sketched(run)
    gradients.parent.mkdir(parents=True, exist_ok=True)
    with replacing(gradients) as temporary:
        save_file(kept, temporary)
    unmoved = [name for name in start if torch.equal(start[name], end[name])]
    dtypes = {_exact(run, parameter).dtype for _, parameter in _trained(run)}
    weights_dtype = "float32" if dtypes == {torch.float32} else "shorter"
    return Trace(log, flow, unmoved, weights_dtype, run.matmul_dtype())


def _first_step(run: Run, batches: Iterable[Batch]) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """Step one, and its gradients before clipping."""
    kept: dict[str, torch.Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        kept.update(read_gradients(run))

    hook = run.optimizer.register_step_pre_hook(keep)
    result = train_step(run, 1, learning_rate(run.recipe, 1), batches)
    hook.remove()
    factor = clip_factor(run, result.grad_norm)
    return result, {name: gradient / factor for name, gradient in kept.items()}


def read_gradients(run: Run) -> list[tuple[str, torch.Tensor]]:
    """Every tensor's gradient on the host: whole, or of a large model its sketch."""
    whole = sum(p.numel() for p in run.model.parameters()) <= WHOLE_UP_TO
    dims = plain_dims(run.recipe.shape())
    found = []
    for name, parameter in run.model.named_parameters():
        if parameter.grad is None:
            continue
        # A sketch depends on the device, and offloaded tensors are elsewhere.
        gradient = plain_part(dims, name, parameter.grad.detach().to(run.device))
        kept = gradient.float() if whole else sketch(gradient, name)
        found.append((name, kept.cpu().contiguous().clone()))
    return found


def plain_part(dims: Mapping[str, tuple[int, ...]], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without what a technique padded it with (the vocabulary)."""
    if name in dims and tuple(tensor.shape) != dims[name] and tensor.dim() == len(dims[name]):
        return tensor[tuple(slice(size) for size in dims[name])]
    return tensor


def _trained(run: Run) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in run.model.named_parameters() if p.requires_grad]


def _exact(run: Run, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The fp32 master of a weight, where there is one."""
    state = run.optimizer.state.get(parameter, {})
    exact = state.get("master", getattr(parameter, "master", None))
    return parameter.detach() if exact is None else exact


@torch.no_grad()
def _sketched(run: Run) -> dict[str, torch.Tensor]:
    """A sketch of every trained weight."""
    dims = plain_dims(run.recipe.shape())
    return {
        name: sketch(plain_part(dims, name, _exact(run, parameter).to(run.device)), name).cpu()
        for name, parameter in _trained(run)
    }


def plain_dims(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The dims of every parameter of the plain model."""
    with torch.device("meta"):
        model = build_model(shape)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def sketch(gradient: torch.Tensor, name: str) -> torch.Tensor:
    """`SKETCH` sums of the values with random signs, the same for the same name and device."""
    flat = gradient.flatten()
    generator = torch.Generator(flat.device).manual_seed(zlib.crc32(name.encode()))
    total = torch.zeros(SKETCH, device=flat.device)
    rows = 1024 * SKETCH
    for start in range(0, flat.numel(), rows):
        part = flat[start : start + rows].float()
        signs = torch.randint(0, 2, part.shape, generator=generator, device=flat.device, dtype=torch.int8)
        part = part * (2 * signs - 1)
        part = torch.nn.functional.pad(part, (0, -part.numel() % SKETCH))
        total += part.view(-1, SKETCH).sum(0)
    return total
