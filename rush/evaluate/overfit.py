"""Overfit one batch: train until its loss is near zero, and diagnose why if it does not get there.

A model that cannot overfit one batch will not learn a corpus. The usual reasons are the labels (masked, shifted), the learning
rate, parameters that are frozen or get no gradient, and a precision that rounds the updates away. Each is checked here; for
the learning rate, ten and a hundred times higher and lower ones are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from rush.data import Batch
from rush.errors import Diverged, MachineError
from rush.evaluate.label_checks import entropy_floor, misaligned
from rush.hardware import probe
from rush.hub.folders import starting_weights
from rush.recipe import Recipe
from rush.techniques import check
from rush.training.build import Run, build
from rush.training.corpus import open_corpus
from rush.training.objectives import objective_of
from rush.training.objectives.preference import log_probabilities
from rush.training.reference import set_live_reference, wants_cached
from rush.training.step import train_step

NEAR_ZERO = 0.05
"""Overfitted: the loss is at most this many nats above the entropy floor (each right token has a probability of some 95 %)."""
MOST_LEFT = 0.05
"""And at most this fraction of the first loss above the floor: a loss that starts small, as DPO's, has to fall too."""
CHECKED_AFTER = 5
"""Updates after which gradients and weights are checked."""
RATE_STEPS = 100
"""Steps of a trial with another learning rate."""
SAMPLED = 4096
"""Monitored weights per tensor."""

Cause = Literal["none", "data mask", "learning rate", "frozen parameters", "precision", "start", "unknown"]
MakeRun = Callable[[], Run]
Show = Callable[[int, float], None]


@dataclass(frozen=True)
class Check:
    """One check and its result."""

    name: str
    good: bool
    what: str


@dataclass(frozen=True)
class Verdict:
    can_learn: bool
    cause: Cause
    reason: str
    """One or two sentences: the finding and what to do."""
    checks: tuple[Check, ...]
    losses: tuple[float, ...]
    floor: float
    """The entropy floor of this batch."""
    target: float


@dataclass
class _Trial:
    """The result of training on the batch."""

    losses: list[float] = field(default_factory=list)
    diverged: str | None = None
    without_gradient: list[str] = field(default_factory=list)
    changed: float | None = None
    """Fraction of the weights with a gradient that changed in the first updates."""
    frozen: list[str] = field(default_factory=list)

    @property
    def last(self) -> float:
        """The mean of the last few losses; infinite where it diverged."""
        tail = self.losses[-3:]
        return math.inf if self.diverged or not tail else sum(tail) / len(tail)


def overfit(make: MakeRun, batch: Batch, steps: int = 300, show: Show = lambda step, loss: None) -> Verdict:
    """Train what `make` builds on one batch, at the recipe's constant learning rate, and give a verdict."""
    run = make()
    batch = _with_reference(run, batch)
    checks = [_check_mask(run, batch), _check_labels(batch), _check_parameters(run)]
    failed = next((check for check in checks if not check.good), None)
    if failed and failed.name != "labels":
        # Nothing to train.
        cause: Cause = "data mask" if failed.name == "mask" else "frozen parameters"
        return Verdict(False, cause, failed.what, tuple(checks), (), 0.0, 0.0)
    floor = _floor(run.recipe, batch)
    trial = _train(run, batch, run.recipe.optimizer.lr, steps, floor, show)
    target = _target(trial, floor)
    checks += _check_updates(run, trial)
    del run
    learned = not trial.diverged and trial.losses[-1] <= target
    if learned and not failed:
        reason = f"The loss fell from {trial.losses[0]:.4f} to {trial.losses[-1]:.4f} in {len(trial.losses)} steps, which is near zero (at most {target:.4f}): this configuration can learn."
        return Verdict(True, "none", reason, tuple(checks), tuple(trial.losses), floor, target)
    if failed:
        cause, reason = "data mask", failed.what
    else:
        cause, reason = _diagnose(make, batch, trial, checks, steps, floor)
    return Verdict(False, cause, reason, tuple(checks), tuple(trial.losses), floor, target)


def overfit_recipe(recipe: Recipe, steps: int, note: Callable[[str], None]) -> Verdict:
    """`overfit` for a recipe: its data, its model, its first batch."""
    machine = probe(recipe.run.device)
    check(recipe, machine)
    objective_of(recipe)
    corpus = open_corpus(recipe, None, note)
    weights = starting_weights(recipe)

    def make() -> Run:
        run = build(recipe, machine, weights)
        set_live_reference(run, weights)
        return run

    # The loader options of techniques are known once a run is built.
    with corpus.loader(recipe, make().loader_options) as loader:
        batch = next(iter(loader.next_step()))
    return overfit(make, batch, steps)


def _with_reference(run: Run, batch: Batch) -> Batch:
    if not wants_cached(run) or batch.reference_b is not None or not batch.num_labels:
        return batch
    run.objective.units(batch)
    with torch.no_grad(), run.in_step(), run.autocast():
        held = log_probabilities(run.model, batch.to(run.device)).cpu()
    return replace(batch, reference_b=held)


def _check_mask(run: Run, batch: Batch) -> Check:
    count, total = batch.num_labels, batch.num_real
    if count == 0:
        return Check("mask", False, f"All {total:,} tokens of the batch are masked: nothing is trained. See the labels with rush data inspect, and check data.format, data.template and objective.train_on.")  # fmt: skip
    units = run.objective.units(batch)
    pairs = "" if run.objective.unit == "label" else f", {units:,} {run.objective.unit}s"
    return Check("mask", True, f"{count:,} of {total:,} tokens are trained ({count / total:.0%}){pairs}")


def _check_labels(batch: Batch) -> Check:
    wrong = misaligned(batch)
    if wrong is None:
        return Check("labels", True, "each label is the next token")
    return Check("labels", False, f"The labels are shifted: {wrong}. The model would not learn next-token prediction; fix the labels.")  # fmt: skip


def _check_parameters(run: Run) -> Check:
    every = list(run.model.named_parameters())
    trained, total = sum(p.numel() for _, p in every if p.requires_grad), sum(p.numel() for _, p in every)
    if trained == 0:
        return Check("parameters", False, "All parameters are frozen: none requires a gradient. Remove what freezes them, or add adapters (technique lora).")  # fmt: skip
    return Check(
        "parameters", True, f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})"
    )


def _floor(recipe: Recipe, batch: Batch) -> float:
    """The lowest possible loss on this batch."""
    if recipe.objective.kind != "dpo":
        return entropy_floor(batch)
    share = recipe.objective.label_smoothing
    return sum(p * math.log(1 / p) for p in (share, 1 - share) if p > 0)


def _target(trial: _Trial, floor: float) -> float:
    first = trial.losses[0] if trial.losses else math.inf
    return floor + min(NEAR_ZERO, MOST_LEFT * max(0.0, first - floor))


def _train(run: Run, batch: Batch, lr: float, steps: int, floor: float, show: Show) -> _Trial:
    trial = _Trial(frozen=[name for name, p in run.model.named_parameters() if not p.requires_grad])
    monitor = _UpdateMonitor(run)
    try:
        for step in range(1, steps + 1):
            loss = train_step(run, step, lr, [batch]).loss
            trial.losses.append(loss)
            show(step, loss)
            if step == min(CHECKED_AFTER, steps):
                trial.without_gradient, trial.changed = monitor.result()
            if step > CHECKED_AFTER and loss <= _target(trial, floor):
                break
    except Diverged as error:
        trial.diverged = str(error)
    except torch.OutOfMemoryError:
        raise MachineError(
            "the batch does not fit into memory; lower batch.micro: a smaller batch is as conclusive."
        ) from None
    finally:
        monitor.close()
    return trial


class _UpdateMonitor:
    """Which parameters get a gradient in the first updates, and whether their weights change."""

    def __init__(self, run: Run) -> None:
        self._parameters = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
        self._reached: set[str] = set()
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._hook = run.optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, *_: object) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is None or not bool(parameter.grad.any()):
                continue
            self._reached.add(name)
            if name not in self._before:
                places = parameter.grad.flatten().nonzero().flatten()
                some = places[:: max(1, len(places) // SAMPLED)]
                self._before[name] = some, parameter.detach().flatten()[some].clone()

    def result(self) -> tuple[list[str], float | None]:
        self.close()
        moved = total = 0
        for name, (places, values) in self._before.items():
            moved += int((self._parameters[name].detach().flatten()[places] != values).sum())
            total += len(places)
        return [
            name for name in self._parameters if name not in self._reached
        ], moved / total if total else None

    def close(self) -> None:
        self._hook.remove()


def _check_updates(run: Run, trial: _Trial) -> list[Check]:
    checks = []
    if trial.without_gradient:
        checks.append(Check("gradients", False, f"no gradient reaches {_few(trial.without_gradient)}"))
    elif trial.changed is not None:
        checks.append(Check("gradients", True, "every trained parameter gets a gradient"))
    if trial.changed is not None:
        dtype = str(next(p.dtype for p in run.model.parameters() if p.requires_grad)).removeprefix("torch.")
        what = f"{trial.changed:.1%} of the weights with a gradient changed in the first {CHECKED_AFTER} updates ({dtype})"
        checks.append(Check("updates", trial.changed >= 0.5, what))
    return checks


def _diagnose(
    make: MakeRun, batch: Batch, trial: _Trial, checks: list[Check], steps: int, floor: float
) -> tuple[Cause, str]:
    """The most likely cause, checked in order."""
    bad = {check.name: check.what for check in checks if not check.good}
    course = _loss_summary(trial)
    if trial.diverged and not trial.losses:
        return "start", f"The first loss is non-finite: the initial weights are damaged, or the precision is too low for them ({trial.diverged})"  # fmt: skip
    if "gradients" in bad:
        return "frozen parameters", f"{course}; {bad['gradients']}: they are detached from the loss (a detach, a frozen layer's output). Check those layers."  # fmt: skip
    if "updates" in bad:
        return "precision", f"{course}; only {bad['updates']}: the other updates were rounded away, being smaller than half the spacing of that precision. Raise optimizer.lr, use stochastic rounding (fused_update with stochastic_rounding), or fp32 weights (amp_bf16, bf16_master)."  # fmt: skip
    lr, best, tried, cause = _try_other_rates(make, batch, trial, steps, floor)
    if cause and not (cause == "low" and trial.frozen and _plateaued(trial)):
        return "learning rate", f"{course}; with optimizer.lr={lr:g} it is {best:.4f} after {tried}, so the learning rate is too {cause}. Try that one."  # fmt: skip
    if trial.diverged:
        return "learning rate", f"{course}; a tenth of the learning rate does not help either. Try much less, with a warm-up."  # fmt: skip
    if trial.frozen:
        trained = next(check.what for check in checks if check.name == "parameters")
        return "frozen parameters", f"{course}, and another learning rate does not help; {trained}, frozen are {_few(trial.frozen)}. Train more of them (a higher rank, more roles), or give it more steps."  # fmt: skip
    return "unknown", f"{course}, and none of the usual reasons was found; give it more steps (--steps), or a larger model."  # fmt: skip


def _try_other_rates(
    make: MakeRun, batch: Batch, trial: _Trial, steps: int, floor: float
) -> tuple[float, float, int, str]:
    """A learning rate ten or a hundred times higher or lower that is clearly better in as many steps: the rate, its loss, the
    steps, and whether the recipe's is too "low" or "high"; "" where there is none."""
    steps = min(steps, RATE_STEPS)
    first = trial.losses[0]
    mine = trial.losses[steps - 1] if len(trial.losses) >= steps else trial.last
    best: tuple[float, float, int, str] = (0.0, mine, steps, "")
    for factors, word in (((10.0, 100.0), "low"), ((0.1, 0.01), "high")):
        for factor in factors:
            run = make()
            lr = factor * run.recipe.optimizer.lr
            other = _train(run, batch, lr, steps, floor, lambda step, loss: None).last
            # Much nearer to the floor; or, where both have fallen little, twice as far from the first loss.
            further = first - other > max(2 * (first - mine), 0.001 * (first - floor))
            if other < best[1] and (other - floor < 0.8 * (mine - floor) or further):
                best = lr, other, steps, word
            else:
                break
        if best[3]:
            break
    return best


def _plateaued(trial: _Trial) -> bool:
    """Whether the loss has plateaued in the last quarter of the steps."""
    losses = trial.losses
    return losses[-len(losses) // 4] - trial.last < 0.1 * (losses[0] - trial.last)


def _loss_summary(trial: _Trial) -> str:
    """The course of the loss, in words."""
    losses = trial.losses
    if trial.diverged:
        began = f"from {losses[0]:.4f} " if losses else ""
        return f"The loss went {began}to a non-finite value at step {len(losses) + 1}"
    verb = "rose" if trial.last > losses[0] else "only fell"
    return f"The loss {verb} from {losses[0]:.4f} to {trial.last:.4f} in {len(losses)} steps"


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
