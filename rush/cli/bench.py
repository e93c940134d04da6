"""`rush bench`: kernels against the best there is, and whole training runs against their rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rush.cli.output import Json, note, print_json, print_table

if TYPE_CHECKING:
    from rush.records.kernels import KernelRecord, Row
    from rush.records.ladder import Rung
    from rush.records.models import ModelRecord

app = typer.Typer(
    no_args_is_help=True, help="Kernels and whole runs against the best there is, on this machine."
)

Out = Annotated[
    Path | None, typer.Option(help="The bench's folder; runs/bench-kernels or -models without it.")
]


@app.command("kernels")
def kernels(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="Kernels by name; all without any.")
    ] = None,
    out: Out = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the sizes with a target, fewer samples.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    json: Json = False,
) -> None:
    """Time each kernel against plain torch, compiled torch and the installed libraries, and check every result.

    On a machine without a GPU our kernels are interpreted: checked, but not timed. A bench that was interrupted
    goes on where it stopped: run the same command again.

    Examples:

      rush bench kernels --out results/kernels-h200

      rush bench kernels rmsnorm swiglu --quick
    """
    from rush.lab.kernel_bench import bench_kernels
    from rush.report.kernels import write_kernel_report

    folder = out or Path("runs") / "bench-kernels"
    with _progress(quiet=json) as tell:
        record = bench_kernels(
            ops or [],
            folder,
            quick=quick,
            device=device,
            watch=lambda p: tell(p.op or "machine", p.doing, p.done, p.total),
        )
    write_kernel_report(folder, folder / "report.html")
    if json:
        print_json(record)
        return
    _show_kernels(record)
    typer.echo(f"Record: {folder / 'kernels.json'}\nReport: {folder / 'report.html'}")


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, str, int, int], None]]:
    """A status line that changes on a terminal; elsewhere a line whenever something new is begun."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield lambda what, doing, done, total: None
        return
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda what, doing, done, total: status.update(f"[{done}/{total}] {what}: {doing}")
        return
    last = [""]

    def line(what: str, doing: str, done: int, total: int) -> None:
        text = f"[{done}/{total}] {what}: {doing}"
        if text != last[0]:
            last[0] = text
            console.print(text, markup=False, highlight=False)

    yield line


def _show_kernels(record: KernelRecord) -> None:
    for op in record["ops"]:
        title = f"{op['op']} ({op['dtype']})" + (
            "" if op["status"] == "ok" else f": {op['status']}, {op['reason']}"
        )
        here = [row for row in op["rows"] if row["status"] != "absent"]
        passes = list(dict.fromkeys(row["step"] for row in here))
        if here:
            columns = ["size", "contender", *(f"{step} ms" for step in passes), "extra", "result"]
            pairs = dict.fromkeys((row["size"], row["contender"]) for row in here)
            rows = [
                _kernel_row([row for row in here if (row["size"], row["contender"]) == pair])
                for pair in pairs
            ]
            print_table(columns, rows, title=title)
        else:
            note(title)
        away = {f"{row['contender']} ({row['reason']})" for row in op["rows"] if row["status"] == "absent"}
        if away:
            note(f"  not here: {', '.join(sorted(away))}")
    targets = [
        [op["op"], t["size"], t["step"], t["what"], _reached(t), t["verdict"]]
        for op in record["ops"]
        for t in op["targets"]
    ]
    if record["interpreted"]:
        typer.echo("Our kernels were interpreted: not a speed, only a check of what they compute.")
    if targets:
        print_table(["kernel", "size", "pass", "target", "reached", ""], targets, title="Targets")


def _kernel_row(rows: list[Row]) -> list[str]:
    """One contender at one size: its passes side by side, with their part of the ceiling."""
    first, right, extra = rows[0], rows[0]["correctness"], rows[0].get("beyond_results_bytes")
    verdict = right["verdict"] if right else ""
    if right and right["error"] is not None:
        verdict += f" ({right['error']:.0e})"
    said = f"{verdict}; {first['reason']}".strip("; ") if first["status"] != "ok" else verdict
    return [
        first["size"],
        first["contender"],
        *(_time_cell(row) for row in rows),
        f"{extra / 2**20:,.0f} MiB" if extra is not None else "",
        said[:90],
    ]


def _time_cell(row: Row) -> str:
    time, fraction = row["time_ms"], row.get("ceiling_fraction")
    if time is None:
        return "-"
    part = f" ({100 * fraction:.0f} %)" if fraction is not None else ""
    return f"{time['median']:.3f}{part}"


def _reached(target: dict[str, Any]) -> str:
    value = target["reached"]
    if value is None:
        return f"- ({target['why']})"[:60]
    if target["metric"] in ("ceiling", "memory"):
        return f"{100 * value:.1f} %"
    low, high = target["ci95"]
    return f"{value:.3f}× ({low:.3f} to {high:.3f})"


@app.command("models")
def models(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]... [KEY=VALUE]...",
            help="Workloads by name (all without any), and changes of every recipe or of measure.",
        ),
    ] = None,
    out: Out = None,
    file: Annotated[Path | None, typer.Option(help="Another list of workloads, in TOML.")] = None,
    json: Json = False,
) -> None:
    """Train our recipes beside the rivals people use: same model, batch, text and loop, in alternating processes.

    GPU minutes are few: name the workloads you want. A bench that was interrupted goes on where it stopped.

    Examples:

      rush bench models gpt2-124m --out results/models-h200

      rush bench models llama-3.2-1b measure.processes=3 batch.micro=8
    """
    from rush.lab.rivals import bench_models
    from rush.lab.workloads import FILE, load_workloads
    from rush.report.models import write_model_report

    given = words or []
    asked, overrides = [w for w in given if "=" not in w], [w for w in given if "=" in w]
    workloads = load_workloads(asked, overrides, file or FILE)
    folder = out or Path("runs") / "bench-models"
    say: Callable[[str], None] = (lambda text: None) if json else note
    with _progress(quiet=json) as tell:
        record = bench_models(
            workloads, folder, watch=lambda p: tell(p.workload, p.doing, p.done, p.total), note=say
        )
    write_model_report(folder, folder / "report.html")
    if json:
        print_json(record)
        return
    _show_models(record)
    typer.echo(f"Record: {folder / 'models.json'}\nReport: {folder / 'report.html'}")


def _show_models(record: ModelRecord) -> None:
    for workload in record["workloads"]:
        rows = [_model_row(workload["rival"], None)]
        rows += [_model_row(ours["rung"], dict(ours["target"])) for ours in workload["ours"]]
        columns = ["who", "tokens/s", "memory", "parity", "ratio", "wanted", "verdict"]
        print_table(columns, rows, title=f"{workload['name']}: {workload['about']}")


def _model_row(rung: Rung, target: dict[str, Any] | None) -> list[str]:
    speed, memory = rung.get("tokens_per_s"), rung.get("peak_memory_bytes")
    parity = rung.get("parity")
    row = [
        rung["title"],
        f"{speed['median']:,.0f} ± {(speed['ci95'][1] - speed['ci95'][0]) / 2:,.0f}" if speed else "-",
        f"{memory / 2**30:.1f} GiB" if memory else "-",
        parity["verdict"] if parity else "",
    ]
    if target is None:
        return [*row, "", "", "rival" if speed else f"{rung['status']}: {rung['reason']}"[:80]]
    reached = target["reached"]
    ratio = f"{reached:.3f}× ({target['ci95'][0]:.3f} to {target['ci95'][1]:.3f})" if reached else "-"
    why = f": {target['why']}" if target["why"] else ""
    return [*row, ratio, f"≥ {target['at_least']:g}×", f"{target['verdict']}{why}"[:90]]
