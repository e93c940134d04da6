"""`rush export`: write a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rush.cli.output import Json, note, print_json


def export(
    folder: Annotated[
        Path, typer.Argument(help="A run folder (or a Hugging Face folder, to reshard or cast it).")
    ],
    to: Annotated[Path, typer.Option(help="The Hugging Face folder to write.")],
    checkpoint: Annotated[str, typer.Option(help="Checkpoint: last, best, or a step.")] = "last",
    dtype: Annotated[
        Literal["keep", "float32", "bfloat16", "float16"], typer.Option(help="dtype of the weights.")
    ] = "keep",
    max_shard_gb: Annotated[
        float, typer.Option(help="Maximum size of a weight file, in gigabytes.", min=0.001)
    ] = 5.0,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Write only the adapters, in PEFT's format."),
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(
            help="With --adapter: the base model for adapter_config.json, a Hugging Face folder. Default: what the run started "
            "from."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write config, safetensors and tokenizer, ready for AutoModelForCausalLM.from_pretrained.

    A run with adapters is written as the merged model; with --adapter, as a PEFT folder.

    Example: rush export runs/tiny --to exported/tiny

    Example: rush export runs/sft-lora --adapter --to adapters/sft

    Example: rush export runs/sft-lora --adapter --base exported/tiny --to adapters/sft
    """
    import torch

    from rush.errors import RecipeError
    from rush.hub.export import export_adapter, export_model
    from rush.models import count_parameters

    if adapter:
        if dtype != "keep":
            raise RecipeError(
                "--dtype is for whole models; adapters are written in the dtype they were trained in."
            )
        written = export_adapter(folder, to, checkpoint=checkpoint, base=base, note=note)
        if json:
            print_json({"folder": str(to), "files": written})
        else:
            typer.echo(f"Wrote {to}: {', '.join(written)}.")
        return
    if base is not None:
        raise RecipeError("--base names the base of adapters; use it with --adapter (to merge: rush merge).")
    chosen = None if dtype == "keep" else getattr(torch, dtype)
    shape = export_model(
        folder, to, checkpoint=checkpoint, dtype=chosen, max_shard_bytes=int(max_shard_gb * 1e9), note=note
    )
    files = sorted(path.name for path in to.iterdir())
    if json:
        print_json({"folder": str(to), "parameters": count_parameters(shape), "files": files})
        return
    typer.echo(f"Wrote {to}: {count_parameters(shape):,} parameters in {', '.join(files)}.")
