"""Evaluation metrics: held-out loss, win rate of chosen over rejected answers, greedy answers.

All metrics are log-probabilities of labels, by the forward of training. Proportions have a 95 % interval (Wilson 1927): a win
rate of 55 % on a hundred pairs says little. Two models are compared on the same pairs, with the interval of paired proportions
(Bonett and Price 2012), which is far narrower than two separate intervals.

Legend: b rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rush.data import Batch, Tokenizer
from rush.data.batch import IGNORED
from rush.data.documents import Documents
from rush.errors import DataError
from rush.hub.answers import answer_stop_ids
from rush.models import Decoder
from rush.sampling import generate
from rush.training.objectives.preference import log_probabilities


@dataclass(frozen=True)
class Share:
    """A proportion of `count` with its 95 % interval; a tie counts half."""

    share: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.share:.1%} [{self.low:.1%}, {self.high:.1%}] of {self.count:,}"


def proportion(wins: Sequence[float]) -> Share:
    """The proportion of wins (1, 0, or a half) with Wilson's interval."""
    count, z = len(wins), 1.959964
    p = sum(wins) / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return Share(p, max(0.0, middle - half), min(1.0, middle + half), count)


@dataclass(frozen=True)
class Change:
    """The change of a proportion on the same pairs, with its 95 % interval; a change to or from a tie counts half."""

    change: float
    low: float
    high: float
    won: float
    lost: float
    count: int

    def __str__(self) -> str:
        points = [f"{100 * value:+.1f}" for value in (self.change, self.low, self.high)]
        return f"{points[0]} points [{points[1]}, {points[2]}]: {self.won:g} won, {self.lost:g} lost of {self.count:,}"


def change_of(before: Sequence[float], after: Sequence[float]) -> Change:
    """The change from `before` to `after` (1, 0 or a half per pair): Bonett and Price's adjusted Wald interval, which adds one
    pair to each direction and so holds where few pairs change."""
    moved = [b - a for a, b in zip(before, after, strict=True)]
    won, lost = sum(m for m in moved if m > 0), -sum(m for m in moved if m < 0)
    count, z = len(moved), 1.959964
    up, down = (won + 1) / (count + 2), (lost + 1) / (count + 2)
    half = z * math.sqrt((up + down - (up - down) ** 2) / (count + 2))
    low, high = max(-1.0, up - down - half), min(1.0, up - down + half)
    return Change((won - lost) / count, low, high, won, lost, count)


@dataclass(frozen=True)
class HeldOut:
    loss: float
    """Mean over labels, in nats."""
    perplexity: float
    labels: int


@torch.no_grad()
def held_out_loss(model: Decoder, batches: Iterable[Batch]) -> HeldOut:
    """The mean loss over all labels; for pairs, over the chosen answers."""
    total, labels = 0.0, 0
    for batch in batches:
        rows = slice(0, len(batch.tokens_bt) // 2) if batch.paired else slice(None)
        known = int((batch.labels_bt[rows] != IGNORED).sum())
        total -= float(_log_probs(model, batch)[rows].sum())
        labels += known
    return _held_out(total, labels)


def _held_out(total: float, labels: int) -> HeldOut:
    if labels == 0:
        raise DataError(
            "the held-out data has no label, so there is no loss; all labels are masked, or nothing is held out."
        )
    return HeldOut(total / labels, math.exp(min(700.0, total / labels)), labels)


@dataclass(frozen=True)
class Scores:
    """Summed log-probabilities and token counts of the chosen and rejected answers of pairs."""

    chosen: list[float]
    rejected: list[float]
    chosen_tokens: list[int]
    rejected_tokens: list[int]


@dataclass(frozen=True)
class Wins:
    """How often the chosen answer wins: by the summed log-probability, and per token (long answers are less likely)."""

    by_sum: Share
    by_token: Share
    logp_chosen: float
    logp_rejected: float
    by_reward: Share | None = None
    """By DPO's implicit reward: the change of log-probability against the other model."""
    change_by_sum: Change | None = None
    """Against another model, on the same pairs."""
    change_by_token: Change | None = None


@torch.no_grad()
def score_pairs(model: Decoder, batches: Iterable[Batch]) -> Scores:
    """Log-probabilities of every pair; padding pairs are left out."""
    scores = Scores([], [], [], [])
    for batch in batches:
        if not batch.paired:
            raise DataError("win rates need pairs of a chosen and a rejected answer; found single answers.")
        logp = _log_probs(model, batch).tolist()
        tokens = (batch.labels_bt != IGNORED).sum(1).tolist()
        half = len(logp) // 2
        for pair in range(half):
            if tokens[pair]:
                scores.chosen.append(logp[pair])
                scores.rejected.append(logp[pair + half])
                scores.chosen_tokens.append(tokens[pair])
                scores.rejected_tokens.append(tokens[pair + half])
    if not scores.chosen:
        raise DataError("there is no held-out pair to compare; give more pairs, or raise data.validation.")
    return scores


def chosen_loss(scores: Scores) -> HeldOut:
    """The held-out loss of the chosen answers, from their scores."""
    return _held_out(-sum(scores.chosen), sum(scores.chosen_tokens))


def win_rates(scores: Scores, before: Scores | None = None) -> Wins:
    """Proportions of pairs won; with the scores of another model on the same pairs, also by DPO's implicit reward, and the
    changes."""
    count = len(scores.chosen)
    by_sum, by_token = _wins_by_sum(scores), _wins_by_token(scores)
    wins = Wins(
        by_sum=proportion(by_sum),
        by_token=proportion(by_token),
        logp_chosen=sum(scores.chosen) / count,
        logp_rejected=sum(scores.rejected) / count,
    )
    if before is None:
        return wins
    answers = zip(scores.chosen, before.chosen, scores.rejected, before.rejected, strict=True)
    return replace(
        wins,
        by_reward=proportion([_win(c - bc, r - br) for c, bc, r, br in answers]),
        change_by_sum=change_of(_wins_by_sum(before), by_sum),
        change_by_token=change_of(_wins_by_token(before), by_token),
    )


def _wins_by_sum(scores: Scores) -> list[float]:
    return [_win(c, r) for c, r in zip(scores.chosen, scores.rejected, strict=True)]


def _wins_by_token(scores: Scores) -> list[float]:
    chosen = [c / n for c, n in zip(scores.chosen, scores.chosen_tokens, strict=True)]
    rejected = [r / n for r, n in zip(scores.rejected, scores.rejected_tokens, strict=True)]
    return [_win(c, r) for c, r in zip(chosen, rejected, strict=True)]


def _win(mine: float, other: float) -> float:
    return 0.5 if mine == other else float(mine > other)


def _log_probs(model: Decoder, batch: Batch) -> Tensor:
    return log_probabilities(model, batch.to(model.embedding.weight.device)).cpu()


def inputs_and_labels(tokens: Sequence[int], labels_from: int) -> tuple[list[int], list[int]]:
    """Inputs and labels of a row, labeled from the token `labels_from` on."""
    labels = [IGNORED if place < labels_from else token for place, token in enumerate(tokens)]
    return list(tokens[:-1]), labels[1:]


def padded_batches(rows: Sequence[tuple[list[int], list[int]]], size: int) -> Iterator[Batch]:
    """Batches of (tokens, labels), padded to the longest row."""
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        width = max(len(tokens) for tokens, _ in some)
        tokens = [tokens + [0] * (width - len(tokens)) for tokens, _ in some]
        labels = [labels + [IGNORED] * (width - len(labels)) for _, labels in some]
        yield Batch(torch.tensor(tokens), torch.tensor(labels))


@torch.no_grad()
def score_rows(model: Decoder, rows: Sequence[tuple[list[int], list[int]]], size: int) -> list[float]:
    """The summed log-probability of each row's labels."""
    return [value for batch in padded_batches(rows, size) for value in _log_probs(model, batch).tolist()]


def first_prompts(documents: Documents, count: int) -> list[list[int]]:
    """The first few distinct prompts: the tokens before a document's first label."""
    found: list[list[int]] = []
    for index in range(len(documents)):
        if len(found) == count:
            break
        first = int(documents.trained(index).argmax())
        prompt = documents.tokens(index)[:first].tolist()
        if prompt and prompt not in found:
            found.append(prompt)
    return found


def greedy_answer(model: Decoder, tokenizer: Tokenizer, prompt: Sequence[int], max_tokens: int) -> str:
    """The greedy answer, up to the end of the turn."""
    ends = [end for end in answer_stop_ids(tokenizer) if end < model.shape.vocab_size]
    room = max(0, model.shape.context - len(prompt))
    ids = generate(model, prompt, max_new_tokens=min(max_tokens, room), temperature=0.0, stop_ids=ends)
    return tokenizer.decode(list(ids)).strip()
