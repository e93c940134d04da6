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

On several ranks a step is the step of all: every rank's micro batches are divided by the labels of all ranks, and loss,
norm and counts are those of the whole step, alike everywhere. What a rank must know of the others is summed where the
losses are, so that no host waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rush.data import Batch
from rush.errors import DataError, Diverged
from rush.parallel.sharded import is_sharded, reshard, scale, total_norm
from rush.train.build import Run
from rush.train.optimizer import set_learning_rate, supports_found_inf


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
    stopping: bool = False
    """Some rank was asked to stop when it launched this step."""


@dataclass(frozen=True)
class StepCounts:
    """What a step holds, over all its micro batches (and all ranks, once they are summed)."""

    units: int
    labels: int
    tokens: int
    real: int
    stopping: int


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device may still be working on."""

    step: int
    batches: list[Batch]
    counts: StepCounts
    """Of this rank."""
    figures: Mapping[str, float]
    numbers: Tensor
    """On the host: the summed loss and the gradient's norm, and of several ranks the sums of their counts, once
    `arrived` has happened."""
    arrived: torch.cuda.Event | None
    skipped: bool

    @property
    def num_tokens(self) -> int:
        """Of this rank, as are the next two."""
        return self.counts.tokens

    @property
    def num_labels(self) -> int:
        return self.counts.labels

    @property
    def num_real(self) -> int:
        return self.counts.real

    @property
    def ready(self) -> bool:
        """Whether the result is there without waiting."""
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        """Wait for the numbers. Raises `Diverged` if loss or gradient was not finite; then nothing was updated."""
        if self.arrived is not None:
            self.arrived.synchronize()
        summed_loss, norm, *summed = self.numbers.tolist()
        counts = StepCounts(*map(int, summed)) if summed else self.counts
        _check_labels(self.step, counts)
        loss = summed_loss / counts.units
        if not (math.isfinite(loss) and (math.isfinite(norm) or self.skipped)):
            raise Diverged(_say_diverged(self.step, loss, norm, self.batches))
        return StepResult(
            loss,
            0.0 if self.skipped else norm,
            num_tokens=counts.tokens,
            num_labels=counts.labels,
            num_real=counts.real,
            figures=self.figures,
            skipped=self.skipped,
            stopping=counts.stopping > 0,
        )


def train_step(run: Run, step: int, lr: float, batches: Iterable[Batch]) -> StepResult:
    """Update the model once and wait for it. Raises `Diverged` if loss or gradient is not finite."""
    return launch_step(run, step, lr, batches).result()


def launch_step(
    run: Run, step: int, lr: float, batches: Iterable[Batch], *, stopping: bool = False
) -> LaunchedStep:
    """Everything a step does, without waiting for the device where that can be helped.

    `stopping` tells the other ranks that this one was asked to stop.
    """
    with run.in_step():
        return _launch(run, step, lr, list(run.own(batches)), stopping)


def _launch(run: Run, step: int, lr: float, batches: list[Batch], stopping: bool) -> LaunchedStep:
    counts = StepCounts(
        units=sum(run.objective.units(batch) for batch in batches),
        labels=sum(batch.num_labels for batch in batches),
        tokens=sum(batch.tokens_bt.numel() for batch in batches),
        real=sum(batch.num_real for batch in batches),
        stopping=int(stopping),
    )
    summed = _sum_counts(run, step, counts)
    loss_scale = run.scaler.scale(_loss_scale(run, counts, summed))
    total = run.passes.train(batches, loss_scale)
    if summed is not None:
        # Whether there was any label is known on the device only: without one nothing may be updated.
        total = run.ranks.all_reduce(total).masked_fill(summed[0] == 0, torch.nan)
    run.scaler.unscale_(run.optimizer)
    grad_norm = gradient_norm(run)
    on_device = torch.stack([total, grad_norm.to(total.device)])
    set_learning_rate(run.optimizer, lr)
    if update_is_async(run):
        numbers, arrived, skipped = *_fetch(_with(on_device, summed)), False
        _update_on_device(run, on_device)
    else:
        numbers, arrived = _with(on_device, summed).cpu(), None
        skipped = _update_on_host(run, numbers[:2], grad_norm)
    run.optimizer.zero_grad(set_to_none=True)
    return LaunchedStep(
        step,
        batches,
        counts,
        figures=run.objective.figures(run.ranks.all_reduce),
        numbers=numbers,
        arrived=arrived,
        skipped=skipped,
    )


def _sum_counts(run: Run, step: int, counts: StepCounts) -> Tensor | None:
    """The counts of all ranks, on the device; None for a rank that is alone, which knows its own."""
    if run.ranks.alone:
        _check_labels(step, counts)
        return None
    numbers = torch.tensor(
        [counts.units, counts.labels, counts.tokens, counts.real, counts.stopping],
        dtype=torch.float64,  # which counts to 2⁵³ and travels with the loss
        pin_memory=run.device.type == "cuda",
    )
    summed = run.ranks.all_reduce(numbers.to(run.device, non_blocking=True))
    # Ranks with the same samples are counted once, but each may have been asked to stop.
    run.ranks.all_reduce_any(summed[4:])
    return summed


def _check_labels(step: int, counts: StepCounts) -> None:
    if counts.labels == 0 or counts.units == 0:
        raise DataError(f"step {step} has no label to learn from; every target in its batches is masked.")


def _loss_scale(run: Run, counts: StepCounts, summed: Tensor | None) -> Tensor:
    """What each unit's loss counts: one over the units of the step."""
    if summed is None:
        return torch.full((), 1 / counts.units, device=run.device)
    return (run.averaged_over / summed[0]).float()


def _with(loss_and_norm: Tensor, summed: Tensor | None) -> Tensor:
    return loss_and_norm if summed is None else torch.cat([loss_and_norm.double(), summed])


def update_is_async(run: Run) -> bool:
    """Whether a step's update is launched before its loss and gradient are known. (Loss scaling decides on the host, and
    an update of weights that lie there is the host's own.)

    Then clipping is part of the update as well, which divides the gradients where it reads them.
    """
    here: bool = run.optimizer.param_groups[0]["params"][0].device.type == run.device.type
    return here and supports_found_inf(run.optimizer) and not run.scaler.is_enabled()


def _fetch(on_device: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Numbers on their way to the host, and the event of their arrival."""
    if on_device.device.type != "cuda":
        return on_device, None
    host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
    host.copy_(on_device, non_blocking=True)
    arrived = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived


def _update_on_device(run: Run, loss_and_norm: Tensor) -> None:
    """Clip and update on the device, which does neither if a number is not finite or was not at an earlier step."""
    non_finite = (~torch.isfinite(loss_and_norm)).any()
    run.non_finite = non_finite if run.non_finite is None else run.non_finite | non_finite
    limit = run.recipe.optimizer.clip
    scaled = {} if not limit else {"grad_scale": ((loss_and_norm[1] + 1e-6) / limit).clamp_min(1.0)}
    told = {"found_inf": run.non_finite.float(), **scaled}
    for name, value in told.items():
        setattr(run.optimizer, name, value)
    try:
        run.optimizer.step()
    finally:
        for name in told:
            delattr(run.optimizer, name)


def _update_on_host(run: Run, numbers: Tensor, grad_norm: Tensor) -> bool:
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
    counted = (p for name, p in run.model.named_parameters() if name not in run.tied_replicas)
    gradients = [p.grad for p in counted if p.grad is not None]
    if not run.ranks.alone:
        own = total_norm(gradients, run.norm_fn) if gradients else torch.zeros((), device=run.device)
        return own if run.ranks.stages is None else run.ranks.all_reduce_stages(own.square()).sqrt()
    if not gradients:
        return torch.zeros((), device=run.device)
    return run.norm_fn(gradients)


def clip(run: Run, grad_norm: torch.Tensor) -> None:
    """Scale all gradients down if their norm is above the recipe's limit."""
    limit = run.recipe.optimizer.clip
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    if limit and any(is_sharded(gradient) for gradient in gradients):
        scale(gradients, (limit / (grad_norm + 1e-6)).clamp(max=1.0))
    elif limit:
        torch.nn.utils.clip_grads_with_norm_(run.model.parameters(), limit, grad_norm)


def clip_factor(run: Run, norm: float) -> float:
    """What gradients of this norm have been multiplied by when the optimizer is called: nothing, where the update clips."""
    limit = run.recipe.optimizer.clip
    return min(1.0, limit / (norm + 1e-6)) if limit and not update_is_async(run) else 1.0


def _say_diverged(step: int, loss: float, norm: float, batches: list[Batch]) -> str:
    num_samples = sum(len(batch.samples) for batch in batches)
    names = [name for batch in batches for name in batch.samples[:4]][:4]
    shown = ", ".join(names) + (f" and {num_samples - 4} more" if num_samples > 4 else "")
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
    return f"step {step}: {what}, so the weights were not updated; the samples of this step: {shown}."


@torch.no_grad()
def validate(run: Run, batches: Iterable[Batch], rows: int | None = None) -> float:
    """Mean loss per unit over held-out batches, with several ranks over those of all; `rows` go through the model at once, and
    without it as many as in training."""
    total, units, _ = reduce_validation(run, *validate_local(run, batches, rows))
    return total / units


@torch.no_grad()
def validate_local(run: Run, batches: Iterable[Batch], rows: int | None = None) -> tuple[float, float]:
    """The summed loss and the units of what this rank has of the held-out batches."""
    units, rows = 0.0, rows or run.pass_rows

    def on_device() -> Iterator[Batch]:
        nonlocal units
        for batch in run.own(batches):
            units += run.objective.units(batch)
            for piece in split_rows(batch, rows):
                yield piece.to(run.device)

    with run.in_step():
        total = run.passes.evaluate(on_device())
    return total, units


def reduce_validation(
    run: Run, total: float, units: float, failed: bool = False
) -> tuple[float, float, bool]:
    """The sums over all ranks, and whether some rank failed."""
    if run.ranks.alone:
        return total, units, failed
    for part in run.stages:
        reshard(part)
    summed = run.ranks.all_reduce(
        torch.tensor([total, units, failed], dtype=torch.float64, device=run.device)
    )
    # Ranks with the same samples are counted once, but each may have failed.
    run.ranks.all_reduce_any(summed[2:])
    total, units, failures = summed.tolist()
    return total, units, failures > 0


def split_rows(batch: Batch, rows: int) -> list[Batch]:
    """The batch in pieces of at most so many rows; of preferences, pairs."""
    held = batch.tokens_bt.shape[0] // (2 if batch.paired else 1)
    return [batch] if held <= rows else batch.split(-(-held // rows))
