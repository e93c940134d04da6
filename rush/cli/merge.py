"""`rush merge`: merge an adapter into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rush.cli.export import report_model
from rush.cli.options import Dtype, Json, MaxShardGb
from rush.cli.output import note


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
    dtype: Dtype = "keep",
    max_shard_gb: MaxShardGb = 5.0,
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

    shape = merge_adapter(
        adapter,
        to,
        base=base,
        checkpoint=checkpoint,
        dtype=None if dtype == "keep" else getattr(torch, dtype),
        max_shard_bytes=int(max_shard_gb * 1e9),
        note=note,
    )
    report_model(to, shape, json)
