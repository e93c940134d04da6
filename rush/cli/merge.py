"""`rush merge`: a base and its adapter as one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rush.cli.output import Json, note, print_json


def merge(
    adapter: Annotated[
        Path, typer.Argument(help="A run that was trained with adapters, or an adapter folder of PEFT's.")
    ],
    to: Annotated[Path, typer.Option(help="The new Hugging Face folder.")],
    base: Annotated[
        Path | None,
        typer.Option(
            help="The base: a run folder or a Hugging Face folder; without it, the one the adapter names."
        ),
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            help="Of the run (the adapter's; with PEFT's adapter, the base's): last, best, or a step's number."
        ),
    ] = "last",
    dtype: Annotated[
        Literal["keep", "float32", "bfloat16", "float16"], typer.Option(help="The dtype of the weights.")
    ] = "keep",
    max_shard_gb: Annotated[float, typer.Option(help="Largest weight file, in gigabytes.", min=0.001)] = 5.0,
    json: Json = False,
) -> None:
    """Merge an adapter into its base and write the whole model, ready for transformers.

    The merged model gives the adapted one's logits up to rounding: each weight is added in fp32 and rounded once. Adapters
    trained beside a quantized base (qlora, int8_base) are merged into what the codes stand for; with --base, into
    the base you name.

    Example: rush merge runs/sft-lora --to merged/sft

    Example: rush merge adapters/mine --base models/llama-3.2-1b --to merged/mine --dtype bfloat16
    """
    import torch

    from rush.hub.export import merge_adapter
    from rush.models import count_parameters

    shape = merge_adapter(
        adapter,
        to,
        base=base,
        checkpoint=checkpoint,
        dtype=None if dtype == "keep" else getattr(torch, dtype),
        max_shard_bytes=int(max_shard_gb * 1e9),
        note=note,
    )
    files = sorted(path.name for path in to.iterdir())
    if json:
        print_json({"folder": str(to), "parameters": count_parameters(shape), "files": files})
        return
    typer.echo(f"Wrote {to}: {count_parameters(shape):,} parameters in {', '.join(files)}.")
