"""Can this setting learn at all? Train on one batch until its loss is near zero, and say why if it does not get there.

A model that cannot learn one batch by heart will not learn a corpus, and the reasons are few: the labels (masked,
moved), the learning rate, parameters that are frozen or that no gradient reaches, a precision that rounds the updates
away. Each leaves a trace of its own, which is looked for here; whether the learning rate is to blame is found out by
trying ten times more and ten times less of it.
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
from rush.evaluate.label_checks import lowest_loss, misaligned
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
"""Learned by heart: the loss is at most this many nats above what no model gets below, so every right token has some 95 %."""
MOST_LEFT = 0.05
"""And at most this share of what there was to lose is left: a loss that begins small, as that of preferences, has to fall too."""
LOOKED_AT = 5
"""Updates after which gradients and weights are looked at."""
TRIED = 100
"""Steps with another learning rate, to see whether it does better."""
SAMPLED = 4096
"""Weights of each tensor that are watched."""

Cause = Literal["none", "data mask", "learning rate", "frozen parameters", "precision", "start", "unknown"]
MakeRun = Callable[[], Run]
Show = Callable[[int, float], None]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    good: bool
    what: str


@dataclass(frozen=True)
class Verdict:
    can_learn: bool
    cause: Cause
    reason: str
    """One or two sentences: what was found, what to do."""
    checks: tuple[Check, ...]
    losses: tuple[float, ...]
    floor: float
    """The loss that no model can get below on this batch."""
    target: float


@dataclass
class _Trial:
    """What a few steps on the batch left behind."""

    losses: list[float] = field(default_factory=list)
    diverged: str | None = None
    without_gradient: list[str] = field(default_factory=list)
    changed: float | None = None
    """Share of the weights with a gradient that are another number after some updates."""
    frozen: list[str] = field(default_factory=list)

    @property
    def last(self) -> float:
        """The mean of the last few losses; infinite where it diverged."""
        tail = self.losses[-3:]
        return math.inf if self.diverged or not tail else sum(tail) / len(tail)


def overfit(make: MakeRun, batch: Batch, steps: int = 300, show: Show = lambda step, loss: None) -> Verdict:
    """Train what `make` builds on one batch, at the recipe's learning rate throughout, and judge."""
    run = make()
    batch = _with_reference(run, batch)
    checks = [_labels_there(run, batch), _labels_right(batch), _parameters(run)]
    failed = next((check for check in checks if not check.good), None)
    if failed and failed.name != "labels":
        # Nothing could be trained.
        cause: Cause = "data mask" if failed.name == "mask" else "frozen parameters"
        return Verdict(False, cause, failed.what, tuple(checks), (), 0.0, 0.0)
    floor = _floor(run.recipe, batch)
    trial = _train(run, batch, run.recipe.optimizer.lr, steps, floor, show)
    target = _target(trial, floor)
    checks += _after(run, trial)
    del run
    learned = not trial.diverged and trial.losses[-1] <= target
    if learned and not failed:
        told = f"The loss fell from {trial.losses[0]:.4f} to {trial.losses[-1]:.4f} in {len(trial.losses)} steps, which is near zero (at most {target:.4f}): this setting can learn."
        return Verdict(True, "none", told, tuple(checks), tuple(trial.losses), floor, target)
    if failed:
        cause, reason = "data mask", failed.what
    else:
        cause, reason = _why(make, batch, trial, checks, steps, floor)
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

    # What techniques say about the data is known once a run is built.
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


def _labels_there(run: Run, batch: Batch) -> Check:
    count, total = batch.num_labels, batch.num_real
    if count == 0:
        return Check("mask", False, f"All {total:,} tokens of the batch are masked: nothing is trained. Look at what is a target with rush data inspect, and at data.format, data.template and objective.train_on.")  # fmt: skip
    units = run.objective.units(batch)
    pairs = "" if run.objective.unit == "label" else f", {units:,} {run.objective.unit}s"
    return Check("mask", True, f"{count:,} of {total:,} tokens are trained ({count / total:.0%}){pairs}")


def _labels_right(batch: Batch) -> Check:
    wrong = misaligned(batch)
    if wrong is None:
        return Check("labels", True, "each label is the token that follows")
    return Check("labels", False, f"The labels are moved: {wrong}. The model would learn something else than to go on with a text; fix what makes the labels.")  # fmt: skip


def _parameters(run: Run) -> Check:
    every = list(run.model.named_parameters())
    trained, total = sum(p.numel() for _, p in every if p.requires_grad), sum(p.numel() for _, p in every)
    if trained == 0:
        return Check("parameters", False, "All parameters are frozen: none asks for a gradient. Take out what freezes them, or add adapters (technique lora).")  # fmt: skip
    return Check(
        "parameters", True, f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})"
    )


def _floor(recipe: Recipe, batch: Batch) -> float:
    """The loss a model that knows the batch by heart is left with."""
    if recipe.objective.kind != "dpo":
        return lowest_loss(batch)
    share = recipe.objective.label_smoothing
    return sum(p * math.log(1 / p) for p in (share, 1 - share) if p > 0)


def _target(trial: _Trial, floor: float) -> float:
    first = trial.losses[0] if trial.losses else math.inf
    return floor + min(NEAR_ZERO, MOST_LEFT * max(0.0, first - floor))


def _train(run: Run, batch: Batch, lr: float, steps: int, floor: float, show: Show) -> _Trial:
    trial = _Trial(frozen=[name for name, p in run.model.named_parameters() if not p.requires_grad])
    watched = _Watch(run)
    try:
        for step in range(1, steps + 1):
            loss = train_step(run, step, lr, [batch]).loss
            trial.losses.append(loss)
            show(step, loss)
            if step == min(LOOKED_AT, steps):
                trial.without_gradient, trial.changed = watched.look()
            if step > LOOKED_AT and loss <= _target(trial, floor):
                break
    except Diverged as error:
        trial.diverged = str(error)
    except torch.OutOfMemoryError:
        raise MachineError(
            "the batch does not fit into memory; lower batch.micro, a smaller batch is as conclusive."
        ) from None
    finally:
        watched.close()
    return trial


class _Watch:
    """Which parameters get a gradient in the first updates, and whether their weights move."""

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

    def look(self) -> tuple[list[str], float | None]:
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


def _after(run: Run, trial: _Trial) -> list[Check]:
    checks = []
    if trial.without_gradient:
        checks.append(Check("gradients", False, f"no gradient reaches {_few(trial.without_gradient)}"))
    elif trial.changed is not None:
        checks.append(Check("gradients", True, "every trained parameter gets a gradient"))
    if trial.changed is not None:
        dtype = str(next(p.dtype for p in run.model.parameters() if p.requires_grad)).removeprefix("torch.")
        what = f"{trial.changed:.1%} of the weights with a gradient changed in the first {LOOKED_AT} updates ({dtype})"
        checks.append(Check("updates", trial.changed >= 0.5, what))
    return checks


def _why(
    make: MakeRun, batch: Batch, trial: _Trial, checks: list[Check], steps: int, floor: float
) -> tuple[Cause, str]:
    """The reason, in the order in which one would rule out another."""
    bad = {check.name: check.what for check in checks if not check.good}
    told = _course(trial)
    if trial.diverged and not trial.losses:
        return "start", f"The very first loss is no finite number: the starting weights are damaged, or the precision is too low for them ({trial.diverged})"  # fmt: skip
    if "gradients" in bad:
        return "frozen parameters", f"{told}; {bad['gradients']}: something cuts them off from the loss (a detach, a frozen layer's output). Look at those layers."  # fmt: skip
    if "updates" in bad:
        return "precision", f"{told}; only {bad['updates']}: the rest was rounded away, because a step of the learning rate is smaller than the distance between two numbers of that precision. Raise optimizer.lr, round by chance (fused_update with stochastic_rounding), or keep fp32 weights (amp_bf16, bf16_master)."  # fmt: skip
    lr, best, tried, cause = _other_rates(make, batch, trial, steps, floor)
    if cause and not (cause == "low" and trial.frozen and _flat(trial)):
        return "learning rate", f"{told}; with optimizer.lr={lr:g} it is {best:.4f} after {tried}, so the learning rate is too {cause}. Try that one."  # fmt: skip
    if trial.diverged:
        return "learning rate", f"{told}; a tenth of the learning rate does not help either. Try much less, with a warm-up."  # fmt: skip
    if trial.frozen:
        trained = next(check.what for check in checks if check.name == "parameters")
        return "frozen parameters", f"{told}, and another learning rate does not help; {trained}, frozen are {_few(trial.frozen)}. Train more of them (a higher rank, more roles), or give it more steps."  # fmt: skip
    return "unknown", f"{told}, and none of the usual reasons was found; give it more steps (--steps), or a larger model."  # fmt: skip


def _other_rates(
    make: MakeRun, batch: Batch, trial: _Trial, steps: int, floor: float
) -> tuple[float, float, int, str]:
    """A rate ten or a hundred times higher or lower that does clearly better in as many steps: what it is, the loss and
    the steps, and what that says about the recipe's; no word where there is none."""
    steps = min(steps, TRIED)
    first = trial.losses[0]
    mine = trial.losses[steps - 1] if len(trial.losses) >= steps else trial.last
    best: tuple[float, float, int, str] = (0.0, mine, steps, "")
    for factors, word in (((10.0, 100.0), "low"), ((0.1, 0.01), "high")):
        for factor in factors:
            run = make()
            lr = factor * run.recipe.optimizer.lr
            other = _train(run, batch, lr, steps, floor, lambda step, loss: None).last
            # Much nearer to the floor; or, where both have hardly begun, twice as far from the start.
            further = first - other > max(2 * (first - mine), 0.001 * (first - floor))
            if other < best[1] and (other - floor < 0.8 * (mine - floor) or further):
                best = lr, other, steps, word
            else:
                break
        if best[3]:
            break
    return best


def _flat(trial: _Trial) -> bool:
    """Whether the last quarter of the steps brought hardly anything: it is as far as this setting gets."""
    losses = trial.losses
    return losses[-len(losses) // 4] - trial.last < 0.1 * (losses[0] - trial.last)


def _course(trial: _Trial) -> str:
    """How the loss went, in words."""
    losses = trial.losses
    if trial.diverged:
        began = f"from {losses[0]:.4f} " if losses else ""
        return f"The loss went {began}to no finite number at step {len(losses) + 1}"
    verb = "rose" if trial.last > losses[0] else "only fell"
    return f"The loss {verb} from {losses[0]:.4f} to {trial.last:.4f} in {len(losses)} steps"


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
