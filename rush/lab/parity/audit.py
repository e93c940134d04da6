"""The audit: after the timed steps the same run makes a few more, and the plain fp32 model computes each of them again.

A parity trace checks the first steps, in a separate run. The audit finds what a technique does later, or only
while it is timed: from the run's current weights, on the batches that its loader returns, plain fp32 computes
the loss and the gradient of every tensor. Each step starts from the same weights, so they must agree as at
step one of a trace. The update is checked separately: from the run's own gradient and moments AdamW's formula
computes the weights after it, at the learning rate of the recipe. (Quantized moments cannot be read, and
16-bit weights without master weights round most of an update away: then only the loss curve is checked.)

`record` takes the steps while the run exists, `held_against_plain` builds the plain one when its memory is free.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rush.data import Batch
from rush.hardware import Machine
from rush.hub.folders import starting_weights
from rush.lab.parity.trace import WHOLE_UP_TO, plain_dims, plain_part, read_gradients
from rush.lab.trial.found import AuditFound
from rush.lab.trial.step_log import Flow, digest
from rush.lab.trial.timing import Stepper
from rush.recipe import Recipe
from rush.techniques.api.tolerances import gradient_errors
from rush.training.build import Run, build
from rush.training.reference import set_live_reference
from rush.training.schedule import learning_rate
from rush.training.step import clip_factor, split_rows, train_step

STEPS = 2
HOST_COPIES = 1_000_000_000
"""Weights that are copied to the host before a step; of a larger model only the last step is compared."""
SLICE = 65_536
"""Elements of a tensor whose update is checked."""


@dataclass(frozen=True)
class Update:
    """A tensor's update against AdamW's formula."""

    ratio: float
    """Its length along the expected one: 1, or the factor of another learning rate."""
    error: float
    """Relative difference."""
    rounding: float
    """What rounding to the weights' dtype explains of it."""


@dataclass(frozen=True)
class AuditedStep:
    """One step of the run, as it was given and as it came out."""

    batches: list[Batch]
    loss: float
    grad_norm: float
    skipped: bool
    weights: dict[str, Tensor] | None
    """Trained weights before the step, fp32 on the host; None where the step is not compared."""
    gradients: dict[str, Tensor]
    """Before clipping; whole or sketched."""
    updates: dict[str, Update]
    unmoved: list[str]
    """Tensors that had a gradient and did not change."""


@dataclass
class Audited:
    steps: list[AuditedStep] = field(default_factory=list)
    flow: Flow = field(default_factory=Flow)


def record(run: Run, stepper: Stepper) -> Audited:
    """Make the steps; everything that is compared later lies on the host."""
    num_trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    audited = Audited()
    stepper.log.looking = audited.flow
    for number in range(STEPS):
        last = number == STEPS - 1
        audited.steps.append(_audit_step(run, stepper, copied=last or num_trained * STEPS <= HOST_COPIES))
    stepper.log.looking = None
    return audited


def _audit_step(run: Run, stepper: Stepper, *, copied: bool) -> AuditedStep:
    stepper.step += 1
    lr = learning_rate(run.recipe, min(stepper.step, run.recipe.steps))
    batches = stepper.batches()
    given = [batch.each(torch.clone) for batch in batches]  # before a technique can touch them
    stepper.log.given(given)
    before, moments = {name: _slice(p) for name, p in _named(run)}, _moments(run)
    weights = _copied(run) if copied else None
    held, raw = dict[str, Tensor](), dict[str, Tensor]()

    def keep(*_: Any) -> None:
        held.update(read_gradients(run))
        raw.update({name: _slice(p.grad) for name, p in _named(run) if p.grad is not None})

    hook = run.optimizer.register_step_pre_hook(keep)
    try:
        result = train_step(run, stepper.step, lr, batches)
    finally:
        hook.remove()
    factor = clip_factor(run, result.grad_norm)
    after = {name: _slice(p) for name, p in _named(run)}
    updates = {} if result.skipped else _updates(run, raw, moments, lr, result.grad_norm, factor)
    return AuditedStep(
        given,
        result.loss,
        result.grad_norm,
        result.skipped,
        weights,
        {name: gradient / factor for name, gradient in held.items()},
        updates,
        [name for name in raw if torch.equal(before[name], after[name]) and bool(raw[name].any())],
    )


def _named(run: Run) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in run.model.named_parameters() if p.requires_grad]


@torch.no_grad()
def _copied(run: Run) -> dict[str, Tensor]:
    """Every trained weight, as the passes read it."""
    dims = plain_dims(run.recipe.shape())
    return {name: plain_part(dims, name, p).to("cpu", torch.float32, copy=True) for name, p in _named(run)}


def _slice(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten()[:SLICE].float().cpu().clone()


@dataclass(frozen=True)
class _Moments:
    weight: Tensor
    """The master weight, where there is one."""
    mean: Tensor
    square: Tensor
    step: float


def _moments(run: Run) -> dict[str, _Moments]:
    """Both moments of every tensor whose optimizer keeps them as they are, in fp32 beside fp32 weights."""
    found = {}
    for name, parameter in _named(run):
        state = run.optimizer.state.get(parameter, {})
        weight = state.get("master", parameter)
        mean, square, step = (state.get(key) for key in ("exp_avg", "exp_avg_sq", "step"))
        exact = all(isinstance(t, Tensor) and t.dtype == torch.float32 for t in (weight, mean, square))
        if exact and step is not None and mean.shape == square.shape == parameter.shape:
            found[name] = _Moments(_slice(weight), _slice(mean), _slice(square), float(step))
    return found


def _updates(
    run: Run,
    gradients: Mapping[str, Tensor],
    moments: Mapping[str, _Moments],
    lr: float,
    norm: float,
    factor: float,
) -> dict[str, Update]:
    """Every tensor's update against AdamW's, from its gradient and moments before the step."""
    settings, found = run.recipe.optimizer, {}
    clipped = min(1.0, settings.clip / (norm + 1e-6)) if settings.clip else 1.0
    parameters = dict(_named(run))
    for name, was in moments.items():
        if name not in gradients:
            continue
        state = run.optimizer.state[parameters[name]]
        now = _slice(state.get("master", parameters[name]))
        gradient = gradients[name].double() / factor * clipped
        beta1, beta2, step = settings.beta1, settings.beta2, was.step + 1
        mean = beta1 * was.mean.double() + (1 - beta1) * gradient
        square = beta2 * was.square.double() + (1 - beta2) * gradient.square()
        decay = settings.weight_decay if parameters[name].dim() >= 2 else 0.0
        start = was.weight.double()
        direction = (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + settings.eps)
        expected, moved = -lr * (direction + decay * start), now.double() - start
        length = float(expected.norm())
        if length == 0.0:
            continue
        found[name] = Update(
            float(moved @ expected) / length**2,
            float((moved - expected).norm()) / length,
            2.0**-24 * float(start.norm()) / length,
        )
    return found


def held_against_plain(audited: Audited, plain: Recipe, machine: Machine) -> AuditFound:
    """The results of plain fp32 from the same weights on the same batches, compared with the run's."""
    weights = starting_weights(plain)
    run = build(plain, machine, weights)
    set_live_reference(run, weights)
    del weights
    compared = [_compared(run, step) for step in audited.steps if step.weights is not None]
    found: AuditFound = {
        "steps": len(compared),
        "losses": [step.loss for step in audited.steps if step.weights is not None],
        "plain_losses": [each.loss for each in compared],
        "grad_norms": [step.grad_norm for step in audited.steps if step.weights is not None],
        "plain_grad_norms": [each.norm for each in compared],
        "errors": _worst_of(each.errors for each in compared),
        "repeats": any(map(_repeats, audited.steps[1:], audited.steps)),
        "flow": audited.flow.to_dict(),
        **_updated(audited),
    }
    del run
    gc.collect()
    return found


@dataclass(frozen=True)
class _Compared:
    loss: float
    norm: float
    errors: dict[str, float]


def _compared(run: Run, step: AuditedStep) -> _Compared:
    """One audited step in plain fp32."""
    assert step.weights is not None
    with torch.no_grad():
        for name, parameter in _named(run):
            if name in step.weights:
                parameter.copy_(step.weights[name])
    units = sum(run.objective.units(batch) for batch in step.batches)
    scale = torch.full((), 1 / units, device=run.device)
    run.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    with run.in_step():
        for batch in step.batches:
            # Row by row where the model is large: plain attention and logits take more memory than what was timed.
            for piece in split_rows(batch, run.recipe.micro if _small(run) else 1):
                total += float(run.forward_backward(piece.to(run.device), scale))
    plain = dict(read_gradients(run))
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for _, p in _named(run) if p.grad is not None))
    both = {
        name for name in plain if name in step.gradients and step.gradients[name].shape == plain[name].shape
    }
    errors = gradient_errors({n: step.gradients[n] for n in both}, {n: plain[n] for n in both})
    return _Compared(total / units, norm, {name: errors.get(name, math.inf) for name in plain})


def _small(run: Run) -> bool:
    return sum(p.numel() for p in run.model.parameters()) <= WHOLE_UP_TO


def _worst_of(steps: Iterable[Mapping[str, float]]) -> dict[str, float | None]:
    """The largest error of each tensor over the steps; None where its gradient was missing."""
    worst: dict[str, float] = {}
    for errors in steps:
        for name, error in errors.items():
            worst[name] = max(error, worst.get(name, 0.0))
    return {name: error if math.isfinite(error) else None for name, error in worst.items()}


def _repeats(step: AuditedStep, before: AuditedStep) -> bool:
    """Whether all gradients are those of the step before, although its batches are not."""
    alike = step.gradients.keys() == before.gradients.keys() and bool(step.gradients)
    other = digest(step.batches, None) != digest(before.batches, None)
    return (
        alike and other and all(torch.equal(step.gradients[n], before.gradients[n]) for n in step.gradients)
    )


def _updated(audited: Audited) -> AuditFound:
    last = audited.steps[-1]
    ratios = sorted(update.ratio for update in last.updates.values())
    worst = max(last.updates, key=lambda name: last.updates[name].error, default=None)
    found: AuditFound = {
        "unmoved": sorted(set.intersection(*(set(step.unmoved) for step in audited.steps))),
        "updates": None,
    }
    if worst is not None:
        update = last.updates[worst]
        found["updates"] = {
            "tensors": len(last.updates),
            "ratio": ratios[len(ratios) // 2],
            "worst": {
                "name": worst,
                "error": update.error,
                "rounding": update.rounding,
                "ratio": update.ratio,
            },
        }
    return found
