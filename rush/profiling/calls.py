"""The arguments with which operators were called, for evidence about knobs.

A profile records the shapes and dtypes of an operator's tensors, and the values of its numbers and flags.
They show a knob's effect from outside: the dtype of a reduce-scatter, the chunk size of a loss, a flag of a
matmul. Only operators that evidence functions read are kept: a step has thousands of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch.autograd.profiler_util import FunctionEvent

from rush.techniques.api.contract import Call

KEPT = ("rush::", "c10d::", "aten::_scaled_", "aten::_int_mm", "aten::_foreach_zero_")
"""Prefixes of the operators whose calls are kept."""
DTYPES = {
    "float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16",
    "c10::Float8_e4m3fn": "float8_e4m3fn", "c10::Float8_e5m2": "float8_e5m2", "signed char": "int8",
    "unsigned char": "uint8",
}  # fmt: skip
"""The profiler's names of dtypes, and torch's."""


def calls(host: Iterable[FunctionEvent], dtypes: Mapping[int, list[str]]) -> dict[str, dict[Call, int]]:
    """The calls of kept operators by name, each with its count; `dtypes` are those of the events' inputs."""
    found: dict[str, Counter[Call]] = {}
    for event in host:
        if event.name.startswith(KEPT):
            given: Any = event
            call = Call(
                _frozen(given.input_shapes or ()),
                tuple(DTYPES.get(name, name) for name in dtypes.get(event.id, ())),
                _frozen(given.concrete_inputs or ()),
            )
            found.setdefault(event.name, Counter())[call] += 1
    return {name: dict(counts) for name, counts in found.items()}


def is_kept(name: str) -> bool:
    return name.startswith(KEPT)


def _frozen(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
