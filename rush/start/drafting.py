"""The tree of a recipe for a method and a row length, with a reason for each key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rush.data.conversations.turns import Conversation, Pair
from rush.data.packing import best_fit
from rush.errors import RecipeError
from rush.parallel import DATA_AXES
from rush.recipe import AUTO, LARGEST_NUMBER
from rush.recipe_io import apply_override, parse, value_at
from rush.start import decisions
from rush.start.data_files import DataFiles
from rush.start.decisions import Choice
from rush.start.fitting import Place
from rush.start.inspect import LengthFacts, RowFacts
from rush.start.methods import Method, techniques_for
from rush.start.model import StartModel

REFERENCE_SHARE = 1 / 3
"""Time of the reference's forward pass over the pairs, in epochs."""
LONGEST_PROMPT = 120


@dataclass(frozen=True)
class Findings:
    """The inputs of the decisions."""

    model: StartModel
    files: DataFiles
    rows: RowFacts
    lengths: LengthFacts
    place: Place
    objective: Choice
    template: Choice | None
    """None without conversations."""
    bad_rows: Choice
    vocab_size: int | None
    """Vocabulary of a tokenizer that will be trained; None: the model's vocabulary."""
    overrides: tuple[str, ...]
    given: dict[str, Any]
    """The values of the overrides, by dotted key."""

    @property
    def kind(self) -> str:
        return str(self.objective.value)

    @property
    def documents(self) -> int:
        """Conversations, texts or pairs."""
        return self.lengths.documents // (2 if self.kind == "dpo" else 1)

    def value(self, key: str, choice: Choice) -> Any:
        return self.given.get(key, choice.value)


@dataclass(frozen=True)
class Draft:
    tree: dict[str, Any]
    reasons: dict[str, str]


def draft(found: Findings, method: Method, sequence: int) -> Draft:
    """The recipe of a method, for rows of `sequence` tokens, its micro batch left to the planner."""
    model, kind = found.model, found.kind
    choices: dict[str, Choice] = {
        "techniques": Choice(
            techniques_for(method, kind, found.place.target, model.shape), f"{method.say()}; {_proven(found)}"
        ),
        **_model_choices(found),
        **_data_choices(found, sequence),
        "objective.kind": found.objective,
        **_batch_choices(found, method, sequence),
        "optimizer.lr": decisions.choose_learning_rate(kind, method.name, model.parameters, model.pretrained),
        **_rest(found),
    }
    tree: dict[str, Any] = {"about": f"{model.name} on {found.files.patterns[0]}: {kind}, {method.name}"}
    for key, choice in choices.items():
        _set(tree, key, choice.value)
    for override in found.overrides:
        apply_override(tree, override)
    return Draft(tree, {key: choice.why for key, choice in choices.items()})


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    (tree.setdefault(section, {}) if section else tree)[name] = value


def _proven(found: Findings) -> str:
    if found.place.target.kind == "cuda":
        return "the ready recipes' combination, without what this device does not support; `rush tune` measures more"
    return "plain otherwise; `rush tune` finds what is faster on this machine"


def _model_choices(found: Findings) -> dict[str, Choice]:
    model = found.model
    size = (
        f"{model.parameters / 1e9:.2f}B parameters"
        if model.parameters >= 1e8
        else f"{model.parameters:,} parameters"
    )
    choices = {"model.name": Choice(model.name, size)}
    if model.init_from is not None:
        choices["model.init_from"] = Choice(model.init_from, "the weights to start from")
    if model.overrides:
        choices["model.shape"] = Choice(
            model.overrides, f"what differs from {model.name} in the folder's config.json"
        )
    return choices


def _data_choices(found: Findings, sequence: int) -> dict[str, Choice]:
    model, rows, kind = found.model, found.rows, found.kind
    choices = {
        "data.source": Choice("files", ""),
        "data.files": Choice(
            list(found.files.patterns),
            f"{rows.rows:,} rows in {len(found.files.paths):,} file{'s' * (len(found.files.paths) > 1)}",
        ),
        "data.tokenizer": Choice("train", "random weights: a tokenizer trained on these data")
        if model.init_from is None
        else Choice(model.tokenizer_path if kind == "lm" else "model", "the model's own"),
        "data.validation": decisions.choose_validation(found.documents, found.lengths.tokens, sequence, kind),
    }
    if found.vocab_size is not None:
        choices["data.vocab_size"] = Choice(
            found.vocab_size, "so many entries can be learned from so little text"
        )
    if rows.text_field != "text" and "text" in rows.formats:
        choices["data.text_field"] = Choice(rows.text_field, "the field that holds the text")
    if kind == "lm":
        return choices
    assert found.template is not None
    return choices | {
        "data.template": found.template,
        "data.bad_rows": found.bad_rows,
        "data.too_long": decisions.choose_too_long(
            found.lengths, int(found.given.get("batch.sequence", sequence)), kind
        ),
    }


def _batch_choices(found: Findings, method: Method, sequence: int) -> dict[str, Choice]:
    """Rows are powers of two, so that micro batches divide them; a multiple of a given micro batch and of given data ranks."""
    lengths, kind = found.lengths, found.kind
    sequence = int(found.given.get("batch.sequence", sequence))
    epochs = float(found.given.get("schedule.epochs", epochs_of(found).value))
    if kind == "lm":
        step = decisions.choose_step_tokens(lengths.tokens, epochs, found.model.pretrained)
        rows = decisions.power_of_two(step.value / sequence)
    else:
        step = decisions.choose_step_documents(kind, method.name, found.documents, epochs)
        each = sequence if kind == "dpo" else lengths.mean
        rows = decisions.power_of_two(step.value * each / sequence)
    micro = found.given.get("batch.micro", AUTO)
    together = (1 if micro == AUTO else int(micro)) * math.prod(
        int(found.given.get(f"layout.{axis}", 1)) for axis in DATA_AXES
    )
    rows = together * max(1, round(rows / together))
    return {
        "batch.micro": Choice("auto", "the fastest that fits, by the planner"),
        "batch.sequence": Choice(
            sequence, decisions.choose_sequence(lengths, kind, found.model.shape.context, _gpu(found)).why
        ),
        "batch.total_tokens": Choice(rows * sequence, f"{rows:,} rows a step: {step.why}"),
    }


def _rest(found: Findings) -> dict[str, Choice]:
    kind = found.kind
    fresh = not found.model.pretrained and kind == "lm"
    warmup = 0.1 if kind == "dpo" else 0.03
    choices = {
        "optimizer.weight_decay": Choice(
            0.1 if fresh else 0.0, "pretraining's usual one" if fresh else "none in fine-tuning"
        ),
        "schedule.epochs": epochs_of(found),
        "schedule.warmup": Choice(
            warmup, f"{warmup:.0%} of the steps ({decisions.ZEPHYR if kind == 'dpo' else decisions.QLORA})"
        ),
    }
    if found.place.limit_gb is not None:
        choices["run.memory_limit_gb"] = Choice(found.place.limit_gb, "as asked with --memory")
    if found.place.machine == "cpu":
        choices["run.device"] = Choice("cpu", "as asked with --device")
    choices["run.sample_prompt"] = Choice(
        _question(found), "the first question of the data" if kind != "lm" else ""
    )
    return choices


def epochs_of(found: Findings) -> Choice:
    return decisions.choose_epochs(found.kind, found.documents, found.model.pretrained)


def _question(found: Findings) -> str:
    """A prompt for samples: the first short question."""
    for _, sample in found.rows.samples:
        if isinstance(sample, Conversation | Pair):
            turns = sample.turns if isinstance(sample, Conversation) else sample.prompt
            for turn in turns:
                text = turn.content.strip()
                if (
                    turn.role == "user"
                    and len(text) <= LONGEST_PROMPT
                    and text.isprintable()
                    and "<" not in text
                ):
                    return text
    return "The " if found.kind == "lm" else "What can you tell me?"


def _gpu(found: Findings) -> bool:
    return found.place.target.kind == "cuda"


def epoch_tokens(found: Findings, tree: dict[str, Any]) -> float:
    """Tokens processed in an epoch, padding included."""
    kept = 1 - float(tree["data"]["validation"])
    sequence = int(tree["batch"]["sequence"])
    if found.kind == "dpo":
        return kept * found.lengths.documents * sequence
    if found.kind == "lm":
        return kept * found.lengths.tokens
    names = [one if isinstance(one, str) else one["name"] for one in tree["techniques"]]
    row = sequence * (int(tree["batch"]["micro"]) if "flatten" in names else 1)
    sizes = [min(tokens, sequence) for tokens in found.lengths.each]
    rows = len(best_fit(sizes, row, len(sizes))) if {"flatten", "pack_best_fit"} & set(names) else len(sizes)
    # The last row is rarely full, and of few rows it would be a large share.
    filled = max(sum(sizes), (rows - 0.5) * row)
    return kept * filled / len(sizes) * found.lengths.documents


def given_values(overrides: Sequence[str], model: StartModel) -> dict[str, Any]:
    """The values of the overrides, by dotted key, validated as in a recipe; += and -= change decisions, and are not included."""
    smallest: dict[str, Any] = {
        "model": {"name": model.name, "shape": dict(model.overrides)},
        "batch": {"micro": 1, "sequence": 1},
        "optimizer": {"lr": 1e-3},
        "schedule": {"steps": LARGEST_NUMBER},
    }
    for override in overrides:
        if override.split("=", 1)[0].rstrip("+- ") in ("data.source", "data.files"):
            raise RecipeError(
                f"--data sets data.source and data.files; found {override!r} beside it. Leave it out."
            )
        if "-=" not in override:
            apply_override(smallest, override)
    batch = smallest["batch"]
    if isinstance(batch, dict) and batch.get("micro") == AUTO:
        batch.setdefault("total_tokens", batch.get("sequence"))
    parse(smallest, auto=True)
    values: dict[str, Any] = {}
    for override in overrides:
        tree: dict[str, Any] = {}
        key = override.split("=", 1)[0].strip()
        if key.endswith(("+", "-")):
            continue
        apply_override(tree, override)
        values[key] = value_at(tree, key)
    return values
