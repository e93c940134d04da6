"""`rush scale`: strong and weak scaling of every layout, with parity."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.progress_bar import ProgressBar

from rush.cli.ladder import resumable
from rush.cli.ladder_table import minutes
from rush.cli.options import ExtraTechniques, Json, RecipeName, is_override
from rush.cli.output import next_step, note, print_json, watching

if TYPE_CHECKING:
    from rush.lab.scaling.study import ScalingProgress
    from rush.records.scaling import LinkRecord, PointRecord, ScaleRecord


def scale(
    recipe: RecipeName = "tiny",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the recipe, or of measure. and parity."),
    ] = None,
    devices: Annotated[str, typer.Option(help="Numbers of devices, comma-separated.")] = "1,2",
    layouts: Annotated[
        str,
        typer.Option(
            help="ddp, zero1, zero2, zero3 (or fsdp), hybrid, tp, pp, cp, comma-separated; combinations as in zero3xtp2."
        ),
    ] = "ddp,zero2,zero3",
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: runs/scale-RECIPE.")] = None,
    without_peers: Annotated[
        bool,
        typer.Option("--without-peers", help="Also measure with peer-to-peer access between GPUs disabled."),
    ] = False,
    share_device: Annotated[
        bool,
        typer.Option(
            "--share-device",
            help="Let ranks share a GPU if there are too few: checks correctness, gives no speed.",
        ),
    ] = False,
    group_of_one: Annotated[
        bool,
        typer.Option(
            "--group-of-one",
            help="Also measure ddp on one device, as a process group of size 1 (NCCL on a GPU): its overhead.",
        ),
    ] = False,
    links: Annotated[
        bool, typer.Option(help="Time the collectives between ranks over message sizes.")
    ] = True,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="Command that starts the ranks on a cluster; {ranks} stands for their number. Default: torchrun on this machine."
        ),
    ] = None,
    technique: ExtraTechniques = None,
    json: Json = False,
) -> None:
    """Measure strong and weak scaling of every layout, in fresh processes.

    Each point has its scaling efficiency with an interval, the exposed communication time, the memory of
    every rank, and a verdict: without parity with one rank there is no efficiency. The recipe's tokens per
    step apply to the largest number of devices. An interrupted study resumes when you run the same command
    again.

    Examples:

      rush scale tiny --devices 1,2 --layouts ddp,zero2,zero3,tp,pp,cp

      rush scale llama-3.2-1b --devices 1,2,4,8 --layouts ddp,zero2,zero3,zero3xtp2 --without-peers

      rush scale llama-3.2-1b --devices 8,16,32 --layouts hybrid,zero3 --launcher "srun --ntasks={ranks} --gpus-per-node=8"

      rush scale tiny measure.processes=5 parity.steps=20 batch.total_tokens=4096
    """
    changes = list(overrides or [])
    if is_override(recipe):
        recipe, changes = "tiny", [recipe, *changes]

    from rush.lab.scaling.study import study
    from rush.lab.scaling.study_file import load_study
    from rush.report.scaling import write_scale_report
    from rush.techniques.api.own_files import added

    plan = load_study(
        recipe,
        changes,
        devices,
        layouts,
        without_peers=without_peers,
        share_device=share_device,
        group_of_one=group_of_one,
        links=links,
        launcher=launcher,
        extra_techniques=tuple(str(path.expanduser().resolve()) for path in technique or []),
    )
    folder = out or Path("runs") / f"scale-{plan.name}"
    notes: Any = (lambda text: None) if json else note
    with added(technique or []), resumable(folder), _watching(quiet=json) as watch:
        record = study(plan, folder, watch=watch, note=notes)
    write_scale_report(folder, folder / "report.html")
    if json:
        print_json(record)
        return
    from rush.files import write_atomic
    from rush.report.scaling_words import best_point, headline

    typer.echo(headline(record))
    typer.echo(f"Record: {folder / 'scale.json'}\nReport: {folder / 'report.html'}")
    best, recipe_file = best_point(record), folder / "recipe.toml"
    if best is None:
        recipe_file.unlink(missing_ok=True)
        next_step("rush", "report", str(folder), why="no layout is proved and faster; its page says why")
        return
    write_atomic(
        recipe_file,
        f"# The fastest layout of this study that learns the same: {best['layout']}.\n{best['recipe']}",
    )
    typer.echo(f"Recipe: {recipe_file}")
    next_step("rush", "train", str(recipe_file), "--nproc", str(best["devices"]))


def _watching(quiet: bool) -> AbstractContextManager[Any]:
    """A live table with a progress bar; without a terminal one line per trial."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)

    def line(progress: ScalingProgress) -> None:
        if progress.doing is None:
            console.print(*tables(progress), sep="\n")
        else:
            console.print(f"[{progress.done}/{progress.total}] {progress.doing}", markup=False)

    def live(progress: ScalingProgress) -> Group:
        bar = ProgressBar(progress.total, progress.done)
        return Group(*tables(progress), *([] if progress.doing is None else [bar]))

    return watching(quiet, console, line, live)


def tables(progress: ScalingProgress) -> list[Any]:
    """The points measured so far, and the collectives when all is done."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    record = progress.record
    kind = "trained/s" if record.get("counted") == "trained" else "tokens/s"
    points = Table(
        title=_title(progress), title_justify="left", caption=_caption(record), box=box.SIMPLE_HEAD
    )
    for column in ("devices", "layout", kind, "strong", "weak", "exposed", "memory", "verdict"):
        justify: Any = "left" if column in ("layout", "verdict") else "right"
        points.add_column(column, justify=justify)
    for point in record["points"]:
        points.add_row(*(Text(cell) for cell in row_of(point)))
    found: list[Any] = [points]
    if progress.doing is None:
        found += [Text(sentence) for point in record["points"] if (sentence := _why(point))]
    if links := [link for link in record["links"] if link["sizes"]]:
        table = Table(
            title="Collectives, at the size with the best rate", title_justify="left", box=box.SIMPLE_HEAD
        )
        for column in ("ranks", "operation", "size", "bytes/s", "bus bytes/s", ""):
            table.add_column(column, justify="left" if column in ("operation", "") else "right")
        for link in links:
            table.add_row(*(Text(cell) for cell in _link_row(link)))
        found.append(table)
    return found


def row_of(point: PointRecord) -> list[str]:
    """The cells of a point; without parity there is no efficiency."""
    speed, exposed, memory = point["tokens_per_s"], point["exposed"], point["memory_bytes"]
    spread = (speed["ci95"][1] - speed["ci95"][0]) / 2 if speed else 0.0
    return [
        str(point["devices"]),
        point["layout"] + ("" if point["peer_to_peer"] else ", no peers"),
        f"{speed['median']:,.0f} ± {spread:,.0f}" if speed else "",
        *(_efficiency(point, scaling) for scaling in ("strong", "weak")),
        f"{100 * exposed['share']:.0f} %" if exposed else "",
        _memory(memory) if memory else "",
        point["verdict"],
    ]


def _why(point: PointRecord) -> str | None:
    """The reason of a verdict other than equal."""
    reason = point["reason"] or (point["parity"] or {}).get("why")
    if point["verdict"] in ("equal", "baseline") or not reason:
        return None
    return f"{point['layout']} on {point['devices']}: {point['verdict']}: {reason}"


def _efficiency(point: PointRecord, scaling: str) -> str:
    found = point["efficiency"].get(scaling)
    if found is None:
        return ""
    low, high = found["ci95"]
    return f"{100 * found['ratio']:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


def _memory(ranks: list[int]) -> str:
    low, high = min(ranks) / 2**20, max(ranks) / 2**20
    return f"{high:,.0f} MiB" if high < 1.02 * low else f"{low:,.0f}–{high:,.0f} MiB"


def _link_row(link: LinkRecord) -> list[str]:
    from rush.cli.probe import quantity

    best = max(link["sizes"], key=lambda size: size["bytes_per_s"])
    return [
        str(link["ranks"]),
        link["operation"].replace("_", "-"),
        quantity(best["bytes"], "B"),
        quantity(best["bytes_per_s"], "B/s"),
        quantity(best["bus_bytes_per_s"], "B/s"),
        link["backend"] + ("" if link["peer_to_peer"] else ", no peer-to-peer"),
    ]


def _title(progress: ScalingProgress) -> str:
    record = progress.record
    head = f"{record['name']} on {', '.join(map(str, record['devices']))} devices"
    if progress.doing is None:
        return f"{head} · done"
    left = "" if progress.seconds_left is None else f" · about {minutes(progress.seconds_left)} left"
    return f"{head} · {progress.done} of {progress.total} trials{left} · {progress.doing}"


def _caption(record: ScaleRecord) -> str | None:
    parts = []
    if record["threads_per_rank"] is not None:
        cores = record["threads_per_rank"]
        parts.append(f"a device is {cores} CPU core{'s' * (cores != 1)}")
    if (drift := record["drift"]) is not None:
        moved, low, high = (f"{100 * (ratio - 1):+.1f} %" for ratio in (drift["ratio"], *drift["ci95"]))
        restless = "BATCHES TOO UNEVEN" if drift.get("uneven") else "MACHINE TOO BUSY"
        busy = "DRIFT" if drift["flagged"] else restless if drift["restless"] else "within its interval"
        parts.append(f"the first point measured again: {moved} ({low} to {high}), {busy}")
    return "; ".join(parts) or None
