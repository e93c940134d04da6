"""`rush data`: clean, prepare, inspect and verify training data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rush.cli import clean, inspect
from rush.cli.options import DataFiles, ExecutorOptions, Json, Overrides, RecipeName, parse_options, with_data
from rush.cli.output import echo, next_step, print_json, print_table
from rush.errors import RecipeError

app = typer.Typer(help="Clean, prepare, inspect and verify training data.", no_args_is_help=True)
app.command("clean")(clean.clean)
app.command("inspect")(inspect.inspect)

Prepared = Annotated[
    Path, typer.Argument(help="The folder of a prepared corpus, as printed by `rush data prepare`.")
]


@app.command()
def prepare(
    recipe: RecipeName,
    overrides: Overrides = None,
    data: DataFiles = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes. Default: all cores.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Prepare again even if it exists.")] = False,
    executor: Annotated[
        Literal["plain", "local", "slurm", "ray"],
        typer.Option(help="plain: local processes. The others run the same work as a datatrove pipeline."),
    ] = "plain",
    tasks: Annotated[int | None, typer.Option(help="Number of datatrove tasks.", min=1)] = None,
    option: ExecutorOptions = None,
    json: Json = False,
) -> None:
    """Tokenize a recipe's corpus into shards, in parallel; resumes after an interruption.

    Examples:

      rush data prepare gpt2-124m data.source=files 'data.files=["corpus/*.jsonl"]'

      rush data prepare gpt2-124m --executor slurm --tasks 64 --option partition=cpu --option time=04:00:00
    """
    from rush.recipe_io import load_recipe
    from rush.training.corpus import preparation_of, prepare_on, prepare_with_bar

    loaded = load_recipe(recipe, with_data(overrides, data), auto=True)
    if loaded.objective.kind != "lm":
        if executor != "plain" or tasks is not None or option:
            raise RecipeError(
                "--executor, --tasks and --option are for a corpus; conversations are prepared by local processes."
            )
        inspect.report(inspect.prepare_recipe(loaded, workers=workers, force=force), json)
        if not json:
            next_step("rush", "data", "inspect", recipe, *with_data(overrides, data), why="with examples")
        return
    wanted = preparation_of(loaded)
    if executor == "plain":
        if tasks is not None or option:
            raise RecipeError(
                "--tasks and --option belong to a pipeline; name one with --executor local, slurm or ray."
            )
        folder = prepare_with_bar(wanted, workers=workers, force=force)
    else:
        folder = prepare_on(
            executor, wanted, tasks=tasks, workers=workers, force=force, options=parse_options(option)
        )
        if not (folder / "manifest.json").is_file():
            typer.echo(f"Submitted: {folder} is ready when the last job has written its manifest.")
            return
    _report(folder, json)
    if not json:
        next_step("rush", "train", recipe, *with_data(overrides, data))


@app.command()
def show(
    folder: Prepared,
    window: Annotated[int, typer.Option(help="Index of the window to print.", min=0)] = 0,
    sequence: Annotated[int, typer.Option(help="Tokens per window.", min=1)] = 128,
    json: Json = False,
) -> None:
    """Show the counts, lengths and one window of a prepared corpus."""
    from rush.data import sample_window

    sample = sample_window(folder, sequence=sequence, index=window)
    _report(folder, json, {"sample": sample})
    if not json:
        echo(f"\n{sample['sample']} of {sample['windows']:,} windows", bold=True)
        echo(sample["text"])
        next_step("rush", "data", "verify", str(folder))


@app.command()
def verify(folder: Prepared, json: Json = False) -> None:
    """Verify every checksum and every token id of a prepared corpus."""
    from rush.data import verify_shards
    from rush.data.conversations import holds_documents, verify_documents

    manifest = (
        verify_documents(folder, full=True) if holds_documents(folder) else verify_shards(folder, full=True)
    )
    if json:
        print_json({"folder": str(folder), "ok": True, "shards": len(manifest.shards)})
        return
    echo(f"{folder}: all {len(manifest.shards)} shards are intact and every token id is in the vocabulary.")
    next_step("rush", "train", "RECIPE", why="the one that it was prepared for finds it")


def _report(folder: Path, json: bool, more: dict[str, Any] | None = None) -> None:
    from rush.data import corpus_statistics

    found = corpus_statistics(folder) | (more or {})
    if json:
        print_json(found)
        return
    echo(
        f"{found['folder']}\nsource {found['source']}, vocabulary {found['vocab_size']:,}, {found['dtype']}\n"
    )
    rows = [
        [name, f"{split['documents']:,}", f"{split['tokens']:,}", f"{split.get('bytes_per_token', 0):.2f}",
         f"{split.get('document_tokens', {}).get('median', 0):,}"]
        for name, split in found["splits"].items()
    ]  # fmt: skip
    print_table(["split", "documents", "tokens", "bytes/token", "median length"], rows)
