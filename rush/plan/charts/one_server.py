"""Charts of one server: speed over devices, memory by part, the stages of ZeRO, links, and two GPU models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rush.plan.charts.options import DDP, SHARDINGS, STAGES, ChartOptions, doubling, in_sharding
from rush.plan.charts.points import Points, machine, published_of
from rush.plan.describe import alternatives
from rush.recipe import Recipe
from rush.records.plan_chart import BEST_RECIPE, GROWING_STEP, SAME_STEP, PredictedPoint
from rush.techniques.api.contract import Alternative

A100, A800 = "a100-80-sxm", "a800-80-sxm"
SMALL, MIDDLE, LARGE = "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"
SMALL_SETTING = ("batch.micro=8",)
LARGE_SETTING = ("batch.micro=1", "batch.sequence=4096")


def _recipes(options: ChartOptions) -> list[tuple[str, Recipe]]:
    """The requested recipe, or a small and a large model."""
    if options.recipe:
        return [options.load(options.recipe)]
    return [options.load(SMALL, *SMALL_SETTING), options.load(LARGE, *LARGE_SETTING)]


def speedup(options: ChartOptions, points: Points) -> dict[str, Any]:
    """Tokens per second on 1, 2, 4, 8 devices with replicas (ddp) and with shards (ZeRO-3), the step unchanged."""
    key, most = options.machine or A100, options.devices or 8
    named = _recipes(options)
    for name, recipe in named:
        for sharding in (DDP, "ZeRO-3"):
            for devices in doubling(most):
                points.plan(
                    recipe,
                    machine(key, devices, options.link, options.network),
                    f"{name}, {sharding}",
                    devices,
                    name=f"{name}, {sharding}, {devices} × {key}",
                    **in_sharding(recipe, sharding, devices),
                )
    if key.startswith("a100-80"):
        points.publish(published_of("MPT 1B", "MPT 7B", study=["mpt-a100-80"]), "published")
    return {"machine": key, "devices": most, "recipes": [name for name, _ in named]}


def memory(options: ChartOptions, points: Points) -> dict[str, Any]:
    """Memory of one device by part, over devices that share one model (ZeRO-3)."""
    key, most = options.machine or A100, options.devices or 64
    name, recipe = options.load(LARGE, *LARGE_SETTING, "batch.total_tokens=1048576")
    for devices in doubling(most):
        points.plan(
            recipe,
            machine(key, devices, options.link, options.network),
            f"{name}, ZeRO-3",
            devices,
            name=f"{devices} × {key}" if devices > 1 else f"one {key}",
            **in_sharding(recipe, "ZeRO-3", devices),
        )
    points.publish(
        [run for run in published_of("8B") if run.memory_bytes and run.spec.sequence == 8192], "published"
    )
    return {"machine": key, "devices": most, "recipes": [name]}


def zero(options: ChartOptions, points: Points) -> dict[str, Any]:
    """Memory and time of ddp and the three stages of ZeRO on the same devices, and ZeRO-2 against 3 over devices."""
    key, most = options.machine or A100, options.devices or 8
    name, recipe = options.load(LARGE, *LARGE_SETTING, "techniques+=checkpoint_selective")
    for sharding in SHARDINGS:
        points.plan(
            recipe, machine(key, most, options.link, options.network), sharding, most, group="stages",
            name=f"{name}, {sharding}", **in_sharding(recipe, sharding, most),
        )  # fmt: skip
    for sharding in ("ZeRO-2", "ZeRO-3"):
        for devices in doubling(max(most, 2), 2):
            points.plan(
                recipe, machine(key, devices, options.link, options.network), sharding, devices, group="over devices",
                name=f"{name}, {sharding}, {devices} × {key}", **in_sharding(recipe, sharding, devices),
            )  # fmt: skip
    for study, label in (("mpt-h100", "H100"), ("mpt-a100-40", "A100 40 GB")):
        for model in ("1B", "3B"):
            runs = [run for run in published_of(f"MPT {model}", study=[study]) if run.spec.world >= 64]
            for stage in ("gradients", "parameters"):
                own = [run for run in runs if run.spec.knob("fsdp", "stage", "parameters") == stage]
                zero_name = next(word for word, value in STAGES.items() if value == stage)
                points.publish(own, f"MPT {model} on {label}, {zero_name}", group="published")
    return {"machine": key, "devices": most, "recipes": [name]}


def links(options: ChartOptions, points: Points) -> dict[str, Any]:
    """The same layouts over two kinds of links between the devices of one server."""
    key, most = options.machine or A100, options.devices or 8
    slow = options.link or "pcie4"
    named = _recipes(options)
    for name, recipe in named:
        for where, wire in (("own", None), ("other", slow)):
            target = machine(key, most, wire, options.network)
            for layout, laid in _layouts(recipe, most):
                points.plan(recipe, target, where, most, group=name, name=layout, **laid)
    return {"machine": key, "devices": most, "link": slow, "recipes": [name for name, _ in named]}


def _layouts(recipe: Recipe, devices: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Layouts with their names: every sharding of all devices, and tp beside replicas that are sharded by ZeRO-3."""
    for sharding in SHARDINGS:
        yield sharding, dict(in_sharding(recipe, sharding, devices))
    for size in doubling(min(devices, 8), 2):
        yield f"tp {size}", {**in_sharding(recipe, "ZeRO-3", devices // size), "layout__tp": size}


def cards(options: ChartOptions, points: Points) -> dict[str, Any]:
    """Two GPU models that differ in their links: layouts on all devices, and the speedup of 2, 4, 8 over one.

    Three speed-ups: the same step divided, a step that grows with the devices, and the best recipe (sharding,
    checkpointing, micro batch) on each number of devices, where more devices also mean more memory.
    """
    first, second, most = options.machine or A100, options.against or A800, options.devices or 8
    named = _recipes(options)
    if not options.recipe:
        named.insert(1, options.load(MIDDLE, *LARGE_SETTING))
    for name, recipe in named:
        for key in (first, second):
            target = machine(key, most, options.link, options.network)
            for layout, laid in _layouts(recipe, most):
                points.plan(recipe, target, key, most, group=name, name=layout, **laid)
    for name, recipe in named:
        for key in (first, second):
            for devices in doubling(most):
                target = machine(key, devices, options.link, options.network)
                keys = in_sharding(recipe, "ZeRO-2", devices)
                group = f"{name}, {SAME_STEP}"
                points.plan(recipe, target, key, devices, group=group, name="ZeRO-2", **keys)
                grown = {"batch__total_tokens": recipe.micro * recipe.batch.sequence * devices}
                group = f"{name}, {GROWING_STEP}"
                points.plan(
                    recipe,
                    target,
                    key,
                    devices,
                    group=group,
                    name="ZeRO-2",
                    **keys,
                    **grown,
                )
                best = _best(recipe, target, devices)
                if best is not None:
                    points.predicted.append(
                        {**best, "series": key, "group": f"{name}, {BEST_RECIPE}", "x": float(devices)}
                    )
    if first.startswith("a100-80"):
        points.publish(
            published_of("MPT 1B", "MPT 7B", study=["mpt-a100-80"]), "published", group="published"
        )
    return {"machine": first, "against": second, "devices": most, "recipes": [name for name, _ in named]}


def _best(recipe: Recipe, target: Any, devices: int) -> PredictedPoint | None:
    """The fastest that fits on so many devices: sharding, checkpointing and micro batch free, the precision the recipe's."""
    tried = Points()
    for sharding in SHARDINGS if devices > 1 else (DDP,):
        for checkpointing in ("", *alternatives(Alternative.CHECKPOINTING)):
            keys = in_sharding(recipe, sharding, devices, checkpointing)
            for micro in (1, 2, 4, 8, 16):
                tried.plan(recipe, target, "", devices, **keys, batch__micro=micro)
    fitting = [point for point in tried.predicted if point["fits"] and not point["problems"]]
    return max(fitting, key=lambda point: point["tokens_per_s"], default=None)
