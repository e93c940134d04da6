"""Parity traces: same weights, same real batches, a few steps, to be compared with plain fp32.

A trace is the loss and the gradient norm of every step, and the gradient of every tensor at step one. The gradients of a small
model are kept whole. Those of a large one are sketched: each value gets a random sign and is added to one of a thousand sums.
The sketch is linear and keeps norms in expectation, so the norm of the difference of two sketches is that of the difference of
the gradients, within a few per cent.

The batch is the ladder's, not the rung's: comparing curves on different batches would compare two data orders.
"""

from __future__ import annotations

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
from rush.models import Shape, build_model
from rush.recipe import Recipe
from rush.recipe_io import parse
from rush.training.build import Run, build
from rush.training.corpus import Corpus
from rush.training.schedule import learning_rate
from rush.training.step import StepResult, clip_factor, train_step

WHOLE_UP_TO = 8_000_000
"""Parameters up to which gradients are kept whole."""
SKETCH = 1024


@dataclass(frozen=True)
class Trace:
    losses: list[float]
    grad_norms: list[float]
    skipped: int
    """Skipped updates, as with loss scaling."""

    def to_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "grad_norms": self.grad_norms, "skipped": self.skipped}


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
    recipe: Recipe, machine: Machine, corpus: Corpus, gradients: Path, *, rounded: bool = False
) -> Trace:
    """Run the recipe's steps and write the gradients of the first to `gradients` (safetensors).

    The perturbed reference run starts from weights `rounded` to bf16: its distance shows how rounding errors grow.
    """
    weights = starting_weights(recipe)
    run = build(recipe, machine, weights)
    if rounded:
        with torch.no_grad():
            for parameter in run.model.parameters():
                if parameter.requires_grad:  # a frozen base may be quantized
                    parameter.copy_(parameter.bfloat16())
    losses, norms, skipped = [], [], 0
    corpus = corpus.ready_for(run, weights, None)
    # The same documents in every step, so that different packings can be compared.
    samples = recipe.micro * recipe.accumulation
    with corpus.loader(recipe, run.loader_options, same_samples=samples) as loader:
        for step in range(1, recipe.steps + 1):
            if step == 1:
                result = _first_step(run, loader.next_step(), gradients)
            else:
                result = train_step(run, step, learning_rate(recipe, step), loader.next_step())
            losses.append(result.loss)
            norms.append(result.grad_norm)
            skipped += result.skipped
    return Trace(losses, norms, skipped)


def _first_step(run: Run, batches: Iterable[Batch], path: Path) -> StepResult:
    """Step one; writes its gradients before clipping."""
    kept: dict[str, torch.Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        kept.update(_gradients(run))

    hook = run.optimizer.register_step_pre_hook(keep)
    result = train_step(run, 1, learning_rate(run.recipe, 1), batches)
    hook.remove()
    factor = clip_factor(run, result.grad_norm)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file({name: gradient / factor for name, gradient in kept.items()}, temporary)
    return result


def _gradients(run: Run) -> list[tuple[str, torch.Tensor]]:
    whole = sum(p.numel() for p in run.model.parameters()) <= WHOLE_UP_TO
    dims = plain_dims(run.recipe.shape())
    found = []
    for name, parameter in run.model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad.detach()
        if name in dims and tuple(gradient.shape) != dims[name]:
            # A technique padded this tensor (the vocabulary); compare the plain part.
            gradient = gradient[tuple(slice(size) for size in dims[name])]
        kept = gradient.float() if whole else sketch(gradient, name)
        found.append((name, kept.cpu().contiguous().clone()))
    return found


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
