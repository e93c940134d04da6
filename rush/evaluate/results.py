"""`rush evaluate`: all metrics of one model, or of two side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rush.data import Tokenizer
from rush.errors import DataError
from rush.evaluate.held_out import HeldOutData, open_held_out
from rush.evaluate.measures import (
    HeldOut,
    Scores,
    Wins,
    chosen_loss,
    first_prompts,
    greedy_answer,
    held_out_loss,
    score_pairs,
    win_rates,
)
from rush.evaluate.multiple_choice import Accuracy, Question, multiple_choice, read_questions
from rush.hardware import probe
from rush.hub.answers import encode_question
from rush.hub.folders import load_model, read_weights
from rush.hub.tokenizers import load_tokenizer
from rush.models import Decoder

Note = Callable[[str], None]


@dataclass(frozen=True)
class EvaluatedModel:
    folder: str
    held_out: HeldOut | None
    wins: Wins | None
    choices: Accuracy | None


@dataclass(frozen=True)
class Answers:
    """One prompt, and each model's answer."""

    prompt: str
    texts: list[str]


@dataclass(frozen=True)
class Evaluation:
    about: str
    """Description of the data; empty where only prompts were answered."""
    models: list[EvaluatedModel]
    answers: list[Answers]


def evaluate_models(
    folder: Path,
    against: Path | None = None,
    *,
    data: str | None = None,
    choices: Path | None = None,
    questions: Sequence[str] = (),
    answers: int = 3,
    max_tokens: int = 80,
    limit: int | None = None,
    rows: int = 16,
    checkpoint: str = "last",
    device: str = "auto",
    note: Note = lambda text: None,
) -> Evaluation:
    """Evaluate a model, after the one it is compared with; only one is in memory at a time."""
    asked = [] if choices is None else read_questions(choices, limit)
    place = probe(device).device
    folders = [path for path in (against, folder) if path is not None]
    held_out: HeldOutData | None = None
    prompts: list[list[int]] = []
    evaluated: list[EvaluatedModel] = []
    texts: list[list[str]] = []
    before: Scores | None = None
    tokenizer = _shared_tokenizer(folders)
    for which, path in zip(("last", checkpoint)[-len(folders) :], folders, strict=True):
        model = load_model(path, checkpoint=which, device=place, note=note)
        if held_out is None and _wants_data(folder, data, choices, questions):
            held_out = open_held_out(folder, data, model.shape, rows, limit, note)
        if not evaluated:
            prompts = [encode_question(tokenizer, question) for question in questions]
            if held_out is not None and held_out.documents is not None:
                prompts += first_prompts(held_out.documents, answers)
        scores = score_pairs(model, held_out.batches()) if held_out is not None and held_out.paired else None
        evaluated.append(_evaluate_model(path, model, tokenizer, held_out, scores, before, asked, rows))
        texts.append([greedy_answer(model, tokenizer, prompt, max_tokens) for prompt in prompts])
        before = scores
        del model
    shown = [tokenizer.decode(prompt).strip() for prompt in prompts]
    said = [Answers(prompt, list(each)) for prompt, *each in zip(shown, *texts, strict=True)]
    return Evaluation(held_out.about if held_out else "", evaluated, said)


def _wants_data(folder: Path, data: str | None, choices: Path | None, questions: Sequence[str]) -> bool:
    """Whether to use held-out data: not where only prompts or choices were given for a folder without a recipe."""
    return data is not None or (folder / "recipe.toml").is_file() or not (choices or questions)


def _evaluate_model(
    path: Path,
    model: Decoder,
    tokenizer: Tokenizer,
    held_out: HeldOutData | None,
    scores: Scores | None,
    before: Scores | None,
    asked: list[Question],
    rows: int,
) -> EvaluatedModel:
    loss = None
    if held_out is not None:
        loss = chosen_loss(scores) if scores else held_out_loss(model, held_out.batches())
    return EvaluatedModel(
        folder=str(path),
        held_out=loss,
        wins=win_rates(scores, before) if scores else None,
        choices=multiple_choice(model, tokenizer, asked, rows) if asked else None,
    )


def _shared_tokenizer(folders: list[Path]) -> Tokenizer:
    for path in folders:
        if not (path / "recipe.toml").is_file() and not (path / "config.json").is_file():
            read_weights(path)  # raises with what the folder is
    tokenizers = [load_tokenizer(path) for path in folders]
    if (why := tokenizers[0].difference(tokenizers[-1])) is not None:
        raise DataError(
            f"{folders[0]} and {folders[-1]} have different tokenizers, so their losses and probabilities cannot be "
            f"compared ({why}); compare models that share one."
        )
    return tokenizers[-1]
