"""Triton's interpreter without its longest detour; being imported, before a kernel runs, is all it does.

For every call of a helper inside a kernel the interpreter looks through all members of Triton's modules for those to
replace: half of the time of a small launch. They are always the same ones, so here they are looked up once.
"""

from __future__ import annotations

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_NAMES: dict[Any, list[str]] = {}


def _patch_builtin(package: Any, *how: Any) -> None:
    if package not in _NAMES:
        _NAMES[package] = [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
    for name in _NAMES[package]:
        if tl.core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, *how)


interpreter._patch_builtin = _patch_builtin
