"""`rush evaluate`: held-out loss, preferences, multiple choice and sample answers of a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rush.cli.output import Json, note, print_json, print_table


def evaluate(
    folder: Annotated[Path, typer.Argument(help="A run folder or a Hugging Face folder.")],
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
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
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
        typer.echo("")
        typer.secho(said.prompt, bold=True)
        columns = [text or "(nothing)" for text in said.texts]
        print_table(names, [columns])


def _figures(models: Any) -> list[list[str]]:
    rows: dict[str, list[str]] = {}

    def put(name: str, cells: list[str]) -> None:
        if any(cells):
            rows[name] = cells

    put("held-out loss", [f"{m.held_out.loss:.4f}" if m.held_out else "" for m in models])
    put("perplexity", [f"{m.held_out.perplexity:,.2f}" if m.held_out else "" for m in models])
    put("labels", [f"{m.held_out.labels:,}" if m.held_out else "" for m in models])
    put("chosen wins, whole answer", [str(m.wins.by_sum) if m.wins else "" for m in models])
    put("chosen wins, per token", [str(m.wins.by_token) if m.wins else "" for m in models])
    put("change, whole answer", [str(m.wins.change_by_sum or "") if m.wins else "" for m in models])
    put("change, per token", [str(m.wins.change_by_token or "") if m.wins else "" for m in models])
    put("chosen wins, by reward", [str(m.wins.by_reward or "") if m.wins else "" for m in models])
    put("mean log-probability, chosen", [f"{m.wins.logp_chosen:.2f}" if m.wins else "" for m in models])
    put("mean log-probability, rejected", [f"{m.wins.logp_rejected:.2f}" if m.wins else "" for m in models])
    put("acc", [str(m.choices.acc) if m.choices else "" for m in models])
    put("acc_norm", [str(m.choices.acc_norm) if m.choices else "" for m in models])
    return [[name, *cells] for name, cells in rows.items()]
