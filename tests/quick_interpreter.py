"""Triton's interpreter without its detours; being imported, before a kernel runs, is all it does.

Every operator of a kernel is a call of numpy on a few numbers, and around it the interpreter does ten times that work:

- It looks through Triton's modules for what to replace, once for every call of a helper. It is the same every time.
- It computes all sums and products of integers again in 64 bits, to assert afterwards that nothing overflowed; the
  assertion is left out unless a kernel is debugged.
- It makes the table of numpy's types and the same few shapes again for every value.
"""

from __future__ import annotations

import inspect
import types
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch_lang, _get_np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
_make_tensor, _make_block_type = tl.tensor.__init__, tl.block_type.__init__

_NAMES: dict[Any, list[str]] = {}
_LANGUAGES: dict[int, list[Any]] = {}
_PATCHED: set[Any] = set()
"""The modules that are replaced until the running launch ends."""
_DTYPES: dict[tl.dtype, Any] = {}
_TENSOR_SHAPES: dict[tuple[int, ...], tuple[Any, Any]] = {}
_BLOCK_SHAPES: dict[tuple[int, ...], tuple[Any, int, str]] = {}


def patch_builtin(package: Any, *how: Any) -> None:
    if package not in _NAMES:
        _NAMES[package] = [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
    for name in _NAMES[package]:
        if tl.core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, *how)


class Scope(getattr(interpreter, "_LangPatchScope", object)):  # type: ignore[misc]
    """What a launch replaced and puts back at its end; an older Triton, without such a class, leaves it replaced."""

    def restore(self) -> None:
        _PATCHED.clear()
        super().restore()


def patch_lang(fn: Any) -> Any:
    """Nothing where the launch, which calls this helper, has done it."""
    names = fn.__globals__
    if id(names) not in _LANGUAGES:
        modules = [value for value in names.values() if isinstance(value, types.ModuleType)]
        _LANGUAGES[id(names)] = [module for module in modules if module in (tl, tl.core)]
    languages = _LANGUAGES[id(names)]
    if languages and _PATCHED.issuperset(languages):
        return Scope()
    scope = _patch_lang(fn)
    _PATCHED.update(languages)
    return scope


def get_np_dtype(dtype: Any) -> Any:
    scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    if isinstance(scalar, tl.pointer_type):
        return _get_np_dtype(scalar)
    if scalar not in _DTYPES:
        _DTYPES[scalar] = _get_np_dtype(scalar)
    return _DTYPES[scalar]


def make_tensor(self: Any, handle: Any, type: Any) -> None:
    shape = tuple(type.shape) if type.is_block() else ()
    if shape not in _TENSOR_SHAPES:
        _make_tensor(self, handle, type)
        _TENSOR_SHAPES[shape] = self.numel, self.shape
        return
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _TENSOR_SHAPES[shape]


def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    key = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    if key not in _BLOCK_SHAPES or not isinstance(shape, (list, tl.tuple)):
        _make_block_type(self, element_ty, shape)
        _BLOCK_SHAPES[key] = self.shape, self.numel, str(self.shape)
        return
    self.element_ty = element_ty
    self.shape, self.numel, name = _BLOCK_SHAPES[key]
    self.name = f"<{name}, {element_ty}>"


interpreter._patch_builtin = patch_builtin
interpreter._patch_lang = patch_lang
interpreter._LangPatchScope = Scope
interpreter._get_np_dtype = get_np_dtype
interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
tl.tensor.__init__ = make_tensor
tl.block_type.__init__ = make_block_type
