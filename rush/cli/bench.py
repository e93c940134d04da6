"""`rush bench`: our kernels and recipes against the baselines people use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rush.cli.options import Device, ExtraTechniques, Json
from rush.cli.output import next_step, note, print_json, print_table, say
from rush.errors import RecipeError
from rush.records.step_gap import parity_words
from rush.records.targets import CLOSE_CALL, target_word

if TYPE_CHECKING:
    from rush.records.kernels import KernelRecord, KernelRow
    from rush.records.ladder import RungRecord
    from rush.records.models import LongestRecord, ModelRecord

app = typer.Typer(
    no_args_is_help=True, help="Benchmark our kernels and recipes against the baselines people use."
)

Out = Annotated[
    Path | None, typer.Option(help="Output folder. Default: runs/bench-kernels or runs/bench-models.")
]


@app.command("kernels")
def kernels(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="Kernels to measure. Default: all.")
    ] = None,
    out: Out = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only sizes with a target, and fewer samples.")
    ] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Time each kernel against eager PyTorch, torch.compile and the installed libraries, and check every result.

    Without a GPU, kernels with a C++ implementation are timed; Triton kernels run in the interpreter: checked, but not timed.
    An interrupted benchmark resumes when you run the same command again.

    Examples:

      rush bench kernels --out results/kernels-h200

      rush bench kernels rmsnorm swiglu --quick
    """
    from rush.bench.kernel_bench import bench_kernels
    from rush.report.kernels import write_kernel_report

    folder = out or Path("runs") / "bench-kernels"
    with _progress(quiet=json) as show:
        record = bench_kernels(
            ops or [],
            folder,
            quick=quick,
            device=device,
            watch=show,
        )
    write_kernel_report(folder, folder / "report.html")
    if json:
        print_json(record)
        return
    _show_kernels(record)
    typer.echo(f"Record: {folder / 'kernels.json'}\nReport: {folder / 'report.html'}")
    next_step("rush", "ladder", "here", why="what they gain in a whole step")


@app.command("offload")
def offload(
    shapes: Annotated[
        list[str],
        typer.Argument(metavar="SHAPE...", help="Shapes to time, such as llama-3.1-8b and llama-3.1-70b."),
    ],
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: runs/bench-offload.")] = None,
    where: Annotated[
        str, typer.Option(help="Where the layers are: cpu, disk or both, as in cpu,disk.")
    ] = "cpu,disk",
    layers: Annotated[
        str | None,
        typer.Option(
            help="Number of layers to time instead of all, as in 8,16: a shape that host or disk cannot hold."
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=2)] = 8,
    processes: Annotated[int, typer.Option(help="Fresh processes of each contender.", min=1)] = 2,
    dtype: Annotated[
        str, typer.Option(help="Type of the weights: bfloat16, float16 or float32.")
    ] = "bfloat16",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Time inference with layers in host memory or on disk, against accelerate: tokens per second and memory.

    The weights are random and are written to the output folder once. Both contenders read the same files and
    generate greedily, in fresh processes that take turns.

    Examples:

      rush bench offload llama-3.1-8b --out results/offload-h200

      rush bench offload llama-3.1-70b --layers 8,16 --where cpu
    """
    from rush.bench.offload import bench_offload
    from rush.report.offload import COLUMNS, picture, table_rows

    folder = out or Path("runs") / "bench-offload"
    with _progress(quiet=json) as show:
        record = bench_offload(
            shapes,
            folder,
            where=_places(where),
            layers=_counts(layers),
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            processes=processes,
            dtype=dtype,
            device=device,
            watch=show,
        )
    (folder / "offload.svg").write_text(picture(record))
    if json:
        print_json(record)
        return
    for name in dict.fromkeys(row["shape"] for row in record["rows"]):
        print_table(COLUMNS, table_rows(record, name), title=f"{name}, {record['dtype']}")
    typer.echo(f"Record: {folder / 'offload.json'}\nPicture: {folder / 'offload.svg'}")
    typer.echo(f"Weights: {folder / 'models'} (kept for another run; delete them when you are done)")
    next_step("rush", "generate", "MODEL", "--offload", "cpu", "--prompt", "Once upon a time")


def _places(given: str) -> list[str]:
    found = given.split(",")
    if not found or not set(found) <= {"cpu", "disk"}:
        raise RecipeError(f"--where is {given!r}; allowed: cpu, disk or cpu,disk.")
    return found


def _counts(given: str | None) -> list[int]:
    if given is None:
        return []
    if not all(word.isdecimal() and len(word) < 6 and int(word) > 0 for word in given.split(",")):
        raise RecipeError(f"--layers is {given!r}; allowed: whole numbers from 1, as in 8,16.")
    return [int(word) for word in given.split(",")]


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, str, int, int], None]]:
    """A status line on a terminal; elsewhere one line per change."""
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
            note(f"  not available: {', '.join(sorted(away))}")
    targets = [
        [op["op"], t["size"], t["step"], t["what"], _reached(t), target_word(t)]
        for op in record["ops"]
        for t in op["targets"]
    ]
    if record["interpreted"]:
        typer.echo(
            "Kernels without a CPU implementation ran in the interpreter: their results were checked, their "
            "speed was not measured."
        )
    if targets:
        print_table(["kernel", "size", "pass", "target", "reached", ""], targets, title="Targets")


def _kernel_row(rows: list[KernelRow]) -> list[str]:
    """One contender at one size: its passes side by side, each with its fraction of the ceiling."""
    first, right, extra = rows[0], rows[0]["correctness"], rows[0].get("beyond_results_bytes")
    verdict = right["verdict"] if right else ""
    if right and right["error"] is not None:
        verdict += f" ({right['error']:.0e})"
    outcome = f"{verdict}; {first['reason']}".strip("; ") if first["status"] != "ok" else verdict
    return [
        first["size"],
        first["contender"],
        *(_time_cell(row) for row in rows),
        f"{extra / 2**20:,.0f} MiB" if extra is not None else "",
        outcome[:90],
    ]


def _time_cell(row: KernelRow) -> str:
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
            help="Workloads by name (default: all), and overrides of every recipe or of the measure table.",
        ),
    ] = None,
    out: Out = None,
    file: Annotated[Path | None, typer.Option(help="A TOML file with other workloads.")] = None,
    race: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Afterwards race each of our recipes that has STATISTICAL techniques against itself without "
            "them, over this many tokens, with "
            "three seeds: net speedup in addition to speed.",
            min=1,
        ),
    ] = None,
    technique: ExtraTechniques = None,
    json: Json = False,
) -> None:
    """Train our recipes and the baselines people use, with the same model, batch, text and loop, in alternating processes.

    Name the workloads to save GPU time. An interrupted benchmark resumes when you run the same command again.

    Examples:

      rush bench models gpt2-124m --out results/models-h200

      rush bench models llama-3.2-1b measure.processes=3 batch.micro=8

      rush bench models gpt2-124m --race 80000000

      rush bench models sft-3b lora-8b qlora-8b-1 qlora-8b-4 --out results/finetuning-h200

      rush bench models qlora-8b-long --out results/finetuning-h200
    """
    from rush.bench.baselines import bench_models
    from rush.bench.workloads import FILE, load_workloads
    from rush.lab.race.pair import race_models
    from rush.records.models import write_models
    from rush.report.models import write_model_report
    from rush.techniques.api.own_files import added

    given = words or []
    asked, overrides = [w for w in given if "=" not in w], [w for w in given if "=" in w]
    workloads = load_workloads(asked, overrides, file or FILE)
    folder = out or Path("runs") / "bench-models"
    notes: Callable[[str], None] = (lambda text: None) if json else note
    files = [file.expanduser().resolve() for file in technique or []]
    with added(files), _progress(quiet=json) as show:
        record = bench_models(
            workloads,
            folder,
            extra_techniques=files,
            watch=show,
            note=notes,
        )
        race_models(record, folder, race, techniques=[str(file) for file in files], note=notes)
        write_models(folder, record)
    write_model_report(folder, folder / "report.html")
    if json:
        print_json(record)
        return
    _show_models(record)
    typer.echo(f"Record: {folder / 'models.json'}\nReport: {folder / 'report.html'}")
    next_step("rush", "recipes", why="the ready recipes with these techniques")


def _show_models(record: ModelRecord) -> None:
    from rush.report.race_words import net_words

    for workload in record["workloads"]:
        title = f"{workload['name']}: {workload['about']}"
        if "longest" in workload:
            _show_longest(workload["longest"], title)
        else:
            rows = [model_row(workload["rival"], None)]
            for ours in workload["ours"]:
                rows.append(model_row(ours["rung"], dict(ours["target"]), primary=ours.get("primary", True)))
                if memory := ours["target"].get("memory"):
                    rows.append(_memory_row(dict(memory)))
            columns = ["recipe", "tokens/s", "memory", "parity", "ratio", "target", "verdict"]
            print_table(columns, rows, title=title)
            for ours in workload["ours"]:
                if net := net_words(ours["rung"].get("net")):
                    say(f"{ours['rung']['title']}: {net}")
        for took in workload.get("took", []):
            parts = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in took["parts"].items())
            note(f"  {took['who']} took {took['wall_s']:.0f} s{f': {parts}' if parts else ''}")


def model_row(rung: RungRecord, target: dict[str, Any] | None, *, primary: bool = True) -> list[str]:
    speed, memory = rung.get("tokens_per_s"), rung.get("peak_memory_bytes")
    parity = rung.get("parity")
    row = [
        rung["title"] + ("" if primary else " (secondary)"),
        f"{speed['median']:,.0f} ± {(speed['ci95'][1] - speed['ci95'][0]) / 2:,.0f}" if speed else "-",
        f"{memory / 2**30:.1f} GiB" if memory else "-",
        parity_words(parity) if parity else "",
    ]
    if target is None:
        return [*row, "", "", "baseline" if speed else f"{rung['status']}: {rung['reason']}"[:80]]
    reached = target["reached"]
    ratio = f"{reached:.3f}× ({target['ci95'][0]:.3f} to {target['ci95'][1]:.3f})" if reached else "-"
    return [*row, ratio, f"≥ {target['at_least']:g}×", verdict_of(target)]


def _memory_row(target: dict[str, Any]) -> list[str]:
    """The memory target, below the speed target."""
    reached = f"{target['reached']:.3f}×" if target["reached"] else "-"
    return ["", "", "", "", f"memory {reached}", f"≤ {target['at_most']:g}×", verdict_of(target)]


def verdict_of(target: dict[str, Any]) -> str:
    word, why = target_word(target), target["why"]
    return word if word == CLOSE_CALL else f"{word}: {why}"[:90] if why else word


def _show_longest(longest: LongestRecord, title: str) -> None:
    from rush.report.models import longest_words

    rows = [
        [
            f"{tried['sequence']:,}",
            f"{'≥ ' if tried.get('cold') else ''}{tried['tokens_per_s']:,.0f}"
            if tried["tokens_per_s"]
            else "-",
            f"{tried['step_s']:.1f} s" if tried["step_s"] else "-",
            f"{tried['peak_memory_bytes'] / 2**30:.1f} GiB" if tried["peak_memory_bytes"] else "-",
            "fits" if tried["status"] == "ok" else f"{tried['status']}: {tried['reason']}"[:80],
        ]
        for tried in longest["tried"]
    ]
    print_table(["sequence", "tokens/s", "step", "memory", ""], rows, title=title)
    typer.echo(f"{longest_words(longest)}. Published: {longest['published']:,} ({longest['source']}).")
