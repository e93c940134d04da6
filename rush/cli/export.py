"""`rush export`: a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rush.cli.output import Json, note, print_json


def export(
    folder: Annotated[
        Path, typer.Argument(help="A run folder (or a Hugging Face folder, to reshard or recast it).")
    ],
    to: Annotated[Path, typer.Option(help="The new Hugging Face folder.")],
    checkpoint: Annotated[str, typer.Option(help="last, best, or a step's number.")] = "last",
    dtype: Annotated[
        Literal["keep", "float32", "bfloat16", "float16"], typer.Option(help="The dtype of the weights.")
    ] = "keep",
    max_shard_gb: Annotated[float, typer.Option(help="Largest weight file, in gigabytes.", min=0.001)] = 5.0,
    json: Json = False,
) -> None:
    """Write config, safetensors and tokenizer, ready for AutoModelForCausalLM.from_pretrained.

    Example: rush export runs/tiny --to exported/tiny
    """
    import torch

    from rush.models import count_parameters
    from rush.train.folders import export_model

    chosen = None if dtype == "keep" else getattr(torch, dtype)
    shape = export_model(
        folder, to, checkpoint=checkpoint, dtype=chosen, max_shard_bytes=int(max_shard_gb * 1e9), note=note
    )
    files = sorted(path.name for path in to.iterdir())
    if json:
        print_json({"folder": str(to), "parameters": count_parameters(shape), "files": files})
        return
    typer.echo(f"Wrote {to}: {count_parameters(shape):,} parameters in {', '.join(files)}.")
