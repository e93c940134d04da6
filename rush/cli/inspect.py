"""`rush data inspect`: fine-tuning data as the model will get it, to find mask errors before training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from rush.cli.options import Json, Overrides, complete_recipe
from rush.cli.output import echo, next_step, print_json, print_table
from rush.errors import RecipeError, printable

if TYPE_CHECKING:
    from rush.recipe import Recipe

Target = Annotated[
    str,
    typer.Argument(
        help="A recipe's name or .toml file, or a prepared folder.", autocompletion=complete_recipe
    ),
]
BAR = 40


def inspect(
    target: Target,
    overrides: Overrides = None,
    split: Annotated[Literal["train", "validation"], typer.Option(help="Split of the examples.")] = "train",
    examples: Annotated[int, typer.Option(help="Number of examples, spread over the split.", min=0)] = 3,
    at: Annotated[int | None, typer.Option(help="Show only the document (or pair) with this index.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write an HTML page.")] = None,
    json: Json = False,
) -> None:
    """Show conversations or preferences as the model will get them: lengths, counts, dropped rows, examples.

    Tokens with a label are highlighted, or in ⟦brackets⟧ on a terminal without colors. The data is prepared first if
    necessary, as by `rush train`.

    Examples:

      rush data inspect sft-tiny

      rush data inspect sft-tiny data.source=files 'data.files=["talks.jsonl"]' data.too_long=drop --html talks.html
    """
    from rush.data.conversations.inspect_documents import document_examples, document_statistics
    from rush.files import write_atomic
    from rush.report.documents import documents_page

    folder = _prepared(target, overrides or [])
    found = document_statistics(folder)
    shown = document_examples(folder, split, examples, at) if examples or at is not None else []
    if html is not None:
        write_atomic(html, documents_page(found, shown))
    if json:
        print_json(found | {"examples": shown})
        return
    _print_statistics(found)
    if shown:
        _print_legend()
    for example in shown:
        _print_example(example)
    if html is not None:
        echo(f"\nWritten: {html}")
    if folder == Path(target):
        next_step("rush", "data", "verify", target)
    else:
        next_step("rush", "overfit", target, *(overrides or []), why="can this setting learn at all?")


def report(folder: Path, json: bool) -> None:
    """The statistics without the examples."""
    from rush.data.conversations.inspect_documents import document_statistics

    found = document_statistics(folder)
    print_json(found) if json else _print_statistics(found)


def prepare_recipe(recipe: Recipe, **options: Any) -> Path:
    """Prepare a recipe's fine-tuning data in the cache of `rush train`, unless it exists."""
    from rush.data import progress_bar
    from rush.data.conversations import prepare_documents
    from rush.files import cache_folder
    from rush.training.corpus import documents_of

    with progress_bar() as show:
        return prepare_documents(documents_of(recipe), cache_folder() / "documents", show, **options)


def _prepared(target: str, overrides: list[str]) -> Path:
    """An existing folder, or the one that a recipe's data is prepared in."""
    from rush.recipe_io import load_recipe

    if Path(target).is_dir():
        if overrides:
            raise RecipeError(
                f"{target} is prepared data, which {overrides[0]!r} cannot change; give a recipe instead."
            )
        return Path(target)
    recipe = load_recipe(target, overrides)
    if recipe.objective.kind == "lm":
        raise RecipeError(
            f"{target} trains on a corpus (objective.kind is 'lm'), which has no prompts and answers; see it with "
            "`rush data show`, or set objective.kind to sft or dpo."
        )
    return prepare_recipe(recipe)


def _print_statistics(found: dict[str, Any]) -> None:
    _print_counts(found)
    for name, counts in found["splits"].items():
        if counts["documents"]:
            _print_lengths(name, counts)


def _print_counts(found: dict[str, Any]) -> None:
    from rush.data.conversations.inspect_documents import control_tokens, left_out, unused_columns

    echo(
        f"{found['folder']}\nsource {found['source']}{_formats(found)}, template {found['template']}, trained on {found['train_on']}, "
        f"sequence {found['sequence']:,}, vocabulary {found['vocab_size']:,}\n"
    )
    splits = found["splits"]
    rows = [
        [name, f"{c['rows']:,}", f"{c['documents']:,}", f"{c['tokens']:,}", f"{c['trained']:,}", f"{c['trained_share']:.1%}",
         f"{c.get('document_tokens', {}).get('median', 0):,}", f"{c.get('document_tokens', {}).get('max', 0):,}"]
        for name, c in splits.items()
    ]  # fmt: skip
    print_table(
        ["split", "rows", "documents", "tokens", "trained", "share", "median length", "longest"], rows
    )
    typer.echo("")
    if lost := left_out(splits):
        print_table(["split", "reason", "rows", "such as"], lost)
    else:
        typer.echo("No rows were dropped or truncated.")
    if unused := unused_columns(splits):
        echo(f"Columns that were not used: {unused}.")
    if controls := control_tokens(splits):
        echo(f"Control tokens spelled out in turns: {controls}.")
    if found["held_out_note"]:
        echo(found["held_out_note"])


def _formats(found: dict[str, Any]) -> str:
    names = sorted({name for counts in found["splits"].values() for name in counts["formats"]})
    return f" ({', '.join(names)})" if names else ""


def _print_lengths(split: str, counts: dict[str, Any]) -> None:
    typer.secho(f"\nLengths in tokens: {split} (mean {counts['mean_tokens']:.0f})", bold=True)
    bins = counts["histogram"]
    most = max(bin["documents"] for bin in bins)
    labels = [f"{bin['from']:,}–{bin['below'] - 1:,}" for bin in bins]
    wide = max(map(len, labels))
    for label, bin in zip(labels, bins, strict=True):
        # A bin that is not empty has a bar, however short.
        eighths = -(-8 * BAR * bin["documents"] // most)
        bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        typer.echo(f"{label:>{wide}}  {bar} {bin['documents']:,}")


def _print_legend() -> None:
    console = Console(soft_wrap=True)
    text = Text("\nTargets are ")
    if _colors(console):
        _append_target(text, "on green", console)
    else:
        text.append("in double brackets")
    console.print(text.append("; everything else is context."))


def _print_example(example: dict[str, Any]) -> None:
    echo(f"\n{example['name']}: {example['tokens']:,} tokens, {example['trained']:,} trained", bold=True)
    console = Console(soft_wrap=True)
    text = Text()
    for piece in example["pieces"]:
        shown = printable(piece["text"])
        if piece["trained"]:
            _append_target(text, shown, console)
        else:
            text.append(shown)
    console.print(text)


def _append_target(text: Text, shown: str, console: Console) -> None:
    """On green, a background that shows spaces too; in brackets where there are no colors."""
    if _colors(console):
        text.append(shown, style="black on green")
    else:
        text.append(f"⟦{shown}⟧")


def _colors(console: Console) -> bool:
    return console.is_terminal and not console.no_color
