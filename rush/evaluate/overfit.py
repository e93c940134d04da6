"""Overfit one batch: train until its loss is near zero, and diagnose why if it does not get there.

A model that cannot overfit one batch will not learn a corpus. The usual reasons are the labels (masked, shifted), the learning
rate, parameters that are frozen or get no gradient, and a precision that rounds the updates away. Each is checked here; for
the learning rate, ten and a hundred times higher and lower ones are tried.

On several ranks the batch is one micro batch of each data rank. Losses are those of the whole step, the same on every rank, so
all ranks take the same decisions; what only one of them sees (its labels, its shards) is gathered first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rush.data import Batch
from rush.errors import Diverged, MachineError
from rush.evaluate.label_checks import entropy_floor, misaligned
from rush.hardware import probe
from rush.hub.folders import starting_weights
from rush.parallel import Ranks, join
from rush.parallel.sharded import local_tensor
from rush.recipe import Recipe
from rush.techniques import check
from rush.training.build import Run, build
from rush.training.corpus import open_corpus
from rush.training.failures import RunStatus
from rush.training.loop import configuration
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


def overfit(
    make: MakeRun, own: Sequence[Batch], steps: int = 300, show: Show = lambda step, loss: None
) -> Verdict:
    """Train what `make` builds on one batch, at the recipe's constant learning rate, and give a verdict.

    The batch is a micro batch, or a few: `own` are those of this rank.
    """
    run = make()
    own = [_with_reference(run, batch) for batch in own]
    batches = _of_all_ranks(run.ranks, own)
    sizes = _parameter_sizes(run)
    checks = [_check_mask(run, batches), _check_labels(batches), _check_parameters(sizes)]
    failed = next((check for check in checks if not check.good), None)
    if failed and failed.name != "labels":
        # Nothing to train.
        cause: Cause = "data mask" if failed.name == "mask" else "frozen parameters"
        return Verdict(False, cause, failed.what, tuple(checks), (), 0.0, 0.0)
    floor = _floor(run.recipe, batches)
    trial = _train(run, own, run.recipe.optimizer.lr, steps, floor, show)
    trial.frozen = [name for name, (_, trained) in sizes.items() if not trained]
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
        cause, reason = _diagnose(make, own, trial, checks, steps, floor)
    return Verdict(False, cause, reason, tuple(checks), tuple(trial.losses), floor, target)


def overfit_recipe(
    recipe: Recipe, steps: int, note: Callable[[str], None], status: RunStatus | None = None
) -> Verdict:
    """`overfit` for a recipe: its data, its model, its first batch; on the ranks that its layout takes."""
    machine = probe(recipe.run.device)
    check(recipe, machine)
    objective_of(recipe)
    with join(
        recipe.layout.model_dump(), machine.device, configuration(recipe), recipe.run.timeout_s
    ) as ranks:
        if status is not None:
            status.ranks = ranks
        corpus = ranks.rank0_first(lambda: open_corpus(recipe, None, note if ranks.main else _silent))
        weights = starting_weights(recipe)

        def make() -> Run:
            run = build(recipe, machine, weights, ranks)
            set_live_reference(run, weights)
            return run

        # The loader options of techniques are known once a run is built.
        with corpus.loader(recipe, make().loader_options) as loader:
            step = iter(loader.next_step())
            # A pipeline takes as many micro batches as it has stages.
            batches = [next(step) for _ in range(recipe.layout.pp)]
        return overfit(make, batches, steps)


def _silent(text: str) -> None:
    """Other ranks than the first print nothing."""


def _of_all_ranks(ranks: Ranks, own: Sequence[Batch]) -> list[Batch]:
    """The micro batches of all data ranks, as far as the checks read them."""
    if ranks.alone:
        return list(own)
    every = dict(ranks.all_gather_object((ranks.data_rank, [_packed(batch) for batch in own])))
    return [_unpacked(held) for _, parts in sorted(every.items()) for held in parts]


def _packed(batch: Batch) -> dict[str, Any]:
    documents = None if batch.documents_bt is None else batch.documents_bt.tolist()
    return {
        "tokens": batch.tokens_bt.tolist(),
        "labels": batch.labels_bt.tolist(),
        "documents": documents,
        "padding": batch.padding,
        "paired": batch.paired,
    }


def _unpacked(held: dict[str, Any]) -> Batch:
    return Batch(
        torch.tensor(held["tokens"]),
        torch.tensor(held["labels"]),
        documents_bt=None if held["documents"] is None else torch.tensor(held["documents"]),
        padding=held["padding"],
        paired=held["paired"],
    )


def _parameter_sizes(run: Run) -> dict[str, tuple[int, bool]]:
    """The elements of each parameter of all pipeline stages, and whether it is trained."""
    own = {name: (p.numel(), p.requires_grad) for name, p in run.model.named_parameters()}
    every = [own] if run.ranks.alone else run.ranks.all_gather_object(own)
    return {name: (size, trained) for part in every for name, (size, trained) in part.items()}


def _with_reference(run: Run, batch: Batch) -> Batch:
    if not wants_cached(run) or batch.reference_b is not None or not batch.num_labels:
        return batch
    run.objective.units(batch)
    with torch.no_grad(), run.in_step(), run.autocast():
        held = log_probabilities(run.model, batch.to(run.device)).cpu()
    return replace(batch, reference_b=held)


def _check_mask(run: Run, batches: Sequence[Batch]) -> Check:
    count = sum(batch.num_labels for batch in batches)
    total = sum(batch.num_real for batch in batches)
    if count == 0:
        return Check("mask", False, f"All {total:,} tokens of the batch are masked: nothing is trained. See the labels with rush data inspect, and check data.format, data.template and objective.train_on.")  # fmt: skip
    units = sum(run.objective.units(batch) for batch in batches)
    pairs = "" if run.objective.unit == "label" else f", {units:,} {run.objective.unit}s"
    return Check("mask", True, f"{count:,} of {total:,} tokens are trained ({count / total:.0%}){pairs}")


def _check_labels(batches: Sequence[Batch]) -> Check:
    wrong = next(filter(None, map(misaligned, batches)), None)
    if wrong is None:
        return Check("labels", True, "each label is the next token")
    return Check("labels", False, f"The labels are shifted: {wrong}. The model would not learn next-token prediction; fix the labels.")  # fmt: skip


def _check_parameters(sizes: dict[str, tuple[int, bool]]) -> Check:
    total = sum(size for size, _ in sizes.values())
    trained = sum(size for size, is_trained in sizes.values() if is_trained)
    if trained == 0:
        return Check("parameters", False, "All parameters are frozen: none requires a gradient. Remove what freezes them, or add adapters (technique lora).")  # fmt: skip
    return Check(
        "parameters", True, f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})"
    )


def _floor(recipe: Recipe, batches: Sequence[Batch]) -> float:
    """The lowest possible loss on these batches."""
    if recipe.objective.kind != "dpo":
        return entropy_floor(*batches)
    share = recipe.objective.label_smoothing
    return sum(p * math.log(1 / p) for p in (share, 1 - share) if p > 0)


def _target(trial: _Trial, floor: float) -> float:
    first = trial.losses[0] if trial.losses else math.inf
    return floor + min(NEAR_ZERO, MOST_LEFT * max(0.0, first - floor))


def _train(run: Run, batches: Sequence[Batch], lr: float, steps: int, floor: float, show: Show) -> _Trial:
    trial = _Trial()
    monitor = _UpdateMonitor(run)
    try:
        for step in range(1, steps + 1):
            loss = train_step(run, step, lr, batches).loss
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
    """Which parameters get a gradient in the first updates, and whether their weights change.

    Looks at the shards of this rank: a parameter is reached if any rank's shard is.
    """

    def __init__(self, run: Run) -> None:
        self._ranks = run.ranks
        self._parameters = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._hook = run.optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, *_: object) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is None or name in self._before:
                continue
            places = local_tensor(parameter.grad).flatten().nonzero().flatten()
            if len(places):
                some = places[:: max(1, len(places) // SAMPLED)]
                self._before[name] = some, local_tensor(parameter.detach()).flatten()[some].clone()

    def result(self) -> tuple[list[str], float | None]:
        """The parameters without a gradient, and the fraction of the weights with one that changed."""
        self.close()
        moved = dict.fromkeys(self._parameters, 0)
        total = dict(moved)
        for name, (places, values) in self._before.items():
            now = local_tensor(self._parameters[name].detach()).flatten()[places]
            moved[name], total[name] = int((now != values).sum()), len(places)
        every = [(moved, total)] if self._ranks.alone else self._ranks.all_gather_object((moved, total))
        reached = {name for _, counts in every for name, count in counts.items() if count}
        names = dict.fromkeys(name for _, counts in every for name in counts)
        sampled = sum(sum(counts.values()) for _, counts in every)
        changed = sum(sum(counts.values()) for counts, _ in every)
        return [name for name in names if name not in reached], changed / sampled if sampled else None

    def close(self) -> None:
        self._hook.remove()


def _check_updates(run: Run, trial: _Trial) -> list[Check]:
    checks = []
    if trial.without_gradient:
        checks.append(Check("gradients", False, f"no gradient reaches {_few(trial.without_gradient)}"))
    elif trial.changed is not None:
        checks.append(Check("gradients", True, "every trained parameter gets a gradient"))
    if trial.changed is not None:
        dtype = str(next((p.dtype for p in run.model.parameters() if p.requires_grad), run.compute_dtype))
        what = f"{trial.changed:.1%} of the weights with a gradient changed in the first {CHECKED_AFTER} updates ({dtype.removeprefix('torch.')})"
        checks.append(Check("updates", trial.changed >= 0.5, what))
    return checks


def _diagnose(
    make: MakeRun, batches: Sequence[Batch], trial: _Trial, checks: list[Check], steps: int, floor: float
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
    lr, best, tried, cause = _try_other_rates(make, batches, trial, steps, floor)
    if cause and not (cause == "low" and trial.frozen and _plateaued(trial)):
        return "learning rate", f"{course}; with optimizer.lr={lr:g} it is {best:.4f} after {tried}, so the learning rate is too {cause}. Try that one."  # fmt: skip
    if trial.diverged:
        return "learning rate", f"{course}; a tenth of the learning rate does not help either. Try much less, with a warm-up."  # fmt: skip
    if trial.frozen:
        trained = next(check.what for check in checks if check.name == "parameters")
        return "frozen parameters", f"{course}, and another learning rate does not help; {trained}, frozen are {_few(trial.frozen)}. Train more of them (a higher rank, more roles), or give it more steps."  # fmt: skip
    return "unknown", f"{course}, and none of the usual reasons was found; give it more steps (--steps), or a larger model."  # fmt: skip


def _try_other_rates(
    make: MakeRun, batches: Sequence[Batch], trial: _Trial, steps: int, floor: float
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
            other = _train(run, batches, lr, steps, floor, lambda step, loss: None).last
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
