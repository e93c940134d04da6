"""Evaluation, against values computed by hand: one label at a time, from full logits, in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rush.data import Batch, Tokenizer
from rush.data.batch import IGNORED
from rush.data.document_loader import document_validation
from rush.data.packing import Pad
from rush.data.tokenizer import train_bpe
from rush.errors import DataError
from rush.evaluate.measures import (
    HeldOut,
    change_of,
    chosen_loss,
    first_prompts,
    greedy_answer,
    held_out_loss,
    proportion,
    score_pairs,
    win_rates,
)
from rush.evaluate.multiple_choice import (
    Question,
    encode_choice,
    multiple_choice,
    read_questions,
)
from rush.hub.answers import encode_question
from rush.models import Decoder, build_model
from rush.recipe_io import load_recipe
from tests.training.small_pairs import PairsInMemory

TEXT = "the quick brown fox jumps over the lazy dog while a small cat sleeps under the old apple tree " * 8


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([TEXT], 300)


@pytest.fixture(scope="module")
def model() -> Decoder:
    changes = ["model.shape.num_layers=2", "model.shape.hidden=32", "model.shape.head_dim=8", "model.shape.intermediate=64",
               "model.shape.vocab_size=320"]  # fmt: skip
    made = build_model(load_recipe("tiny", changes).shape())
    made.init_weights(5)
    with torch.no_grad():  # far enough from uniform that choices differ
        for parameter in made.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else None
    return made.eval().requires_grad_(False)


def by_hand(model: Decoder, tokens: list[int], first: int) -> float:
    """log p of tokens[first:] after what stands before them, in a row of its own."""
    logp = model(torch.tensor([tokens[:-1]])).double().log_softmax(-1)[0]
    return float(sum(logp[place - 1, tokens[place]] for place in range(first, len(tokens))))


def test_held_out_loss_is_the_mean_over_labels(model: Decoder) -> None:
    documents = PairsInMemory(5, seed=4, vocabulary=300)
    found = held_out_loss(model, document_validation(documents, Pad(0), 4, 16))
    sums = [by_hand(model, documents.tokens(i).tolist(), 3) for i in range(10)]
    labels = sum(len(documents.tokens(i)) - 3 for i in range(10))
    assert found == HeldOut(pytest.approx(-sum(sums) / labels, rel=1e-5), pytest.approx(math.exp(-sum(sums) / labels), rel=1e-4), labels)  # fmt: skip
    # Of pairs, the chosen answers (the even ones) only.
    pairs = held_out_loss(model, document_validation(documents, Pad(0), 2, 16, paired=True))
    chosen = sum(len(documents.tokens(i)) - 3 for i in range(0, 10, 2))
    assert pairs.loss == pytest.approx(-sum(sums[::2]) / chosen, rel=1e-5)
    assert pairs.labels == chosen
    told = chosen_loss(score_pairs(model, document_validation(documents, Pad(0), 2, 16, paired=True)))
    assert (told.loss, told.labels) == (pytest.approx(pairs.loss, rel=1e-6), chosen)


def test_win_rates_by_sum_per_token_and_by_reward(model: Decoder) -> None:
    documents = PairsInMemory(9, seed=4, vocabulary=300)
    batches = lambda: document_validation(documents, Pad(0), 2, 16, paired=True)  # noqa: E731
    scores = score_pairs(model, batches())
    sums = [by_hand(model, documents.tokens(i).tolist(), 3) for i in range(18)]
    lengths = [len(documents.tokens(i)) - 3 for i in range(18)]
    assert scores.chosen == pytest.approx(sums[::2], rel=1e-5)
    assert scores.rejected == pytest.approx(sums[1::2], rel=1e-5)
    assert (scores.chosen_tokens, scores.rejected_tokens) == (lengths[::2], lengths[1::2])
    wins = win_rates(scores)
    assert wins.by_sum.share == sum(sums[i] > sums[i + 1] for i in range(0, 18, 2)) / 9
    means = [total / length for total, length in zip(sums, lengths, strict=True)]
    assert wins.by_token.share == sum(means[i] > means[i + 1] for i in range(0, 18, 2)) / 9
    assert wins.by_sum.share != wins.by_token.share, "the documents are too alike to tell the two apart"
    assert wins.by_reward is None
    assert wins.logp_chosen == pytest.approx(sum(sums[::2]) / 9, rel=1e-5)
    other = build_model(model.shape)
    other.init_weights(77)
    other.requires_grad_(False)
    before = score_pairs(other, batches())
    moved = win_rates(scores, before).by_reward
    assert moved is not None
    theirs = [by_hand(other, documents.tokens(i).tolist(), 3) for i in range(18)]
    assert moved.share == sum(sums[i] - theirs[i] > sums[i + 1] - theirs[i + 1] for i in range(0, 18, 2)) / 9
    changes = win_rates(scores, before).change_by_sum, win_rates(scores, before).change_by_token
    was = win_rates(before)
    for change, now, then in zip(
        changes, (wins.by_sum, wins.by_token), (was.by_sum, was.by_token), strict=True
    ):
        assert change is not None
        assert change.change == pytest.approx(now.share - then.share)
    same = win_rates(before, before)
    assert same.by_reward is not None
    assert same.by_reward.share == 0.5, "a model has not moved from itself"
    assert same.change_by_sum is not None
    assert (same.change_by_sum.won, same.change_by_sum.lost) == (0, 0)


def test_the_interval_of_a_proportion_is_wilsons() -> None:
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662, 0 of 20 gives 0 to 0.1611, 1 of 29 gives 0.0061 to 0.1718.
    for wins, count, low, high in ((81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)):
        found = proportion([1.0] * wins + [0.0] * (count - wins))
        assert (round(found.low, 4), round(found.high, 4), found.count) == (low, high, count)


def test_a_paired_change_has_a_narrower_interval_than_two_proportions() -> None:
    before = [1.0] * 180 + [0.0] * 80
    after = [1.0] * 176 + [0.0] * 4 + [1.0] * 24 + [0.0] * 56  # 24 won, 4 lost
    found = change_of(before, after)
    assert (found.won, found.lost, found.count) == (24, 4, 260)
    assert found.change == pytest.approx(20 / 260)
    # By hand: up 25/262, down 5/262, variance (30/262 - (20/262)^2)/262.
    half = 1.959964 * math.sqrt((30 / 262 - (20 / 262) ** 2) / 262)
    assert (found.low, found.high) == (pytest.approx(20 / 262 - half), pytest.approx(20 / 262 + half))
    assert found.low > 0
    assert proportion(before).high > proportion(after).low, (
        "side by side the two shares could not be told apart"
    )
    assert change_of(before, before).change == 0
    assert change_of(before, before).low < 0 < change_of(before, before).high
    half_way = change_of([0.0, 0.5, 1.0, 1.0], [0.5, 0.5, 0.0, 1.0])
    assert (half_way.won, half_way.lost, half_way.change) == (0.5, 1.0, -0.125)
    assert str(found) == "+7.7 points [+3.6, +11.6]: 24 won, 4 lost of 260"


@pytest.mark.parametrize(("up", "down"), [(0.0, 0.0), (0.02, 0.02), (0.08, 0.02), (0.3, 0.1)])
def test_the_interval_of_a_change_has_its_nominal_coverage(up: float, down: float) -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(1000):
        draw = rng.random(200)
        before = np.where(draw < up, 0.0, np.where(draw < up + down, 1.0, draw > 0.7))
        after = np.where(draw < up, 1.0, np.where(draw < up + down, 0.0, before))
        found = change_of(before.tolist(), after.tolist())
        hits += found.low <= up - down <= found.high
    assert hits >= 935, "an interval that promises 95 % may miss a little by chance, not more"


QUESTIONS = [
    Question("the quick brown", ("fox jumps", "cat", "dog while the old apple tree"), 0),
    Question("a small cat", ("tree", "sleeps under the old apple tree", "dog dog"), 1),
    Question("under the old", ("apple tree", "lazy", "quick brown fox jumps over"), 2),
    Question("the lazy dog ", ("while", "the cat sleeps", "a"), 1),
]


def test_multiple_choice_against_each_choice_scored_alone(model: Decoder, tokenizer: Tokenizer) -> None:
    plain = normed = 0
    for question in QUESTIONS:
        scores = []
        for choice in question.choices:
            context = question.context.rstrip()
            begin, whole = (
                tokenizer.encode(context),
                tokenizer.encode(f"{context}{question.context[len(context) :]} {choice}"),
            )
            scores.append(by_hand(model, whole, len(begin)))
        plain += int(np.argmax(scores)) == question.gold
        normed += (
            int(np.argmax([s / len(c) for s, c in zip(scores, question.choices, strict=True)]))
            == question.gold
        )
    assert plain != normed, "the questions do not tell acc from acc_norm"
    for size in (1, 5, 64):
        found = multiple_choice(model, tokenizer, QUESTIONS, size)
        assert (found.acc.share, found.acc_norm.share) == (plain / 4, normed / 4)
        assert found.acc.count == 4


def test_a_choice_starts_after_the_context_and_an_empty_context_is_a_bos_token(
    tokenizer: Tokenizer,
) -> None:
    tokens, begin = encode_choice(tokenizer, "the lazy dog ", "sleeps")
    assert tokenizer.decode(tokens[:begin]) == "the lazy dog"
    assert tokenizer.decode(tokens[begin:]) == "  sleeps"
    tokens, begin = encode_choice(tokenizer, "", "fox")
    assert (tokens[0], begin) == (tokenizer.eos_id, 1)
    assert tokenizer.decode(tokens[1:]) == " fox"


def test_a_context_too_long_is_truncated_on_the_left(model: Decoder, tokenizer: Tokenizer) -> None:
    long = "cat " * 400 + "fox"
    assert len(tokenizer.encode(long)) > model.shape.context
    found = multiple_choice(model, tokenizer, [Question(long, ("jumps", "sleeps under"), 0)])
    kept = [encode_choice(tokenizer, long, choice) for choice in ("jumps", "sleeps under")]
    scores = []
    for tokens, begin in kept:
        cut = len(tokens) - 1 - model.shape.context
        scores.append(by_hand(model, tokens[cut:], begin - cut))
    assert found.acc.share == float(scores[0] > scores[1])


def test_hellaswags_own_rows_are_read_as_the_harness_reads_them(tmp_path: Path) -> None:
    row = {
        "ind": 24,
        "activity_label": "Roof shingle removal",
        "ctx_a": "A man is sitting on a roof.",
        "ctx_b": "he",
        "ctx": "A man is sitting on a roof. he",
        "endings": [
            "is using wrap.",
            "is ripping [x] tiles  off.",
            "holds [step] a cube [title] up.",
            "starts.",
        ],
        "label": "3",
    }
    file = tmp_path / "h.jsonl"
    file.write_text(
        json.dumps(row) + "\n\n" + json.dumps({"query": "one", "choices": ["a", "b"], "gold": 1}) + "\n"
    )
    first, second = read_questions(file)
    assert first.context == "Roof shingle removal: A man is sitting on a roof. He"
    assert first.choices == ("is using wrap.", "is ripping tiles off.", "holds a cube. up.", "starts.")
    assert first.gold == 3
    assert second == Question("one", ("a", "b"), 1)
    assert len(read_questions(file, limit=1)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no question"),
        ("{", "line 1: not JSON"),
        ("[1]", "found list"),
        ('{"endings": ["a", "b"], "label": 0}', r"ctx \(or query\) is missing"),
        ('{"ctx": "x", "label": 0}', r"endings \(or choices\) is missing"),
        ('{"ctx": "x", "endings": ["a", "b"]}', r"label \(or gold\) is missing"),
        ('{"ctx": "x", "endings": ["a", ""], "label": 0}', "a list of texts"),
        ('{"ctx": "x", "endings": ["a", "b"], "label": 2}', "0 to 1"),
        ('{"ctx": "x", "endings": ["a", "b"], "label": "one"}', "0 to 1"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        read_questions(file)


def test_data_without_labels_or_pairs_is_refused(model: Decoder, tmp_path: Path) -> None:
    tokens = torch.ones(2, 4, dtype=torch.int64)
    masked = Batch(tokens, torch.full((2, 4), IGNORED))
    with pytest.raises(DataError, match="no label"):
        held_out_loss(model, [masked])
    with pytest.raises(DataError, match="need pairs"):
        score_pairs(model, [Batch(tokens, tokens)])
    with pytest.raises(DataError, match="no held-out pair"):
        score_pairs(model, [])
    with pytest.raises(DataError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")


def test_answers_are_greedy_up_to_the_stop_token(model: Decoder, tokenizer: Tokenizer) -> None:
    prompt = encode_question(tokenizer, "the quick")
    assert prompt == tokenizer.encode("the quick")
    tokens = list(prompt)
    for _ in range(6):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert tokenizer.eos_id not in tokens
    assert greedy_answer(model, tokenizer, prompt, 6) == tokenizer.decode(tokens[len(prompt) :]).strip()


def test_prompts_are_the_tokens_before_the_first_label_without_repeats() -> None:
    documents = PairsInMemory(4, seed=4, vocabulary=300)
    found: Any = first_prompts(documents, 3)
    assert found == [documents.tokens(2 * pair)[:3].tolist() for pair in range(3)]
