"""`rush evaluate`: held-out loss, preferences, multiple choice and sample answers of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rush.cli.options import Device, Json, ModelFolder
from rush.cli.output import echo, next_step, note, print_json, print_table


def evaluate(
    folder: ModelFolder,
    against: Annotated[
        Path | None,
        typer.Option(help="A second model to compare with, such as the one it was trained from."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Evaluation data: a recipe or run (its held-out split), or a .jsonl, .csv or .parquet file (all of it). "
            "Default: the run's own held-out split."
        ),
    ] = None,
    choices: Annotated[
        Path | None, typer.Option(help="Multiple-choice questions: a JSONL file in HellaSwag's format.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt to answer. May be repeated.")] = None,
    answers: Annotated[
        int, typer.Option(help="Held-out prompts to answer, in addition to --prompt.", min=0)
    ] = 3,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.", min=1)] = 80,
    limit: Annotated[int | None, typer.Option(help="Maximum documents, pairs and questions.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Batch size, in rows.", min=1)] = 16,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint of the run: last, best, or a step.")] = "last",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Held-out loss, win rate of chosen over rejected answers, multiple choice, and answers side by side.

    Examples:

      rush evaluate runs/dpo-tiny --against runs/sft-tiny

      rush evaluate runs/sft --data pairs.jsonl

      rush evaluate exported/llama --choices hellaswag_val.jsonl --limit 1000

      rush evaluate runs/sft-tiny --prompt 'What does textwrap.wrap do?'

    For published benchmarks: rush export RUN --to FOLDER, then lm_eval --model hf --model_args pretrained=FOLDER
    --tasks hellaswag (docs/finetuning/evaluation.md).
    """
    from rush.evaluate.results import evaluate_models

    found = evaluate_models(
        folder,
        against,
        data=data,
        choices=choices,
        questions=prompt or [],
        answers=answers,
        max_tokens=max_tokens,
        limit=limit,
        rows=batch,
        checkpoint=checkpoint,
        device=device,
        note=note,
    )
    if json:
        print_json(asdict(found))
        return
    names = [model.folder for model in found.models]
    print_table(["", *names], _figures(found.models), title=f"on {found.about}" if found.about else None)
    for said in found.answers:
        echo()
        echo(said.prompt, bold=True)
        columns = [text or "(nothing)" for text in said.texts]
        print_table(names, [columns])
    if (Path(folder) / "recipe.toml").is_file():
        next_step("rush", "export", str(folder), "--to", "exported", why="for transformers, or rush push")
    else:
        next_step("rush", "chat", str(folder))


def _figures(models: Any) -> list[list[str]]:
    """One row per metric that any of the models has."""
    metrics: tuple[tuple[str, str, Callable[[Any], object]], ...] = (
        ("held-out loss", "held_out", lambda found: f"{found.loss:.4f}"),
        ("perplexity", "held_out", lambda found: f"{found.perplexity:,.2f}"),
        ("labels", "held_out", lambda found: f"{found.labels:,}"),
        ("chosen wins, whole answer", "wins", lambda found: found.by_sum),
        ("chosen wins, per token", "wins", lambda found: found.by_token),
        ("change, whole answer", "wins", lambda found: found.change_by_sum),
        ("change, per token", "wins", lambda found: found.change_by_token),
        ("chosen wins, by reward", "wins", lambda found: found.by_reward),
        ("mean log-probability, chosen", "wins", lambda found: f"{found.logp_chosen:.2f}"),
        ("mean log-probability, rejected", "wins", lambda found: f"{found.logp_rejected:.2f}"),
        ("acc", "choices", lambda found: found.acc),
        ("acc_norm", "choices", lambda found: found.acc_norm),
    )
    rows = [
        [name, *(str(((found := getattr(model, part)) and show(found)) or "") for model in models)]
        for name, part, show in metrics
    ]
    return [row for row in rows if any(row[1:])]
