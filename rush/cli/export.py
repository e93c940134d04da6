"""`rush export`: write a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rush.cli.options import Dtype, Json, MaxShardGb
from rush.cli.output import next_step, note, print_json

if TYPE_CHECKING:
    from rush.models import Shape


def export(
    folder: Annotated[
        Path, typer.Argument(help="A run folder (or a Hugging Face folder, to reshard or cast it).")
    ],
    to: Annotated[Path, typer.Option(help="The Hugging Face folder to write.")],
    checkpoint: Annotated[str, typer.Option(help="Checkpoint: last, best, or a step.")] = "last",
    dtype: Dtype = "keep",
    max_shard_gb: MaxShardGb = 5.0,
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
            next_step(
                "rush",
                "merge",
                str(to),
                "--base",
                str(base or "BASE"),
                "--to",
                "merged",
                why="or load it with PEFT",
            )
        return
    if base is not None:
        raise RecipeError("--base names the base of adapters; use it with --adapter (to merge: rush merge).")
    chosen = None if dtype == "keep" else getattr(torch, dtype)
    shape = export_model(
        folder, to, checkpoint=checkpoint, dtype=chosen, max_shard_bytes=int(max_shard_gb * 1e9), note=note
    )
    report_model(to, shape, json)


def report_model(folder: Path, shape: Shape, json: bool) -> None:
    """Print what was written."""
    from rush.models import count_parameters

    files, parameters = sorted(path.name for path in folder.iterdir()), count_parameters(shape)
    if json:
        print_json({"folder": str(folder), "parameters": parameters, "files": files})
    else:
        typer.echo(f"Wrote {folder}: {parameters:,} parameters in {', '.join(files)}.")
        next_step("rush", "generate", str(folder), "--prompt", "Once upon a time")
