"""One optimizer step: accumulate, check, clip, update.

The gradient of a step is the gradient of the mean loss over all its labels. Each micro batch adds
the gradient of its *summed* loss divided by the number of labels in the whole step, so cutting a
batch into micro batches changes nothing, even when they hold unequal numbers of labels. (Averaging
the micro batches' own means, as many trainers did, gives the wrong weight to every token.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from rush.data import Batch
from rush.errors import DataError, Diverged
from rush.train.build import Run
from rush.train.optimizer import set_learning_rate


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float
    num_tokens: int
    num_labels: int
    num_real: int
    """Tokens without padding."""
    figures: Mapping[str, float]
    """Further numbers the objective gives."""
    skipped: bool = False
    """The scaled gradients overflowed, so there was no update (and no norm: it reads 0); the scale goes down."""


def train_step(run: Run, step: int, lr: float, batches: Iterable[Batch]) -> StepResult:
    """Update the model once. Raises `Diverged` before the update if loss or gradient is not finite."""
    with run.in_step():
        return _train_step(run, step, lr, list(batches))


def _train_step(run: Run, step: int, lr: float, batches: list[Batch]) -> StepResult:
    num_labels = sum(batch.num_labels for batch in batches)
    units = sum(run.objective.units(batch) for batch in batches)
    if num_labels == 0 or units == 0:
        raise DataError(f"step {step} has no label to learn from; every target in its batches is masked.")
    share = run.scaler.scale(torch.full((), 1 / units, device=run.device))
    total = torch.zeros((), device=run.device)
    for batch in batches:
        total += run.micro_pass(batch.to(run.device), share)
    run.scaler.unscale_(run.optimizer)
    grad_norm = gradient_norm(run)
    summed_loss, norm = torch.stack([total, grad_norm.to(total.device)]).tolist()
    mean_loss = summed_loss / units
    skipped = _overflowed(run, norm)
    if not (math.isfinite(mean_loss) and (math.isfinite(norm) or skipped)):
        run.optimizer.zero_grad(set_to_none=True)
        raise Diverged(_say_diverged(step, mean_loss, norm, batches))
    if not skipped:
        clip(run, grad_norm)
    set_learning_rate(run.optimizer, lr)
    # The scaler leaves out the update when a gradient was not finite, and then lowers its scale.
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    return StepResult(
        mean_loss,
        0.0 if skipped else norm,
        num_tokens=sum(batch.tokens_bt.numel() for batch in batches),
        num_labels=num_labels,
        num_real=sum(batch.num_real for batch in batches),
        figures=run.objective.figures(),
        skipped=skipped,
    )


def _overflowed(run: Run, norm: float) -> bool:
    """Whether the gradients are not finite because the loss was scaled too far, which is no divergence."""
    return not math.isfinite(norm) and run.scaler.is_enabled() and run.scaler.get_scale() > 1


def gradient_norm(run: Run) -> torch.Tensor:
    """The Euclidean norm of all gradients together."""
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    if not gradients:
        return torch.zeros((), device=run.device)
    # In fp32 whatever the gradients are: a norm in bf16 has three digits, and clipping would inherit them.
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip(run: Run, grad_norm: torch.Tensor) -> None:
    """Scale all gradients down if their norm is above the recipe's limit."""
    limit = run.recipe.optimizer.clip
    if limit:
        torch.nn.utils.clip_grads_with_norm_(run.model.parameters(), limit, grad_norm)


def _say_diverged(step: int, loss: float, norm: float, batches: list[Batch]) -> str:
    num_samples = sum(len(batch.samples) for batch in batches)
    names = [name for batch in batches for name in batch.samples[:4]][:4]
    shown = ", ".join(names) + (f" and {num_samples - 4} more" if num_samples > 4 else "")
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
    return f"step {step}: {what}, so the weights were not updated; the samples of this step: {shown}."


@torch.no_grad()
def validate(run: Run, batches: Iterable[Batch]) -> float:
    """Mean loss per unit over held-out batches."""
    total, units = 0.0, 0
    with run.in_step():
        for batch in batches:
            with run.autocast():
                loss = run.objective.loss(run.model, batch.to(run.device))
            total += float(loss)
            units += run.objective.units(batch)
    return total / units
