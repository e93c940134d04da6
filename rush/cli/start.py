"""`rush start`: from a model and data to a recipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rush.cli.options import Json
from rush.cli.output import echo, note, print_json
from rush.errors import RecipeError

if TYPE_CHECKING:
    from rush.records.start import StartRecord

BAR = 30


def start(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face folder, OWNER/NAME on the hub, a run folder, or a size's name (random weights)."
        ),
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE | KEY=VALUE]...", help="More data, and overrides of the decisions."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Files, patterns or folders: JSONL, JSON, CSV, TSV, Parquet, text."
        ),
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Available hours: limits the number of epochs.")] = None,
    memory: Annotated[float | None, typer.Option(help="Memory of the device, in GB of 10⁹ bytes.")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="A device from the catalog, as in h100-sxm, or cpu. Default: this machine's."),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of the device per hour.", min=0)] = None,
    out: Annotated[Path, typer.Option(help="Output file.")] = Path("recipe.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    json: Json = False,
) -> None:
    """Write a recipe for a model and data that fits a device, with a reason for every choice.

    Reads the model's config and tokenizer and all rows, and decides objective, template, sequence, packing, full fine-tuning,
    LoRA or QLoRA, techniques, batch, learning rate and epochs. It can plan for a GPU without one. Every KEY=VALUE you give is
    kept.

    Examples:

      rush start models/llama-3.2-1b --data talks.jsonl --device 4090

      rush start models/qwen --data pairs/ --memory 24 --hours 8 optimizer.lr=1e-6

      rush start tiny --data notes/*.txt --device cpu
    """
    from rush.api import start_recipe

    files, overrides = _sorted(more or [])
    made = start_recipe(
        model,
        [*(data or []), *files],
        *overrides,
        hours=hours,
        memory=memory,
        device=device,
        price=price,
        out=out,
        force=force,
        note=note,
    )
    if json:
        print_json(made.record)
        return
    _show(made.record)
    echo(f"\nWritten: {out}\nNext:", bold=True)
    for command in made.record["next"]:
        echo(f"  {command}")


def _sorted(words: list[str]) -> tuple[list[str], list[str]]:
    """Files and overrides: what exists or has no = is a file."""
    files = [word for word in words if "=" not in word or os.path.exists(word)]
    for word in files:
        if word.startswith("-"):
            raise RecipeError(f"{word} is not an option of `rush start`; see `rush start --help`.")
    return files, [word for word in words if word not in files]


def _show(record: StartRecord) -> None:
    data, plan, model = record["data"], record["plan"], record["model"]
    echo(f"{model['given']}: {model['name']}, {model['parameters']:,} parameters", bold=True)
    formats = ", ".join(f"{count:,} {name}" for name, count in data["formats"].items())
    echo(
        f"{len(data['files']):,} file{'s' * (len(data['files']) > 1)}, {data['rows']:,} rows ({formats}), {data['duplicates']:,} duplicates, {data['broken']:,} "
        f"broken{': ' + data['first_broken'] if data['broken'] else ''}"
    )
    if data["roles"]:
        echo("turns: " + ", ".join(f"{count:,} {role}" for role, count in data["roles"].items()))
    measured = "" if data["measured"] >= data["documents"] else f" (measured on {data['measured']:,})"
    echo(
        f"{data['documents']:,} documents, some {data['tokens']:,} tokens, {data['target_share']:.0%} targets; length: median "
        f"{data['median_tokens']:,}, 95 % up to {data['p95_tokens']:,}, longest {data['longest_tokens']:,}{measured}"
    )
    most = max(count for _, _, count in data["histogram"])
    for low, below, count in data["histogram"]:
        echo(f"{low:>9,}–{below - 1:<9,} {'█' * max(1, round(BAR * count / most))} {count:,}")
    echo("")
    echo(f"device: {plan['why']}")
    for row in record["decisions"]:
        echo(f"{row['key']} = {_shown(row['value'])}: {row['why']}")
    error = plan["expected_error"]
    cost = "" if plan["cost"] is None else f", cost {plan['cost']:,.2f}"
    echo(
        f"\nOn {plan['device']}: {plan['memory_bytes'] / 1e9:.1f} of {plan['limit_bytes'] / 1e9:.1f} GB, "
        f"{'fits' if plan['fits'] else 'does not fit'} (±{error['memory']:.0%}); {plan['steps']:,} steps of "
        f"{_seconds(plan['step_s'])}, {_seconds(3600 * plan['hours'])} (±{error['time']:.0%}){cost}",
        bold=True,
    )
    for remark in record["notes"]:
        echo(remark)


def _seconds(value: float) -> str:
    if value >= 7200:
        return f"{value / 3600:,.1f} h"
    if value >= 120:
        return f"{value / 60:.0f} min"
    return f"{value:.0f} s" if value >= 10 else f"{value * 1e3:,.0f} ms"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(one) for one in value)
    if isinstance(value, dict):
        name = value.get("name")
        rest = ", ".join(f"{key}={one}" for key, one in value.items() if key != "name")
        return f"{name} ({rest})" if name and rest else str(name or rest)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
