"""`rush plan`: predicted memory, step time and cost of a recipe, on this machine or another one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rush.cli.options import ExtraTechniques, Json, OptionalRecipe, Overrides, is_override
from rush.cli.output import next_step, print_json, print_table, say
from rush.cli.plan_chart import complete_chart, draw
from rush.cli.plan_view import show_plan
from rush.errors import RecipeError

if TYPE_CHECKING:
    from rush.plan import Plan, TargetMachine
    from rush.recipe import Recipe


def plan(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    machine: Annotated[
        str | None,
        typer.Option(
            help="An accelerator of the catalog (a100-80-sxm, h100-sxm, 4090, cpu …). Default: this machine."
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Number of devices; with --nodes, per node.", min=1)
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.", min=1)] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Link between the devices of a node (pcie4, nvlink3 …). Default: that of the accelerator."
        ),
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Network between nodes (ib-ndr, ethernet-100 …).")
    ] = None,
    network_cards: Annotated[
        int | None,
        typer.Option(help="Network cards per node. Default: that of the accelerator.", min=1),
    ] = None,
    search: Annotated[
        bool,
        typer.Option("--search", help="Find the fastest layout, micro batch, checkpointing and precision."),
    ] = False,
    beyond: Annotated[
        bool,
        typer.Option("--beyond", help="With --search: include layouts that the trainer cannot run yet."),
    ] = False,
    best: Annotated[
        int | None, typer.Option(help="With --search: how many plans to show. Default: 3.", min=1)
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Token budget, as in 300B or 1e9: adds its time, energy and cost.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of one device per hour, in any currency.", min=0)
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare the planner with every measurement under --results instead."),
    ] = False,
    results: Annotated[Path, typer.Option(help="With --check: the folder with the records.")] = Path(
        "results"
    ),
    html: Annotated[Path | None, typer.Option(help="Also write the plan as an HTML page.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --search: write the fastest plan as a recipe to this .toml file. With --chart: the folder."
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER or OWNER/NAME",
            help="Plan the model of a Hugging Face config.json (a file, a folder or an id on the hub) "
            "instead of the recipe's, even "
            "if rush cannot train it.",
        ),
    ] = None,
    chart: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Draw plans over devices, links, GPU models, nodes, layouts or batches: speedup, memory, "
            "zero, links, cards, nodes, layouts, "
            "batch, or all; with the expected error, next to published measurements. --out: the folder. Default: runs/plan-KIND.",
            autocompletion=complete_chart,
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="With --chart cards: the second accelerator. Default: a800-80-sxm.")
    ] = None,
    technique: ExtraTechniques = None,
    json: Json = False,
) -> None:
    """Predict whether a recipe fits, its step time and its cost, in seconds and without the device.

    Memory and time are broken down by part, with the source of the rates (measured here, calibrated by records, or a derated
    datasheet) and the expected error. docs/plan.md explains the model.

    Examples:

      rush plan llama-3.2-1b-fast

      rush plan llama-3.1-8b batch.micro=2 layout.fsdp=8 --machine a100-80-sxm --devices 8 --tokens 15T --price 1.8

      rush plan llama-3.1-8b --machine h100-sxm --devices 8 --nodes 4 --search

      rush plan --config deepseek-ai/DeepSeek-V3 layout.fsdp=64 --machine h100-sxm --devices 8 --nodes 8

      rush plan --chart speedup

      rush plan --chart cards llama-3.2-1b --machine a100-80-sxm --against a800-80-sxm --devices 8

      rush plan --check
    """
    if chart is not None:
        refused = {
            "--search": search, "--check": check, "--tokens": tokens is not None, "--price": price is not None,
            "--beyond": beyond, "--best": best is not None, "--html": html is not None, "--config": config is not None,
            "--network-cards": network_cards is not None, "--technique": bool(technique),
        }  # fmt: skip
        options = {
            "machine": machine, "against": against, "devices": devices, "nodes": nodes, "link": link, "network": network,
        }  # fmt: skip
        draw(chart, recipe, overrides or [], options, out, json, refused)
        return
    _pointless(
        ("--against", against is not None, "--chart cards"),
        ("--link", link is not None and machine is None, "--machine; this machine's links are known"),
        ("--network", network is not None and machine is None, "--machine"),
        ("--network-cards", network_cards is not None and machine is None, "--machine"),
        ("--price", price is not None and tokens is None, "--tokens"),
        ("--beyond", beyond and not search, "--search"),
        ("--best", best is not None and not search, "--search"),
        ("--out", out is not None and not search, "--search or --chart"),
        (
            "--out",
            out is not None and beyond,
            "a search without --beyond; the trainer cannot run those layouts",
        ),
    )
    if config is not None and recipe is not None and is_override(recipe):
        overrides, recipe = [recipe, *(overrides or [])], None
    if check:
        if recipe is not None or technique or config is not None:
            given = repr(recipe) if recipe is not None else "--technique" if technique else "--config"
            raise RecipeError(
                f"--check compares the planner with all records and takes no recipe; found {given}. Leave one of them out."
            )
        _check(results, json)
        return
    if recipe is None and config is None:
        raise RecipeError(
            "rush plan needs a recipe's name or file, --config, --check or --chart; `rush recipes` lists the names."
        )
    from rush.api import plan_recipe
    from rush.plan.target import find_target
    from rush.recipe_io import load_recipe
    from rush.techniques.api.own_files import added

    target: dict[str, Any] = {
        "machine": machine, "devices": devices, "nodes": nodes, "link": link, "network": network,
        "network_cards": network_cards,
    }  # fmt: skip
    output = _Output(None if tokens is None else count(tokens), price, html, out, json)
    with added(technique or []):
        if config is not None:
            if search or html is not None:
                raise RecipeError("--config plans one recipe for one model; leave out --search and --html.")
            _plan_config(config, recipe or CONFIG_RECIPE, overrides or [], target, output)
            return
        assert recipe is not None
        chosen = load_recipe(recipe, overrides or [], auto=True)
        words = [recipe, *(overrides or [])]
        if chosen.model.name != recipe and any(one.startswith("model.name") for one in overrides or []):
            recipe = f"{chosen.model.name} as {recipe}"
        if search:
            limit_gb = chosen.run.memory_limit_gb
            _search(recipe, chosen, find_target(**target, limit_gb=limit_gb), best or 3, beyond, output)
            return
        found = plan_recipe(chosen, **target)
    output.page(recipe, [found], [])
    if json:
        print_json(output.row(found))
        return
    show_plan(recipe, found, output.tokens, price)
    output.say_page()
    _say_next(found, words, target)


def _say_next(plan: Plan, words: Sequence[str], target: Mapping[str, Any]) -> None:
    if plan.fits and target["machine"] is None:
        ranks = plan.target.devices
        next_step("rush", "train", *words, *(["--nproc", str(ranks)] if ranks > 1 else []))
        return
    options = [
        f"--{name}={target[name]}" for name in ("machine", "devices", "nodes") if target[name] is not None
    ]
    next_step("rush", "plan", *words, *options, "--search", why="the fastest that fits")


@dataclass(frozen=True)
class _Output:
    """Which parts of a plan are shown, and where."""

    tokens: float | None
    price: float | None
    html: Path | None
    out: Path | None
    json: bool

    def row(self, plan: Plan) -> dict[str, Any]:
        return plan.to_dict() | ({"budget": plan.budget(self.tokens, self.price)} if self.tokens else {})

    def page(self, name: str, plans: Sequence[Plan], lost: Sequence[str]) -> None:
        """Write the HTML page if the user requested one."""
        from rush.plan.describe import describe
        from rush.report.plan import write_plan

        if self.html is None:
            return
        records = [
            one.to_dict()
            | {"title": describe(one.spec)}
            | ({"budget": one.say_budget(self.tokens, self.price)} if self.tokens else {})
            for one in plans
        ]
        write_plan(self.html, name, records, list(lost))

    def say_page(self) -> None:
        if self.html is not None:
            typer.echo(f"\nWritten: {self.html}")


CONFIG_RECIPE = "llama-3.1-8b"
"""The recipe of `--config` without one: its batch, techniques and optimizer."""


def _plan_config(
    config: str, recipe: str, overrides: Sequence[str], target: Mapping[str, Any], output: _Output
) -> None:
    from rush.api import plan_config

    found = plan_config(config, recipe, *overrides, **target)
    assert found.model is not None
    if output.json:
        print_json(output.row(found))
        return
    title = f"{config}, {found.model.parameters:,} parameters, as {recipe}"
    show_plan(title, found, output.tokens, output.price)
    if found.model.doubts:
        typer.secho("\nNot known to the planner, and counted as the nearest equivalent", bold=True)
    for doubt in found.model.doubts:
        say(f"  {doubt}")
    typer.echo("")
    if found.model.doubts:
        next_step("rush", "plan", "--config", config, "layout.fsdp=64", "--machine", "h100-sxm", "--devices", "8", "--nodes", "8", why="other layouts and machines")  # fmt: skip
    else:
        on = [] if target["machine"] is None else ["--device", target["machine"]]
        next_step("rush", "start", config, "--data", "FILES", *on, why="a recipe for your data")


def count(text: str) -> float:
    """A number of tokens: 1e9, 500_000, 300B, 15T."""
    found = re.fullmatch(r"([\d_.]+(?:e\+?\d+)?)\s*([kmbt]?)", text.strip().lower())
    try:
        value = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[found[2]] if found else 0.0
    except ValueError:
        value = 0.0
    if not 1 <= value < math.inf:
        raise RecipeError(
            f"--tokens is {text!r}; allowed: a number of tokens of at least one, as in 1e9, 300B or 15T."
        )
    return value


def _pointless(*asked: tuple[str, bool, str]) -> None:
    """Refuse options that would be ignored."""
    for option, alone, wants in asked:
        if alone:
            raise RecipeError(f"{option} needs {wants}.")


def _search(
    name: str, recipe: Recipe, target: TargetMachine, best: int, beyond: bool, output: _Output
) -> None:
    from rush.plan import search
    from rush.plan.describe import describe

    out = output.out
    if out is not None and out.exists():
        raise RecipeError(f"{out} already exists; give another --out, or remove it.")
    found = search(recipe, target, best=best, beyond=beyond)
    output.page(name, found.best, found.lost)
    if out is not None:
        _write_best(name, recipe, found.best[0], out)
    if output.json:
        plans = list(map(output.row, found.best))
        print_json({"best": plans, "lost": list(found.lost), "tried": found.tried, "fitting": found.fitting})
        return
    typer.secho(
        f"{name} on {target.devices:,} × {target.name}: {found.tried:,} configurations, {found.fitting:,} fit",
        bold=True,
    )
    print_table(
        ["layout", "tokens/s/device", "MFU", "GiB", "step"],
        [
            [
                describe(one.spec),
                f"{one.tokens_per_s_per_device:,.0f}",
                f"{one.mfu:.0%}" if one.mfu else "-",
                f"{one.life.total / 2**30:.0f}{' (tight)' if one.tight else ''}",
                f"{one.time.step:.2f} s",
            ]
            for one in found.best
        ],
    )
    typer.secho("\nRejected", bold=True)
    for line in found.lost:
        say(f"  {line}")
    typer.echo("")
    show_plan(name, found.best[0], output.tokens, output.price)
    output.say_page()
    typer.echo("")
    if out is None:
        if not beyond:
            say("Next: the same with --out recipe.toml, which writes the fastest plan as a recipe.")
    elif (nodes := target.devices // target.devices_per_node) > 1:
        next_step("rush", "launch", str(out), "--nodes", str(nodes), "--gpus-per-node", str(target.devices_per_node), "--slurm")  # fmt: skip
    else:
        next_step("rush", "train", str(out), "--nproc", str(target.devices))


def _write_best(name: str, recipe: Recipe, best: Plan, out: Path) -> None:
    from rush.files import write_atomic
    from rush.plan.describe import describe, recipe_of
    from rush.recipe_io import write_toml

    said = f"# The fastest plan of {name} for {best.target.devices:,} × {best.target.name}: {describe(best.spec)}.\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, said + write_toml(recipe_of(recipe, best.spec)))


def _check(results: Path, json: bool) -> None:
    from rush.plan.check import as_json, check, other_splits, overflows

    if not results.is_dir():
        raise RecipeError(
            f"there is no folder {results} with records to compare with. Give one with --results: records of your own, or the folder "
            "results of the repository (https://github.com/optimization-rush/optimization-rush), which the package does not hold."
        )
    rows, summaries, _ = check(results)
    drawn = other_splits(results) if any(one.kind == "time" for one in summaries) else []
    rooms = overflows(results)
    if json:
        print_json(as_json(rows, summaries, drawn, rooms))
        return
    units = {"bytes": (2**30, "GiB"), "s": (1e-3, "ms"), "tokens/s/device": (1, "tokens/s")}
    for kind in ("memory", "time", "published", "published memory"):
        print_table(
            [kind, "study", "measured", "planned", "error", ""],
            [
                [
                    row.name,
                    "" if kind.startswith("published") else row.study.removesuffix("-h200"),
                    f"{row.measured / units[row.unit][0]:,.2f} {units[row.unit][1]}",
                    f"{row.planned / units[row.unit][0]:,.2f}",
                    f"{row.error:+.1%}",
                    "held out" if row.held_out else "calibrates",
                ]
                for row in rows
                if row.kind == kind
            ],
        )
        typer.echo("")
    print_table(
        ["held out", "cases", "median", "95th", "worst", "wanted"],
        [
            [
                one.kind,
                f"{one.cases}",
                f"{one.median:.1%}",
                f"{one.p95:.1%}",
                f"{one.worst:.1%}",
                "" if one.wanted_median is None
                else f"{one.wanted_median:.0%}" + (f", {one.wanted_p95:.0%}" if one.wanted_p95 else "")
                + (": reached" if one.reached else ": not reached"),
            ]
            for one in summaries
        ],
    )  # fmt: skip
    if drawn:
        middle, high = sorted(one.median for one in drawn), sorted(one.p95 for one in drawn)
        typer.echo(
            f"\nTime, calibrated on {len(drawn)} other thirds: median {middle[0]:.1%} to {middle[-1]:.1%}, 95th {high[0]:.1%} to "
            f"{high[-1]:.1%}, as wanted in {sum(one.reached for one in drawn)} of them."
        )
    if rooms:
        wrong = [f"{one.study}: {one.name}" for one in rooms if one.said_to_fit]
        typer.echo(
            f"Of {len(rooms)} recipes that ran out of memory, {len(wrong)} are predicted to fit"
            f"{' (' + '; '.join(wrong) + ')' if wrong else ''}."
        )
    next_step("rush", "plan", "--chart", "all", why="the same beside what others published, as pictures")
