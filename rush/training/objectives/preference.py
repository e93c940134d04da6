"""Preferences: make the chosen answer of a pair more likely than the rejected one, in one of four ways.

`sigmoid` is DPO (Rafailov et al. 2023, arXiv:2305.18290): a logistic loss on how much further the model has
moved towards the chosen answer than towards the rejected one, relative to a reference; with label smoothing
it is "conservative" DPO (Mitchell 2023): a fraction of the pairs is assumed to be swapped. `ipo` (Azar et al.
2023, arXiv:2310.12036) drives that distance to a fixed number instead of maximizing it. `orpo` (Hong et al.
2024, arXiv:2403.07691) and `simpo` (Meng et al. 2024, arXiv:2405.14734) need no reference.

Summed log-probabilities depend on the length of an answer: orpo and simpo divide them by the number of
tokens, as in their papers. The ipo paper does not specify it; its authors later chose the mean (see
docs/finetuning/preferences.md), and so do we. DPO uses sums.

Legend: b rows, n pairs, t positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rush.data import Batch
from rush.data.batch import IGNORED
from rush.errors import DataError, RecipeError
from rush.models.adapters import adapters_off, is_adapted
from rush.recipe import ObjectiveSection, Recipe
from rush.training.objectives.next_token import model_inputs

REFERENCE_FREE = ("orpo", "simpo")
FIGURES = ("reward_chosen", "reward_rejected", "reward_margin", "accuracy", "logp_chosen", "logp_rejected")


@dataclass(frozen=True)
class Pairs:
    """A model's summed log-probabilities of the answers of n pairs, and the number of tokens summed."""

    chosen_n: Tensor
    rejected_n: Tensor
    chosen_tokens_n: Tensor
    rejected_tokens_n: Tensor
    reference_chosen_n: Tensor | None = None
    reference_rejected_n: Tensor | None = None


class Judged(NamedTuple):
    """The loss of each pair, and the implicit reward of each answer."""

    loss_n: Tensor
    reward_chosen_n: Tensor
    reward_rejected_n: Tensor


def sigmoid_loss(pairs: Pairs, settings: ObjectiveSection) -> Judged:
    """−(1−ε)·log σ(β·Δ) − ε·log σ(−β·Δ), with Δ the difference of the two answers' log-ratios to the reference."""
    chosen_n, rejected_n = _log_ratios(pairs)
    margin_n = settings.beta * (chosen_n - rejected_n)
    smoothing = settings.label_smoothing
    loss_n = -(1 - smoothing) * F.logsigmoid(margin_n) - smoothing * F.logsigmoid(-margin_n)
    return Judged(loss_n, settings.beta * chosen_n, settings.beta * rejected_n)


def ipo_loss(pairs: Pairs, settings: ObjectiveSection) -> Judged:
    """(Δ − 1/2β)², with Δ the difference of the log-ratios per token; β is the paper's τ."""
    chosen_n, rejected_n = _log_ratios(pairs)
    chosen_n, rejected_n = chosen_n / pairs.chosen_tokens_n, rejected_n / pairs.rejected_tokens_n
    loss_n = (chosen_n - rejected_n - 1 / (2 * settings.beta)).square()
    return Judged(loss_n, settings.beta * chosen_n, settings.beta * rejected_n)


def orpo_loss(pairs: Pairs, settings: ObjectiveSection) -> Judged:
    """The chosen answer's loss per token, plus β·(−log σ(log odds ratio)); β is the paper's λ."""
    chosen_n = pairs.chosen_n / pairs.chosen_tokens_n
    rejected_n = pairs.rejected_n / pairs.rejected_tokens_n
    odds_n = _log_odds(chosen_n) - _log_odds(rejected_n)
    loss_n = -chosen_n - settings.beta * F.logsigmoid(odds_n)
    return Judged(loss_n, settings.beta * chosen_n, settings.beta * rejected_n)


def simpo_loss(pairs: Pairs, settings: ObjectiveSection) -> Judged:
    """−log σ(β·(difference of the log-probabilities per token) − γ), with γ the recipe's margin."""
    chosen_n = settings.beta * pairs.chosen_n / pairs.chosen_tokens_n
    rejected_n = settings.beta * pairs.rejected_n / pairs.rejected_tokens_n
    return Judged(-F.logsigmoid(chosen_n - rejected_n - settings.margin), chosen_n, rejected_n)


LOSSES: Mapping[str, Callable[[Pairs, ObjectiveSection], Judged]] = {
    "sigmoid": sigmoid_loss,
    "ipo": ipo_loss,
    "orpo": orpo_loss,
    "simpo": simpo_loss,
}


def _log_ratios(pairs: Pairs) -> tuple[Tensor, Tensor]:
    assert pairs.reference_chosen_n is not None
    assert pairs.reference_rejected_n is not None
    return pairs.chosen_n - pairs.reference_chosen_n, pairs.rejected_n - pairs.reference_rejected_n


def _log_odds(log_p_n: Tensor) -> Tensor:
    """log(p / (1 − p)) from log p, without the cancellation of 1 − p near p = 1."""
    log_p_n = log_p_n.clamp(max=-1e-7)  # a probability of exactly one has infinite odds
    return log_p_n - torch.log(-torch.expm1(log_p_n))


def needs_reference(settings: ObjectiveSection) -> bool:
    return settings.loss not in REFERENCE_FREE


def log_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    """The summed log-probability of each row's labels [b], through the model's own forward and loss head."""
    losses_b: Tensor = model(batch.tokens_bt, batch.labels_bt, **model_inputs(batch), by_row=True)
    return -losses_b


class Preference:
    """The mean loss over pairs. A pair without any label only fills up a batch, and counts for nothing."""

    unit = "pair"

    def __init__(self, recipe: Recipe) -> None:
        check_preferences(recipe)
        self.settings = recipe.objective
        self.reference_model: nn.Module | None = None
        """The frozen model beside the trained one; with adapters it is the trained one without them."""
        self._sums: Tensor | None = None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pairs, real_n = self.pairs(model, batch)
        judged = LOSSES[self.settings.loss](pairs, self.settings)
        self._note(pairs, judged, real_n)
        return torch.where(real_n, judged.loss_n, 0.0).sum()

    def answers(self, model: nn.Module, batch: Batch) -> Tensor:
        """The log-probabilities of the answers of a batch [b], as the reference is computed before training."""
        return log_probabilities(model, batch)

    def pairs(self, model: nn.Module, batch: Batch) -> tuple[Pairs, Tensor]:
        """The log-probabilities of model and reference for the pairs of a batch, and which pairs are real."""
        tokens_b = (batch.labels_bt != IGNORED).sum(1)
        # The model first: a cast that autocast keeps from a pass without gradients would have none later.
        logp_b = log_probabilities(model, batch)
        reference = self._reference(model, batch).chunk(2) if needs_reference(self.settings) else (None, None)
        lengths_b = tokens_b.clamp(min=1).to(logp_b.dtype)
        pairs = Pairs(*logp_b.chunk(2), *lengths_b.chunk(2), *reference)
        return pairs, tokens_b[: len(tokens_b) // 2] > 0

    def units(self, batch: Batch) -> int:
        """Pairs with labels; refuses batches without preferences."""
        if not batch.paired or batch.tokens_bt.shape[0] % 2:
            raise DataError(
                f"objective.kind is dpo, but this batch of {batch.tokens_bt.shape[0]} rows ({_few(batch)}) does not hold "
                "pairs of a chosen and a rejected answer; give preference data (data.format = preference), and leave "
                "out a packing that puts several answers into one row."
            )
        pairs = batch.tokens_bt.shape[0] // 2
        labelled = (batch.labels_bt != IGNORED).any(1)
        if bool((one_sided := labelled[:pairs] != labelled[pairs:]).any()):
            raise DataError(
                f"one answer of {_name(batch, one_sided)} has no trained token, so there is nothing to compare; take the "
                "pair out, or let longer rows in with batch.sequence."
            )
        same = (batch.tokens_bt[:pairs] == batch.tokens_bt[pairs:]).all(1)
        same &= (batch.labels_bt[:pairs] == batch.labels_bt[pairs:]).all(1) & labelled[:pairs]
        if bool(same.any()):
            raise DataError(
                f"chosen and rejected are equal in {_name(batch, same)}, which prefers nothing; take the pair out."
            )
        return int(labelled[:pairs].sum())

    def figures(self, add: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, float]:
        """Means over the pairs since the last call; `accuracy` is the fraction in which the chosen answer has the higher reward
        (a tie counts half). `add` sums over the ranks."""
        if self._sums is None:
            return {}
        count, *sums = add(self._sums).tolist()
        self._sums.zero_()
        return {name: total / count for name, total in zip(FIGURES, sums, strict=True)} if count else {}

    @torch.no_grad()
    def _reference(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.settings.reference == "cached":
            if batch.reference_b is None:
                raise DataError(
                    "objective.reference is cached, but this batch carries no log-probabilities of a reference; compute them "
                    "before training, or set objective.reference=live."
                )
            return batch.reference_b
        if is_adapted(model):
            with adapters_off(model):
                return log_probabilities(model, batch)
        assert self.reference_model is not None, (
            "a live reference is a model of its own; see rush.training.reference"
        )
        return log_probabilities(self.reference_model, batch)

    @torch.no_grad()
    def _note(self, pairs: Pairs, judged: Judged, real_n: Tensor) -> None:
        # Accumulated on the device in a static tensor: no synchronization, and a captured step includes it.
        margin_n = judged.reward_chosen_n - judged.reward_rejected_n
        wins_n = (margin_n > 0).float() + 0.5 * (margin_n == 0).float()
        columns = (
            judged.reward_chosen_n,
            judged.reward_rejected_n,
            margin_n,
            wins_n,
            pairs.chosen_n,
            pairs.rejected_n,
        )
        rows = torch.stack([torch.ones_like(wins_n), *(column.float() for column in columns)])
        total = torch.where(real_n, rows, 0.0).sum(1)
        if self._sums is None or self._sums.device != total.device:
            self._sums = torch.zeros_like(total)
        self._sums += total


def check_preferences(recipe: Recipe) -> None:
    """Refuse settings that belong to another loss than the one chosen."""
    settings = recipe.objective
    if settings.loss in REFERENCE_FREE and settings.reference == "live":
        raise RecipeError(
            f"objective.reference is live, but objective.loss = {settings.loss} compares with no reference; take "
            "objective.reference out, or choose sigmoid or ipo."
        )
    if settings.label_smoothing and settings.loss != "sigmoid":
        raise RecipeError(
            f"objective.label_smoothing is {settings.label_smoothing:g}, but objective.loss = {settings.loss} has no such "
            "term; take it out, or choose sigmoid."
        )
    if settings.margin and settings.loss != "simpo":
        raise RecipeError(
            f"objective.margin is {settings.margin:g}, but objective.loss = {settings.loss} has no such term; take it out, "
            "or choose simpo."
        )


def _few(batch: Batch) -> str:
    return ", ".join(batch.samples[:2]) or "unnamed"


def _name(batch: Batch, marked_n: Tensor) -> str:
    first = int(marked_n.nonzero()[0])
    return f"the pair {batch.samples[first]}" if batch.samples else f"pair {first} of a batch"
