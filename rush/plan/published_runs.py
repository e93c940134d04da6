"""Published measurements of other trainers as specs, for machines that are not at hand.

The rows are in `published_runs.json`, with their sources. torchtitan keeps fp32 shards, gathers in bf16, computes in
bf16 without autocast and reduces gradients in fp32; so do these specs.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from rush.models import SIZES
from rush.parallel import AXES
from rush.plan.effects import effects_of, work_of
from rush.plan.spec import Spec
from rush.plan.target import TargetMachine, target_of
from rush.recipe import Knob
from rush.techniques import Use, registry


@dataclass(frozen=True)
class PublishedRun:
    name: str
    source: str
    spec: Spec
    target: TargetMachine
    tokens_per_s: float
    """Tokens per second and device."""
    memory_bytes: float | None


def read_published() -> list[PublishedRun]:
    text = resources.files("rush.plan").joinpath("published_runs.json").read_text(encoding="utf-8")
    data = json.loads(text)
    return [_row(row, data["studies"][row["study"]]) for row in data["rows"]]


def _row(row: dict[str, Any], study: dict[str, Any]) -> PublishedRun:
    layout = {**dict.fromkeys(AXES, 1), **row["layout"]}
    names: dict[str, dict[str, Knob]] = {}
    for entry in row["techniques"]:
        knobs = {"name": entry} if isinstance(entry, str) else dict(entry)
        names[knobs.pop("name")] = knobs
    known = registry()
    uses = [
        Use(known[name], {key: knob.default for key, knob in known[name].knobs.items()} | knobs)
        for name, knobs in names.items()
    ]
    effects = effects_of(uses, AXES)
    sizes = {**effects.sizes, "stream": 2, "compute": 2, "gathered": 2, "parameters": 4, "gradients": 4}
    factors = {**effects.factors, **({"logits.copies": 1.0} if study.get("eager_loss") else {})}
    shape = SIZES[row["model"]]
    target = target_of(
        study["machine"],
        study["devices_per_node"],
        -(-math.prod(layout.values()) // study["devices_per_node"]),
    )
    if "watts" in study:
        share = study["power_share"]
        target = replace(
            target,
            matmul={dtype: rate * share for dtype, rate in target.matmul.items()},
            bytes_per_s=target.bytes_per_s * study["bandwidth_share"],
        )
    spec = Spec(
        shape=shape,
        micro=row["micro"],
        sequence=row["sequence"],
        passes=row["passes"],
        layout=layout,
        effects=replace(effects, sizes=sizes, factors=factors),
        techniques={
            **{use.technique.name: dict(use.knobs) for use in uses},
            **({"tp": {"async": True}} if row.get("async_tp") else {}),
            **({"cp": study["cp"]} if layout["cp"] > 1 else {}),
            **({"pp": {"stages": row["stages"]}} if "stages" in row else {}),
        },
        work=work_of(uses),
    )
    return PublishedRun(
        row["name"], study["source"], spec, target, row["tokens_per_s"],
        row["memory_gib"] * 2**30 if row.get("memory_gib") else None,
    )  # fmt: skip
