"""`rush probe`: the machine, its measured rates, and the techniques that run on it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rush.cli.options import ExtraTechniques, Json, Overrides, complete_recipe, is_override
from rush.cli.output import measuring_bar, next_step, note, print_json, print_table
from rush.errors import MachineError

if TYPE_CHECKING:
    from rush.hardware import Ceilings, Machine
    from rush.recipe import Recipe

BUSY = 0.75
"""Load average per core above which other processes disturbed the measurement."""


def probe(
    recipe: Annotated[
        str,
        typer.Argument(
            help="The recipe to check techniques for: a name or a .toml file.",
            autocompletion=complete_recipe,
        ),
    ] = "tiny",
    overrides: Overrides = None,
    collectives: Annotated[
        int | None,
        typer.Option(
            help="Time all-reduce and all-gather between this many processes. Default: one per GPU if there "
            "are several GPUs, otherwise none.",
            min=2,
        ),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure again instead of reading the cache.")
    ] = False,
    technique: ExtraTechniques = None,
    json: Json = False,
) -> None:
    """Show this machine's devices, links, versions and measured rates, and which techniques run on it.

    Rates are measured once (in seconds) and cached; their age is shown. Every technique is checked for a
    recipe, with the reason if it cannot run.

    Examples:

      rush probe

      rush probe llama-3.2-1b techniques+=amp_bf16

      rush probe --refresh --collectives 2
    """
    from rush.hardware import datasheet_peaks, packages
    from rush.hardware import probe as probe_machine
    from rush.recipe_io import load_recipe
    from rush.techniques.api.own_files import added

    if is_override(recipe):
        recipe, overrides = "tiny", [recipe, *(overrides or [])]
    chosen = load_recipe(recipe, overrides or [])
    machine = probe_machine(chosen.run.device)
    with added(technique or []):
        verdicts = check_techniques(chosen, machine)
    found = _measure(machine, collectives, refresh)
    if json:
        report: dict[str, Any] = {
            "machine": machine.to_dict(),
            "packages": packages(),
            "rates": found.rates(),
            "age_s": found.age_s(),
            "peaks": datasheet_peaks(machine),
            "ceilings": found.to_dict(),
            "recipe": {"name": recipe, "digest": chosen.digest},
            "techniques": verdicts,
        }
        print_json(report)
        return
    _show_machine(machine)
    _show_rates(found, datasheet_peaks(machine))
    runnable = sum(row["runs"] for row in verdicts)
    typer.secho(f"\nTechniques: {runnable} of {len(verdicts)} can run here with {recipe}", bold=True)
    print_table(
        ["group", "technique", "stage", "runs here", "why not"],
        [
            [
                row["group"],
                row["name"],
                row["stage"],
                "yes" if row["runs"] else "no",
                "; ".join(row["reasons"]),
            ]
            for row in verdicts
        ],
    )
    if [recipe, *(overrides or [])] == ["tiny"]:
        next_step("rush", "ladder", "here", why="what they gain on this machine")
    else:
        next_step("rush", "tune", recipe, *(overrides or []), "--budget", "15m", why="the fastest of them")


def check_techniques(recipe: Recipe, machine: Machine) -> list[dict[str, Any]]:
    """For every technique, by group: whether this recipe can use it here, or why not."""
    from rush.recipe_io import changed
    from rush.techniques import check, group_of, registry

    # A wrong name or knob is an error; that one of the recipe's techniques cannot run here is a row below.
    with contextlib.suppress(MachineError):
        check(recipe, machine)
    present = {name for name, _ in recipe.technique_uses()}
    rows: list[dict[str, Any]] = []
    for technique in sorted(registry().values(), key=lambda one: (group_of(one), one.name)):
        name = technique.name
        others = present - {name}
        with_it = recipe if name in present else changed(recipe, {"techniques": [*recipe.techniques, name]})
        reasons = [need.message for need in technique.requires if not need.met(machine, with_it)]
        clashes = others.intersection(technique.conflicts)
        reasons += [f"it conflicts with {other}, which the recipe uses" for other in sorted(clashes)]
        facts = {"name": name, "group": group_of(technique), "stage": technique.stage.name}
        rows.append({**facts, "runs": not reasons, "reasons": reasons})
    return rows


def _measure(machine: Machine, collectives: int | None, refresh: bool) -> Ceilings:
    """The ceilings, cached or measured now; collectives are always measured on several GPUs."""
    from rush.hardware import ceilings
    from rush.hardware.collectives import check_ranks
    from rush.techniques.api.rates import rates_to_measure

    if collectives is not None:
        check_ranks(machine, collectives)
    with measuring_bar() as show:
        names = rates_to_measure(machine, build=False)
        found = ceilings(machine, names, refresh=refresh, on_problem=note, on_progress=show)
        if collectives is not None:
            return ceilings(machine, collectives=collectives, on_progress=show)
        if machine.device == "cuda" and machine.num_devices > 1:
            try:
                return ceilings(machine, collectives=machine.num_devices, on_progress=show)
            except MachineError as error:
                # Show the rest of the probe; with an explicit --collectives this is an error.
                note(str(error))
    return found


def _show_machine(machine: Machine) -> None:
    from rush.hardware import packages

    typer.secho(machine.summary(), bold=True)
    versions = {
        "Python": machine.python, "torch": machine.torch, "CUDA": machine.cuda, "ROCm": machine.hip,
        "driver": machine.driver, "cuDNN": machine.cudnn, "NCCL": machine.nccl,
    }  # fmt: skip
    cpu = machine.cpu
    rows = [
        ["system", machine.os],
        ["processor", f"{cpu.model}, {cpu.num_cores} cores, {cpu.num_threads} usable threads"],
        ["features", " ".join(cpu.features) or "none that speed up matmuls"],
        ["memory", f"{machine.ram_bytes / 2**30:.1f} GiB"],
        ["versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)],
        ["packages", ", ".join(f"{name} {version or 'absent'}" for name, version in packages().items())],
    ]
    print_table(["", ""], rows)
    if machine.device == "cuda":
        typer.echo()
        print_table(
            ["GPU", "name", "memory", "capability", "multiprocessors", "NVLinks"],
            [
                [
                    str(index),
                    device.name,
                    f"{device.memory_bytes / 2**30:.1f} GiB",
                    ".".join(map(str, device.capability or ())) or "-",
                    str(device.num_multiprocessors or "-"),
                    "-" if device.num_nvlinks is None else str(device.num_nvlinks),
                ]
                for index, device in enumerate(machine.devices)
            ],
        )
    if machine.links:
        typer.echo()
        rows = [
            [f"{link.first} – {link.second}", link.kind, "yes" if link.peer_to_peer else "no"]
            for link in machine.links
        ]
        print_table(["GPUs", "path", "peer to peer"], rows)


def _show_rates(found: Ceilings, peaks: dict[str, float] | None) -> None:
    typer.secho(f"\nCeilings, measured {ago(found.age_s())} (--refresh measures again)", bold=True)
    rows = []
    for dtype, samples in found.matmul.items():
        best = max(samples, key=lambda sample: sample.rate)
        share = f"{best.rate / peaks[dtype]:.0%}" if peaks and dtype in peaks else "-"
        rows.append([f"{dtype} matmul", quantity(best.rate, "FLOP/s"), share, best.case.replace("x", " × ")])
    rows += [
        [kind.replace("_", " "), quantity(sample.rate, "B/s"), "-", ""]
        for kind, sample in found.bandwidth.items()
    ]
    rows += [
        [
            f"{row.operation.replace('_', '-')}, {row.ranks} ranks",
            quantity(row.bytes_per_s, "B/s"),
            "-",
            f"{row.backend}; bus bandwidth {quantity(row.bus_bytes_per_s, 'B/s')}",
        ]
        for row in found.collectives
    ]
    if found.launching is not None:
        each = f"{1e6 / found.launching.rate:.3g} µs each, {found.launching.case}"
        rows.append(["launches", quantity(found.launching.rate, "/s"), "-", each])
    rows += [[f"{dtype} matmul", "-", "-", reason] for dtype, reason in found.unsupported.items()]
    columns = ["what", "rate", "of datasheet", "at best, or why not"]
    if not peaks:
        columns, rows = columns[:2] + columns[3:], [row[:2] + row[3:] for row in rows]
    print_table(columns, rows)
    if found.load is not None and found.load > BUSY:
        note("Other processes were running during the measurement; the rates may be too low. Try --refresh.")


def ago(seconds: float) -> str:
    """An age in its largest unit."""
    for size, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def quantity(value: float, unit: str) -> str:
    """Three digits and a decimal prefix: 69.8 GFLOP/s."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
