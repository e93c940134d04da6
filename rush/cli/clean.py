"""`rush data clean`: filtering and deduplication, with a table of what each stage removed."""

from __future__ import annotations

import contextlib
import json as json_module
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from rush.cli.options import ExecutorOptions, Json, parse_options
from rush.cli.output import echo, next_step, note, print_json, print_table

if TYPE_CHECKING:
    from rush.data.clean import CleanProgress


def complete_pipeline(incomplete: str) -> list[str]:
    from rush.ready import PIPELINES

    return [name for name in PIPELINES.names() if name.startswith(incomplete)]


def clean(
    pipeline: Annotated[
        str, typer.Argument(help="A pipeline's name or .toml file.", autocompletion=complete_pipeline)
    ],
    files: Annotated[
        list[str],
        typer.Argument(help="Files or patterns: .jsonl, .csv, .tsv (each also .gz, .zst), .parquet."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="A .jsonl, .jsonl.gz or .parquet file; a name without extension is a folder.",
        ),
    ],
    format: Annotated[
        Literal["jsonl", "parquet"] | None,
        typer.Option(help="For a folder: format of its files. Default: that of the input."),
    ] = None,
    examples: Annotated[int, typer.Option(help="Removed examples to show per stage.", min=0, max=5)] = 2,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Count and skip unreadable rows.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    workers: Annotated[int | None, typer.Option(help="Concurrent tasks. Default: all cores.", min=1)] = None,
    executor: Annotated[
        Literal["local", "slurm", "ray"], typer.Option(help="Executor of the datatrove pipeline.")
    ] = "local",
    option: ExecutorOptions = None,
    json: Json = False,
) -> None:
    """Clean rows with a TOML pipeline: lengths, list items, rare items, language, patterns, duplicates.

    Streams the files in constant memory, resumes after an interruption, and writes the same bytes with any number of workers.
    Samples of the removed rows and report.json are kept next to the output.

    Examples:

      rush data clean cooking recipes.jsonl -o cleaned.jsonl

      rush data clean my-pipeline.toml 'crawl/*.jsonl.gz' -o cleaned --executor slurm --option partition=cpu --option time=04:00:00
    """
    from rush.data.clean import clean as run
    from rush.data.clean import load_pipeline

    wanted = load_pipeline(pipeline)
    if skip_unreadable:
        wanted = wanted.model_copy(update={"on_unreadable": "skip"})
    with _bar() as show:
        report = run(
            wanted,
            files,
            output,
            format=format,
            executor=executor,
            workers=workers,
            options=parse_options(option),
            force=force,
            progress=show,
        )
    if report is None:
        note(f"Submitted: {output} appears when the last job has ended.")
    elif json:
        print_json(report)
    else:
        _show(report, output, examples)


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[CleanProgress], None]]:
    """Drawn on a copy of standard error, because datatrove's own output is redirected to a file."""
    columns = (
        TextColumn("Cleaning"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with os.fdopen(os.dup(2), "w") as stream, Bar(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task("", total=None, visible=False)

        def show(now: CleanProgress) -> None:
            bar.update(task, total=now.total, completed=now.done, description=now.step, visible=True)

        yield show


def _show(report: dict[str, Any], output: Path, examples: int) -> None:
    counts = report["documents"]
    rows = [
        [stage["name"], f"{stage['documents_in']:,}", f"{stage['removed']:,}", _percent(stage), f"{stage['kept']:,}"]
        for stage in report["stages"]
    ]  # fmt: skip
    if counts["unreadable"]:
        first = {"documents_in": counts["read"], "removed": counts["unreadable"]}
        left = counts["read"] - counts["unreadable"]
        cells = [
            "(unreadable)",
            f"{counts['read']:,}",
            f"{counts['unreadable']:,}",
            _percent(first),
            f"{left:,}",
        ]
        rows.insert(0, cells)
    print_table(["stage", "documents", "removed", "of them", "left"], rows)
    unreadable = {"name": "(unreadable)", "examples": report["unreadable_examples"]}
    for stage in [unreadable, *report["stages"]]:
        if stage["examples"][:examples]:
            echo(f"\nremoved by {stage['name']}", bold=True)
        for example in stage["examples"][:examples]:
            echo(f"  {example['document']}: {example['reason']}")
            echo(f"    {_one_line(example['row'])}", dim=True)
    for stage in (stage for stage in report["stages"] if stage.get("edited")):
        rows_changed = f"{stage['edited']:,} document{'s' * (stage['edited'] != 1)}"
        echo(f"\nshortened by {stage['name']}: {rows_changed} lost some of their exchanges", bold=True)
        for example in stage["edited_examples"][:examples]:
            echo(f"  {example['document']}: {example['reason']}")
    share = counts["kept"] / counts["read"] if counts["read"] else 0
    name = output.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".parquet")
    beside = output / "removed" if name == output.name else output.with_name(f"{name}.removed")
    echo(f"\nWrote {output}: {counts['kept']:,} of {counts['read']:,} documents ({share:.1%}); "
         f"more of what was removed is in {beside}/")  # fmt: skip
    next_step("rush", "start", "MODEL", "--data", str(output), why="a recipe for it; MODEL may be tiny")


def _percent(stage: dict[str, Any]) -> str:
    return f"{stage['removed'] / stage['documents_in']:.1%}" if stage["documents_in"] else "-"


def _one_line(row: Any, width: int = 160) -> str:
    text = row if isinstance(row, str) else json_module.dumps(row, ensure_ascii=False)
    return text if len(text) <= width else f"{text[:width]}…"
