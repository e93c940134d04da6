"""`rush push`: upload a model with its card to the Hugging Face hub."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from rush.cli.options import Json
from rush.cli.output import next_step, note, print_json, print_table
from rush.errors import RecipeError


def push(
    folder: Annotated[Path, typer.Argument(help="A run folder, or an exported Hugging Face folder.")],
    to: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Repository to upload to. Nothing is uploaded without it."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make it a private repository.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to upload to. Default: main.")] = None,
    license: Annotated[
        str | None,
        typer.Option(help="License for the card, as in apache-2.0. Without it the card names none."),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint: last, best, or a step.")] = "last",
    merged: Annotated[
        bool, typer.Option("--merged", help="Upload adapters merged into their base, as a full model.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME", help="The adapter's base on the hub. Default: what the run started from."
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="A ladder's folder: the card states what it verified about the run's techniques."),
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option(help="A file that `rush evaluate --json` wrote, for the card.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the folder here and upload nothing.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --dry-run: the folder to write. Default: pushes/NAME.")
    ] = None,
    json: Json = False,
) -> None:
    """Upload a model to the Hugging Face hub, with a model card generated from the run.

    A run is exported first; a run with adapters as a PEFT adapter. Your token comes from `hf auth login` or HF_TOKEN.

    Example: rush push runs/tiny --to me/tiny --private

    Example: rush push runs/sft-lora --to me/sft-lora --base me/tiny --license apache-2.0

    Example: rush push runs/tiny --dry-run
    """
    if to is None and not dry_run:
        raise RecipeError("rush push needs --to OWNER/NAME, or --dry-run to write the folder here.")
    if out is not None and not dry_run:
        raise RecipeError("--out needs --dry-run.")
    from rush.hub.push import free_folder, prepare_upload, repository, size_words, upload

    title = folder.name if to is None else repository(to)
    place: Any = nullcontext(out or free_folder(title)) if dry_run else tempfile.TemporaryDirectory()
    with place as where:
        ready = prepare_upload(
            folder,
            Path(where) if dry_run else Path(where) / "upload",
            title,
            checkpoint=checkpoint,
            merged=merged,
            base=base,
            license=license,
            record=record,
            evaluation=evaluation,
            note=note,
        )
        said = {"files": ready.files, "bytes": ready.num_bytes}
        if not json:
            print_table(["file", "size"], [[name, size_words(size)] for name, size in ready.files.items()])
        if dry_run:
            if json:
                print_json({"folder": str(ready.folder), **said})
            else:
                typer.echo(f"Wrote {ready.folder}, {size_words(ready.num_bytes)}; nothing was uploaded.")
                next_step("rush", "push", str(folder), "--to", "OWNER/NAME", "--private")
            return
        assert to is not None
        if not json:
            visible = "private" if private else "public, unless it is private already"
            typer.echo(f"Uploading {size_words(ready.num_bytes)} to {to} ({visible}) …")
        address = upload(ready, to, private=private, revision=revision, note=note)
    if json:
        print_json({"to": to, "address": address, **said})
    else:
        typer.echo(f"Uploaded: {address}")
        next_step("rush", "generate", to, "--prompt", "Once upon a time")
