"""Charts of many servers: weak and strong scaling from 1 to 512 nodes, and layouts of four axes for 405B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rush.errors import RecipeError
from rush.parallel import AXES
from rush.plan.charts.one_server import LARGE
from rush.plan.charts.options import ChartOptions, bare, doubling
from rush.plan.charts.points import Points, machine, predicted, published_of
from rush.plan.describe import alternatives
from rush.plan.planning import plan, unmet
from rush.plan.published_runs import PublishedRun
from rush.plan.spec import spec_of
from rush.plan.target import target_of
from rush.recipe import Recipe
from rush.recipe_io import changed
from rush.records.plan_chart import PredictedPoint
from rush.techniques.api.contract import Alternative

H100 = "h100-sxm"
HUGE = "llama-3.1-405b"
STEP = 16 * 2**20
"""Tokens of a step in strong scaling: what Llama 3 405B was trained with."""
FOLLOWED = (
    ("8B, compiled (torchtitan, 500 W H100)", ("8B, 8 H100, compiled", "8B, 128 H100, compiled")),
    ("MPT 7B on H100", ("MPT 7B, 8 H100", "MPT 7B, 128 H100", "MPT 7B, 256 H100", "MPT 7B, 512 H100")),
    ("MPT 7B on A100 40 GB", tuple(f"MPT 7B, {n} A100 40 GB" for n in (8, 16, 32, 64, 128))),
)
"""Published runs that were measured on several numbers of nodes: their own setting is planned on all of them."""
SIXTEEN_BITS = (
    'techniques=["pure_bf16", "flash_attention", {name = "fused_update", stochastic_rounding = true, state = "bfloat16"}, '
    '{name = "compile", scope = "block"}]'
)
"""Weights, gradients and moments in bf16, without which a model of 405B does not fit 512 devices."""
LAYOUTS_512: tuple[dict[str, int], ...] = (
    {"fsdp": 512},
    {"fsdp": 64, "tp": 8},
    {"fsdp": 32, "cp": 2, "tp": 8},
    {"fsdp": 8, "pp": 8, "tp": 8},
    {"fsdp": 4, "pp": 16, "tp": 8},
    {"fsdp": 2, "pp": 8, "cp": 4, "tp": 8},
    {"ddp": 4, "pp": 16, "tp": 8},
)
"""Layouts of 512 devices for a model of 405B, from one axis to four."""


def nodes(options: ChartOptions, points: Points) -> dict[str, Any]:
    """Weak scaling of published settings, with what was measured, and strong scaling of a step of 16M tokens."""
    key, most = options.machine or H100, options.nodes or 512
    counts = doubling(most)
    for series, names in FOLLOWED:
        runs = [run for run in published_of("8B", "MPT") if run.name in names]
        per = runs[0].target.devices_per_node
        for count in counts:
            points.predicted.append(_follow(runs[0], count, series))
        points.publish(runs, series, group="weak", per=per)
    name, recipe = options.load(LARGE, "batch.micro=1", "batch.sequence=4096", f"batch.total_tokens={STEP}")
    for count in counts:
        per_node = target_of(key).devices_per_node
        target = target_of(key, per_node, count, options.link, options.network)
        over: dict[str, Any] = {"layout__fsdp": per_node * count}
        inside: dict[str, Any] = {"layout__fsdp": per_node, "layout__ddp": count}
        for series, layout in (
            (f"{name}, ZeRO-3 over all", over),
            (f"{name}, ZeRO-3 in a node, replicas between", inside),
        ):
            points.plan(
                recipe, target, series, count, group="strong",
                techniques=[*bare(recipe), {"name": "fsdp", "stage": "parameters"}], **layout,
            )  # fmt: skip
    return {"machine": key, "nodes": most, "recipes": [name]}


def _follow(run: PublishedRun, count: int, series: str) -> Any:
    """The plan of a published run's setting on another number of nodes: every device does what it did."""
    per_node = run.target.devices_per_node
    spec = replace(run.spec, layout={**run.spec.layout, "fsdp": per_node * count})
    target = replace(run.target, devices=per_node * count)
    return predicted(plan(spec, target, limits=False), series, count, "weak", f"{series}, {count} nodes")


def layouts(options: ChartOptions, points: Points) -> dict[str, Any]:
    """Layouts of a huge model: the published ones, and those for this trainer's own recipe."""
    key, count = options.machine or H100, options.nodes or 64
    target = target_of(key, None, count, options.link, options.network)
    step = STEP if target.devices > 4096 else STEP // 4
    name, recipe = options.load(
        LARGE,
        f"model.name={HUGE}",
        "batch.micro=1",
        "batch.sequence=8192",
        f"batch.total_tokens={step}",
        SIXTEEN_BITS,
    )
    name = recipe.model.name
    for layout in LAYOUTS_512:
        scaled = _scaled(layout, target.devices)
        words = " · ".join(f"{axis} {size}" for axis, size in scaled.items() if size > 1)
        keys: dict[str, Any] = {f"layout__{axis}": scaled.get(axis, 1) for axis in AXES}
        tried = Points()
        for checkpointing in ("", *alternatives(Alternative.CHECKPOINTING)):
            for micro in (1, 2, 4, 8):
                tried.plan(
                    recipe, target, "own", count, group="own",
                    techniques=_entries(recipe, scaled, checkpointing), batch__micro=micro,
                    **keys,
                )  # fmt: skip
        points.sources |= tried.sources
        if tried.predicted:
            best = _best_of(tried.predicted)
            points.predicted.append({**best, "name": f"{words}: {_rest(best['name'])}"})
        else:
            points.refused.append({**tried.refused[0], "name": words})
    if options.recipe is None and not options.overrides:
        runs = published_of("70B", "405B")
        points.publish(runs, "published", group="published", per=8)
        for row, run in zip(points.published, runs, strict=True):
            row["planned"]["problems"] = _problems(recipe, run)
    return {"machine": key, "nodes": count, "recipes": [name]}


def _best_of(plans: list[PredictedPoint]) -> PredictedPoint:
    """The fastest that fits; if none does, the one with the least memory."""
    fitting = [one for one in plans if one["fits"] and not one["problems"]]
    if fitting:
        return max(fitting, key=lambda one: one["tokens_per_s"])
    return min(plans, key=lambda one: one["needed_bytes"])


def _rest(description: str) -> str:
    """The part of a plan's description besides its layout: micro batch, precision, checkpointing."""
    return description[description.index("micro ") :]


def _scaled(layout: dict[str, int], devices: int) -> dict[str, int]:
    """The layout for another number of devices: its data ranks take the rest."""
    data = "fsdp" if "fsdp" in layout else "ddp"
    others = 1
    for axis, size in layout.items():
        others *= size if axis != data else 1
    if devices % others:
        raise RecipeError(f"{devices} devices are no multiple of {others}; give --nodes a multiple of that.")
    return {**layout, data: devices // others}


def _entries(recipe: Recipe, layout: dict[str, int], checkpointing: str) -> list[Any]:
    entries = [*bare(recipe, checkpointing=False), *([checkpointing] if checkpointing else [])]
    if layout.get("fsdp", 1) > 1:
        # A pipeline keeps whole gradients and weights until the step ends, so shards hold only the optimizer there.
        stage = "optimizer" if layout.get("pp", 1) > 1 else "parameters"
        entries.append({"name": "fsdp", "stage": stage})
    if layout.get("pp", 1) > 1:
        entries.append({"name": "pp", "schedule": "interleaved", "stages": 2})
    return entries


def _problems(recipe: Recipe, run: PublishedRun) -> list[str]:
    """Why this trainer cannot run a published layout; empty where it can."""
    wanted: dict[str, Any] = {f"layout.{axis}": run.spec.size(axis) for axis in AXES}
    fp8 = ["fp8"] if run.spec.uses("fp8") else []
    own = [
        *bare(recipe, checkpointing=False),
        *fp8,
        *(["checkpoint_full"] if run.spec.uses("checkpoint_full") else []),
    ]
    if run.spec.size("fsdp") > 1:
        own.append({"name": "fsdp", "stage": str(run.spec.knob("fsdp", "stage", "parameters"))})
    if run.spec.stages > 1:
        own.append({"name": "pp", "schedule": "interleaved", "stages": run.spec.stages})
    rows = run.spec.micro * run.spec.passes * run.spec.size("ddp") * run.spec.size("fsdp")
    wanted |= {
        "model.name": run.model,
        "techniques": own,
        "batch.sequence": run.spec.sequence,
        "batch.micro": run.spec.micro,
        "batch.total_tokens": rows * run.spec.sequence,
    }
    try:
        chosen = changed(recipe, wanted)
        spec_of(chosen)
    except RecipeError as error:
        return [str(error)]
    return list(unmet(chosen, machine(run.target.key, run.spec.world)))
