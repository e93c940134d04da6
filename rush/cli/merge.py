"""`rush merge`: merge an adapter into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rush.cli.output import Json, note, print_json


def merge(
    adapter: Annotated[Path, typer.Argument(help="A run that trained adapters, or a PEFT adapter folder.")],
    to: Annotated[Path, typer.Option(help="The Hugging Face folder to write.")],
    base: Annotated[
        Path | None,
        typer.Option(
            help="Base model: a run folder or a Hugging Face folder. Default: the one the adapter names."
        ),
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            help="Checkpoint of the run (the adapter's; with a PEFT adapter, the base's): last, best, or a step."
        ),
    ] = "last",
    dtype: Annotated[
        Literal["keep", "float32", "bfloat16", "float16"], typer.Option(help="dtype of the weights.")
    ] = "keep",
    max_shard_gb: Annotated[
        float, typer.Option(help="Maximum size of a weight file, in gigabytes.", min=0.001)
    ] = 5.0,
    json: Json = False,
) -> None:
    """Merge an adapter into its base and write the whole model, ready for transformers.

    The merged model gives the adapted model's logits up to rounding: each weight is merged in fp32 and rounded once. Adapters
    on a quantized base (qlora, int8_base) are merged into the dequantized weights; with --base, into that base.

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
