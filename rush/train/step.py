"""One optimizer step: accumulate, check, clip, update.

The gradient of a step is the gradient of the mean loss over all its labels. Each micro batch adds
the gradient of its *summed* loss divided by the number of labels in the whole step, so cutting a
batch into micro batches changes nothing, even when they hold unequal numbers of labels. (Averaging
the micro batches' own means, as many trainers did, gives the wrong weight to every token.)

A step whose loss or gradient is not finite changes nothing. To know it, the host would have to wait for
the device, and the device then for the host to launch what comes next. So where the update can be told on
the device to hold back, everything is launched at once, and the host looks at the numbers later
(`launch_step`, then `result`): the next step can be under way by then. An update that was held back holds back
all later ones too, so that the weights stay what they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rush.data import Batch
from rush.errors import DataError, Diverged
from rush.train.build import Run
from rush.train.optimizer import holds_back, set_learning_rate


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


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device may still be working on."""

    step: int
    batches: list[Batch]
    units: int
    num_tokens: int
    num_labels: int
    num_real: int
    figures: Mapping[str, float]
    numbers: Tensor
    """On the host: the summed loss and the gradient's norm, once `arrived` has happened."""
    arrived: torch.cuda.Event | None
    skipped: bool

    @property
    def ready(self) -> bool:
        """Whether the result is there without waiting."""
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        """Wait for the numbers. Raises `Diverged` if loss or gradient was not finite; then nothing was updated."""
        if self.arrived is not None:
            self.arrived.synchronize()
        summed_loss, norm = self.numbers.tolist()
        loss = summed_loss / self.units
        if not (math.isfinite(loss) and (math.isfinite(norm) or self.skipped)):
            raise Diverged(_say_diverged(self.step, loss, norm, self.batches))
        return StepResult(
            loss,
            0.0 if self.skipped else norm,
            num_tokens=self.num_tokens,
            num_labels=self.num_labels,
            num_real=self.num_real,
            figures=self.figures,
            skipped=self.skipped,
        )


def train_step(run: Run, step: int, lr: float, batches: Iterable[Batch]) -> StepResult:
    """Update the model once and wait for it. Raises `Diverged` if loss or gradient is not finite."""
    return launch_step(run, step, lr, batches).result()


def launch_step(run: Run, step: int, lr: float, batches: Iterable[Batch]) -> LaunchedStep:
    """Everything a step does, without waiting for the device where that can be helped."""
    with run.in_step():
        return _launch(run, step, lr, list(batches))


def _launch(run: Run, step: int, lr: float, batches: list[Batch]) -> LaunchedStep:
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
    on_device = torch.stack([total, grad_norm.to(total.device)])
    set_learning_rate(run.optimizer, lr)
    if waits_for_nothing(run):
        numbers, arrived, skipped = *_fetch(on_device), False
        _update_unless_spoiled(run, on_device)
    else:
        numbers, arrived = on_device.cpu(), None
        skipped = _update_if_sound(run, numbers, grad_norm)
    run.optimizer.zero_grad(set_to_none=True)
    return LaunchedStep(
        step,
        batches,
        units,
        num_tokens=sum(batch.tokens_bt.numel() for batch in batches),
        num_labels=num_labels,
        num_real=sum(batch.num_real for batch in batches),
        figures=run.objective.figures(),
        numbers=numbers,
        arrived=arrived,
        skipped=skipped,
    )


def waits_for_nothing(run: Run) -> bool:
    """Whether a step's update is launched before its loss and gradient are known. (Loss scaling decides on the host.)

    Then clipping is part of the update as well, which divides the gradients where it reads them.
    """
    return holds_back(run.optimizer) and not run.scaler.is_enabled()


def _fetch(on_device: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Numbers on their way to the host, and the event of their arrival."""
    if on_device.device.type != "cuda":
        return on_device, None
    host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
    host.copy_(on_device, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived


def _update_unless_spoiled(run: Run, loss_and_norm: Tensor) -> None:
    """Clip and update on the device, which does neither if a number is not finite or was not at an earlier step."""
    spoiled = (~torch.isfinite(loss_and_norm)).any()
    run.spoiled = spoiled if run.spoiled is None else run.spoiled | spoiled
    limit = run.recipe.optimizer.clip
    scaled = {} if not limit else {"grad_scale": ((loss_and_norm[1] + 1e-6) / limit).clamp_min(1.0)}
    told = {"found_inf": run.spoiled.float(), **scaled}
    for name, value in told.items():
        setattr(run.optimizer, name, value)
    try:
        run.optimizer.step()
    finally:
        for name in told:
            delattr(run.optimizer, name)


def _update_if_sound(run: Run, numbers: Tensor, grad_norm: Tensor) -> bool:
    """Clip and update, now that the numbers are known to be finite; whether loss scaling had to leave the update out."""
    loss, norm = numbers.tolist()
    skipped = _overflowed(run, norm)
    if not (math.isfinite(loss) and (math.isfinite(norm) or skipped)):
        return False
    if not skipped:
        clip(run, grad_norm)
    # The scaler leaves out the update when a gradient was not finite, and then lowers its scale.
    run.scaler.step(run.optimizer)
    run.scaler.update()
    return skipped


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


def clipped_by(run: Run, norm: float) -> float:
    """What gradients of this norm have been multiplied by when the optimizer is called: nothing, where the update clips."""
    limit = run.recipe.optimizer.clip
    return min(1.0, limit / (norm + 1e-6)) if limit and not waits_for_nothing(run) else 1.0


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
