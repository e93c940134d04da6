"""Published measurements of other trainers as specs, for machines that we do not have.

The rows are in `published_runs.json`, with their sources. torchtitan keeps fp32 shards, gathers in bf16, computes in
bf16 without autocast and reduces gradients in fp32; so do these specs, unless a study reduces in bf16 (`reduced_bytes`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from rush.models import SIZES, Shape
from rush.models.sizes import gpt2_shape
from rush.parallel import AXES
from rush.plan.effects import effects_of, work_of
from rush.plan.spec import Spec
from rush.plan.target import TargetMachine, target_of
from rush.recipe import Knob
from rush.techniques import Use, registry


@dataclass(frozen=True)
class PublishedRun:
    name: str
    study: str
    """The group of measurements it is from: a key of `studies` in the file."""
    model: str
    source: str
    spec: Spec
    target: TargetMachine
    tokens_per_s: float
    """Tokens per second and device."""
    memory_bytes: float | None


def read_published() -> list[PublishedRun]:
    text = resources.files("rush.plan").joinpath("published_runs.json").read_text(encoding="utf-8")
    data = json.loads(text)
    shapes = SIZES | {name: _gpt2_like(dims) for name, dims in data["models"].items()}
    return [_row(row, data["studies"][row["study"]], shapes[row["model"]]) for row in data["rows"]]


def _gpt2_like(dims: dict[str, int]) -> Shape:
    """MPT: a decoder of GPT-2's kind."""
    return gpt2_shape(dims["layers"], dims["hidden"], dims["heads"], vocab_size=50_368, context=2048)


def _row(row: dict[str, Any], study: dict[str, Any], shape: Shape) -> PublishedRun:
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
    sizes = {
        **effects.sizes,
        "stream": 2,
        "compute": 2,
        "gathered": 2,
        "parameters": 4,
        "gradients": study.get("reduced_bytes", 4),
    }
    factors = {**effects.factors, **({"logits.copies": 1.0} if study.get("eager_loss") else {})}
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
        row["name"], row["study"], row["model"], study["source"], spec, target, row["tokens_per_s"],
        row["memory_gib"] * 2**30 if row.get("memory_gib") else None,
    )  # fmt: skip
