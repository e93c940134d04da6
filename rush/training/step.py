"""One optimizer step: accumulate, check, clip, update.

The gradient of a step is that of the mean loss over all its labels. Each micro batch adds the gradient of its *summed* loss
times the loss scale (1 / number of labels in the step), so gradient accumulation changes nothing, even with unequal numbers of
labels. (Averaging the micro batches' means gives tokens the wrong weights.)

A step whose loss or gradient is non-finite updates nothing. To know it, the host would have to synchronize with the device. So
where the optimizer can skip an update on the device (`found_inf`), everything is launched at once, and the host reads the
numbers later (`launch_step`, then `result`), while the next step may be running. A skipped update skips all later ones, too,
so that the weights stay unchanged.

On several ranks the loss scale counts the labels of all ranks, and loss, gradient norm and counts are those of the whole
step, the same on every rank. They are all-reduced on the device, so that no host waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from rush.data import Batch
from rush.errors import DataError, Diverged
from rush.parallel.sharded import is_sharded, reshard, scale, total_norm
from rush.training.build import Run
from rush.training.optimizer import set_learning_rate, supports_found_inf


@dataclass(frozen=True)
class StepCounts:
    """Counts over the micro batches of a step (and over all ranks, once all-reduced)."""

    units: int
    labels: int
    tokens: int
    real: int
    """Tokens without padding."""
    stopping: int
    """Ranks that had been asked to stop when they launched the step."""


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float
    counts: StepCounts
    figures: Mapping[str, float]
    """Further metrics of the objective."""
    skipped: bool = False
    """The scaled gradients overflowed: no update, the norm reads 0, and the scaler lowers its scale."""


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device may still be running."""

    step: int
    batches: list[Batch]
    counts: StepCounts
    """The counts of this rank."""
    figures: Mapping[str, float]
    numbers: Tensor
    """On the host once `arrived` has happened: the summed loss, the gradient norm, and the all-reduced counts."""
    arrived: torch.cuda.Event | None
    skipped: bool

    @property
    def ready(self) -> bool:
        """Whether `result` returns without waiting."""
        return self.arrived is None or bool(self.arrived.query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        """Wait for the numbers. Raises `Diverged` if loss or gradient was non-finite; then nothing was updated."""
        if self.arrived is not None:
            self.arrived.synchronize()
        summed_loss, norm, *summed = self.numbers.tolist()
        counts = StepCounts(*map(int, summed)) if summed else self.counts
        _check_labels(self.step, counts)
        loss = summed_loss / counts.units
        if not (math.isfinite(loss) and (math.isfinite(norm) or self.skipped)):
            raise Diverged(_divergence_message(self.step, loss, norm, self.batches))
        return StepResult(loss, 0.0 if self.skipped else norm, counts, self.figures, self.skipped)


def train_step(run: Run, step: int, lr: float, batches: Iterable[Batch]) -> StepResult:
    """Update the model once and wait for it. Raises `Diverged` if loss or gradient is non-finite."""
    return launch_step(run, step, lr, batches).result()


def launch_step(
    run: Run, step: int, lr: float, batches: Iterable[Batch], *, stopping: bool = False
) -> LaunchedStep:
    """Launch a step, where possible without synchronizing with the device.

    `stopping` reports to the other ranks that this one was asked to stop.
    """
    with run.in_step():
        for hook in run.before_step:
            hook(step)
        return _launch(run, step, lr, list(run.local_batches(batches)), stopping)


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
        # Only the device knows whether there was any label; without one nothing may be updated.
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
    """The all-reduced counts, on the device; None on a single rank."""
    if run.ranks.alone:
        _check_labels(step, counts)
        return None
    numbers = torch.tensor(
        astuple(counts),
        dtype=torch.float64,  # exact up to 2⁵³
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
    """1 / number of units (labels) in the step."""
    if summed is None:
        return torch.full((), 1 / counts.units, device=run.device)
    return (run.averaged_over / summed[0]).float()


def _with(loss_and_norm: Tensor, summed: Tensor | None) -> Tensor:
    return loss_and_norm if summed is None else torch.cat([loss_and_norm.double(), summed])


def update_is_async(run: Run) -> bool:
    """Whether the update is launched before the host knows loss and gradient. (A gradient scaler decides on the host, and
    offloaded weights are updated there.)

    Then clipping is part of the update, which divides the gradients as it reads them.
    """
    on_device: bool = run.optimizer.param_groups[0]["params"][0].device.type == run.device.type
    return on_device and supports_found_inf(run.optimizer) and not run.scaler.is_enabled()


def _fetch(on_device: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start an asynchronous copy to the host; return it and the event of its completion."""
    if on_device.device.type != "cuda":
        return on_device, None
    host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
    host.copy_(on_device, non_blocking=True)
    arrived = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    arrived.record()
    return host, arrived


def _update_on_device(run: Run, loss_and_norm: Tensor) -> None:
    """Clip and update on the device, unless a number is non-finite or was at an earlier step."""
    non_finite = (~torch.isfinite(loss_and_norm)).any()
    run.non_finite = non_finite if run.non_finite is None else run.non_finite | non_finite
    limit = run.recipe.optimizer.clip
    scaled = {} if not limit else {"grad_scale": ((loss_and_norm[1] + 1e-6) / limit).clamp_min(1.0)}
    flags = {"found_inf": run.non_finite.float(), **scaled}
    for name, value in flags.items():
        setattr(run.optimizer, name, value)
    try:
        run.optimizer.step()
    finally:
        for name in flags:
            delattr(run.optimizer, name)


def _update_on_host(run: Run, numbers: Tensor, grad_norm: Tensor) -> bool:
    """Clip and update if the numbers are finite; whether the gradient scaler skipped the update."""
    loss, norm = numbers.tolist()
    skipped = _overflowed(run, norm)
    if not (math.isfinite(loss) and (math.isfinite(norm) or skipped)):
        return False
    if not skipped:
        clip(run, grad_norm)
    # The scaler skips the update when a gradient is non-finite, and then lowers its scale.
    run.scaler.step(run.optimizer)
    run.scaler.update()
    return skipped


def _overflowed(run: Run, norm: float) -> bool:
    """Whether the gradients are non-finite because of the gradient scaler, which is no divergence."""
    return not math.isfinite(norm) and run.scaler.is_enabled() and run.scaler.get_scale() > 1


def gradient_norm(run: Run) -> torch.Tensor:
    """The global gradient norm."""
    counted = (p for name, p in run.model.named_parameters() if name not in run.tied_replicas)
    gradients = [p.grad for p in counted if p.grad is not None]
    if not run.ranks.alone:
        own = total_norm(gradients, run.norm_fn) if gradients else torch.zeros((), device=run.device)
        return own if run.ranks.stages is None else run.ranks.all_reduce_stages(own.square()).sqrt()
    if not gradients:
        return torch.zeros((), device=run.device)
    return run.norm_fn(gradients)


def clip(run: Run, grad_norm: torch.Tensor) -> None:
    """Clip the gradients to the recipe's norm."""
    limit = run.recipe.optimizer.clip
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    if limit and any(is_sharded(gradient) for gradient in gradients):
        scale(gradients, (limit / (grad_norm + 1e-6)).clamp(max=1.0))
    elif limit:
        torch.nn.utils.clip_grads_with_norm_(run.model.parameters(), limit, grad_norm)


def clip_factor(run: Run, norm: float) -> float:
    """The factor by which gradients of this norm are clipped before the optimizer; 1 where the update clips."""
    limit = run.recipe.optimizer.clip
    return min(1.0, limit / (norm + 1e-6)) if limit and not update_is_async(run) else 1.0


def _divergence_message(step: int, loss: float, norm: float, batches: list[Batch]) -> str:
    num_samples = sum(len(batch.samples) for batch in batches)
    names = [name for batch in batches for name in batch.samples[:4]][:4]
    shown = ", ".join(names) + (f" and {num_samples - 4} more" if num_samples > 4 else "")
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
    return f"step {step}: {what}, so the weights were not updated; the samples of this step: {shown}."


@torch.no_grad()
def validate(run: Run, batches: Iterable[Batch]) -> float:
    """Mean loss per unit over the held-out batches of all ranks."""
    total, units, _ = reduce_validation(run, *validate_local(run, batches))
    return total / units


@torch.no_grad()
def validate_local(run: Run, batches: Iterable[Batch], rows: int | None = None) -> tuple[float, float]:
    """The summed loss and the units of this rank's held-out batches."""
    units, rows = 0.0, rows or run.pass_rows

    def on_device() -> Iterator[Batch]:
        nonlocal units
        for batch in run.local_batches(batches):
            units += run.objective.units(batch)
            for piece in split_rows(batch, rows):
                yield piece.to(run.device)

    with run.in_step():
        total = run.passes.evaluate(on_device())
    return total, units


def reduce_validation(
    run: Run, total: float, units: float, failed: bool = False
) -> tuple[float, float, bool]:
    """All-reduce the sums, and whether some rank failed."""
    if run.ranks.alone:
        return total, units, failed
    for stage in run.roots:
        reshard(stage)
    summed = run.ranks.all_reduce(
        torch.tensor([total, units, failed], dtype=torch.float64, device=run.device)
    )
    # Ranks with the same samples are counted once, but each may have failed.
    run.ranks.all_reduce_any(summed[2:])
    total, units, failures = summed.tolist()
    return total, units, failures > 0


def split_rows(batch: Batch, rows: int) -> list[Batch]:
    """Split a batch into pieces of at most `rows` rows (preferences: pairs)."""
    held = batch.tokens_bt.shape[0] // (2 if batch.paired else 1)
    return [batch] if held <= rows else batch.split(-(-held // rows))
