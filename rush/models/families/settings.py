"""Reading and writing single settings of a config.json: numbers, flags, patterns of layers, RoPE.

RoPE's settings have two spellings: `rope_theta` with `rope_scaling`, and `rope_parameters` since transformers 5. Both are read
and written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from rush.errors import DataError
from rush.models.families.family import Config
from rush.models.rope_scaling import (
    ROPE_TYPES,
    LinearRopeScaling,
    LongRopeScaling,
    RopeScaling,
    Scaling,
    YarnRopeScaling,
    rope_type,
)

_ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
    "original_context": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
}
_REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_OTHER_NAMES = {"su": "longrope"}
SLIDING, FULL = "sliding_attention", "full_attention"


def refuse(key: str, found: object, why: str) -> NoReturn:
    raise DataError(f"config.json asks for {key} = {found!r:.200}, which rush does not support: {why}.")


def number(config: Config, *names: str, default: int | None = None) -> int:
    for name in names:
        if config.get(name) is not None:
            value = config[name]
            if not isinstance(value, int) or isinstance(value, bool):
                refuse(name, value, "it must be a whole number")
            return value
    if default is not None:
        return default
    raise DataError(f"config.json lacks {names[0]!r}, without which the model's shape is unknown.")


def flag(config: Config, name: str, *, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        refuse(name, value, "it must be true or false")
    return value


def real(config: Config, name: str, default: float | None = None) -> float | None:
    """A number, or None where it is null or missing."""
    value = config.get(name, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        refuse(name, value, "it must be a number")
    return None if value is None else float(value)


def check_supported(config: Config, supported: Any) -> None:
    for key, allowed in supported.items():
        found = config.get(key, allowed[0])
        if found not in allowed:
            refuse(key, found, f"supported is {' or '.join(repr(value) for value in allowed)}")


def layer_kinds(config: Config, num_layers: int, default: Iterable[bool]) -> tuple[bool, ...]:
    """Which layers have a sliding window: `layer_types`, or the family's rule."""
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(default)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {*map(str, kinds)} <= {SLIDING, FULL}:
        refuse("layer_types", kinds, f"it must list {SLIDING} or {FULL} for each of the {num_layers} layers")
    return tuple(kind == SLIDING for kind in kinds)


def layer_types(windowed: Sequence[bool]) -> list[str]:
    return [SLIDING if one else FULL for one in windowed]


# --- RoPE --------------------------------------------------------------------------------------------


def read_rope(config: Config, default_theta: float = 10000.0) -> tuple[float, Scaling | None]:
    """RoPE's theta and scaling, in either spelling."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            refuse(key, value, "it must be a JSON object")
    readings = [rope_table(table, config) for table in (new, old) if table]
    if len(readings) == 2 and readings[0] != readings[1]:
        raise DataError("config.json has different values in rope_parameters and rope_scaling: keep one.")
    thetas: list[Any] = []
    for table in (config, new, old):
        theta = table.get("rope_theta") if table else None
        if theta is not None and theta not in thetas:
            thetas.append(theta)
    if len(thetas) > 1:
        raise DataError(f"config.json gives several values of rope_theta: {thetas!r:.200}. Keep one.")
    return (thetas[0] if thetas else default_theta), (readings[0] if readings else None)


def rope_table(table: Config, config: Config) -> Scaling | None:
    """The scaling that a table of RoPE's settings describes."""
    kind = table.get("rope_type", table.get("type", "default"))
    kind = _OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "dynamic":
        refuse("rope_type", kind, "its frequencies change while a text grows; set rope_scaling to null")
    if not isinstance(kind, str) or (kind != "default" and kind not in ROPE_TYPES):
        refuse("rope_type", kind, f"supported are default, {', '.join(sorted(ROPE_TYPES))}")
    if kind == "default":
        return None
    if missing := [key for key in _REQUIRED[kind] if table.get(key) is None]:
        raise DataError(f"config.json's {kind} RoPE scaling lacks {', '.join(missing)}.")
    own = table.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    original: Any = config.get("original_max_position_embeddings") or own
    if kind == "linear":
        return LinearRopeScaling(table["factor"])
    if kind == "llama3":
        return RopeScaling(table["factor"], table["low_freq_factor"], table["high_freq_factor"], original)
    given = real(table, "attention_factor")
    if kind == "yarn":
        return YarnRopeScaling(
            table["factor"],
            original,
            beta_fast=table.get("beta_fast") or 32.0,
            beta_slow=table.get("beta_slow") or 1.0,
            attention_factor=given if given is not None else _yarn_by_mscale(table),
            truncate=table.get("truncate", True),
        )
    if given is None:
        given = long_attention_factor(
            number(config, "max_position_embeddings"), original, real(table, "factor")
        )
    return LongRopeScaling(table["short_factor"], table["long_factor"], original, given)


def _yarn_by_mscale(table: Config) -> float | None:
    """YaRN's attention factor where a config gives `mscale` and `mscale_all_dim` instead."""
    own, all_dims = real(table, "mscale"), real(table, "mscale_all_dim")
    if not own or not all_dims:
        return None
    growth = math.log(table["factor"]) if table["factor"] > 1 else 0.0
    return (0.1 * own * growth + 1.0) / (0.1 * all_dims * growth + 1.0)


def long_attention_factor(context: int, original: int, factor: float | None = None) -> float:
    """LongRoPE's attention factor for a context that grew from `original`."""
    factor = context / original if factor is None else factor
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def scaling_table(scaling: Scaling | None) -> dict[str, Any]:
    """The table that describes a scaling, without theta."""
    if scaling is None:
        return {"rope_type": "default"}
    found = {theirs: getattr(scaling, ours, None) for ours, theirs in _ROPE_KEYS.items()}
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    return {"rope_type": rope_type(scaling)} | {k: v for k, v in listed.items() if v is not None}


def write_rope(theta: float | None, scaling: Scaling | None) -> dict[str, Any]:
    """RoPE's settings in both spellings."""
    table = scaling_table(scaling)
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else table,
        "rope_parameters": table | {"rope_theta": theta},
    }
