"""Triton's interpreter without its detours; being imported, before a kernel runs, is all it does.

A small launch is thousands of operations on tiny blocks, and nearly all of its time is bookkeeping: every operation makes
the types of its operands anew, every int32 sum is checked for overflow (and the answer dropped, unless `debug` is set),
every call of a helper patches the whole language again. Here types and constants are made once, the check is left out where
nobody asks for it, and the language is patched once a launch. Operands of one type skip the rules of promotion, and NumPy
broadcasts them. The arithmetic is the interpreter's own, to the bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_semantic: Any = interpreter.interpreter_semantic


# Types

_SHAPES: dict[Any, Any] = {}
"""Of a block: shape, number of elements and name, by element type and dimensions; and what a tensor makes of them."""
_block_init, _tensor_init = tl.block_type.__init__, tl.tensor.__init__


def _quick_block_init(self: Any, element_ty: Any, shape: Any) -> None:
    key = (element_ty.name, *shape)
    if any(type(size) is not int for size in key[1:]):
        _block_init(self, element_ty, shape)
        key = (element_ty.name, *self.shape)
    if (known := _SHAPES.get(key)) is None:
        _block_init(self, element_ty, shape)
        like: Any = tl.tensor.__new__(tl.tensor)
        _tensor_init(like, None, self)
        known = _SHAPES[key] = (self.shape, self.numel, self.name), (like.shape, like.numel)
    self.element_ty = element_ty
    (self.shape, self.numel, self.name), self.of_tensor = known


_NO_SHAPE = tl.tensor(None, tl.int32)


def _quick_tensor_init(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type = handle, type
    if type.is_block():
        self.dtype = type.element_ty
        self.shape, self.numel = type.of_tensor
    else:
        self.dtype = type.scalar
        self.shape, self.numel = _NO_SHAPE.shape, _NO_SHAPE.numel


tl.block_type.__init__ = _quick_block_init
tl.tensor.__init__ = _quick_tensor_init

_NUMPY_TYPES: dict[str, Any] = {}
_get_np_dtype = interpreter._get_np_dtype


def _quick_np_dtype(dtype: Any) -> Any:
    scalar = dtype.scalar
    if scalar.name not in _NUMPY_TYPES:
        _NUMPY_TYPES[scalar.name] = _get_np_dtype(scalar)
    return _NUMPY_TYPES[scalar.name]


interpreter._get_np_dtype = _quick_np_dtype

_SIMPLE = {tl.tensor, int, float, bool, str, type(None), tl.dtype}
_unwrap_if_constexpr = core._unwrap_if_constexpr


def _quick_unwrap(value: Any) -> Any:
    return value if type(value) in _SIMPLE else _unwrap_if_constexpr(value)


core._unwrap_if_constexpr = _quick_unwrap


# Operations

_CONSTANTS: dict[Any, Any] = {}
_ALIGNED: dict[tuple[str, str], tuple[Any, Any]] = {}
"""The types of two operands once they are broadcast."""
_KEPT = {"fp32", "int32", "int64"}
"""Types that an operation on two of a kind does not promote, whatever it does."""


class _QuickSemantic(TritonSemantic):  # type: ignore[misc]
    def scalar_constant(self, value: Any, dtype: Any) -> Any:
        if (dtype is not tl.int32 and dtype is not tl.float32) or value == 0:  # -0.0 is equal to 0.0
            return super().scalar_constant(value, dtype)
        key = (value.__class__, value, dtype.name)
        if key not in _CONSTANTS:
            _CONSTANTS[key] = super().scalar_constant(value, dtype).handle
        return tl.tensor(_CONSTANTS[key], dtype)

    def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        return input if input.dtype is dst_ty else super().cast(input, dst_ty, fp_downcast_rounding)

    def binary_op_type_checking_impl(
        self, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        lhs, rhs = self._constant_like(lhs, rhs), self._constant_like(rhs, lhs)
        if lhs.__class__ is rhs.__class__ is tl.tensor:
            one, other = lhs.dtype, rhs.dtype
            if (
                one.name in _KEPT
                if one is other
                else allow_lhs_ptr and one.is_ptr() and other.name in _KEPT - {"fp32"}
            ):
                return self._aligned(lhs, rhs)
        return super().binary_op_type_checking_impl(lhs, rhs, allow_lhs_ptr, *args, **kwargs)

    def _constant_like(self, value: Any, other: Any) -> Any:
        """A number beside a tensor is of the tensor's type."""
        if other.__class__ is tl.tensor:
            if other.dtype is tl.float32 and (value.__class__ is float or value.__class__ is int):
                return self.scalar_constant(value, tl.float32)
            if other.dtype is tl.int32 and value.__class__ is int and -(2**31) <= value < 2**31:
                return self.scalar_constant(value, tl.int32)
        return value

    def _aligned(self, lhs: Any, rhs: Any) -> Any:
        """The operands with the types they have when they are broadcast; NumPy broadcasts what is in them."""
        if lhs.type is rhs.type:
            return lhs, rhs
        key = (lhs.type.name, rhs.type.name)
        if key not in _ALIGNED:
            one, other = self.broadcast_impl_value(lhs, rhs)
            _ALIGNED[key] = one.type, other.type
        one, other = _ALIGNED[key]
        return tl.tensor(lhs.handle, one), tl.tensor(rhs.handle, other)

    def binary_op_sanitize_overflow_impl(self, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            super().binary_op_sanitize_overflow_impl(lhs, rhs, binary_op)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return super().broadcast_impl_value(lhs, rhs)


_semantic.__class__ = _QuickSemantic

_TABLES: dict[Any, Any] = {}
_convert_float = interpreter._convert_float


def _quick_convert(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
    """Looked up where the input has at most 16 bits; truncated where that is all there is to do."""
    bits = input_dtype.primitive_bitwidth
    if bits <= 16:
        key = (input_dtype.name, output_dtype.name, rounding_mode)
        if key not in _TABLES:
            every = np.arange(2**bits, dtype=f"uint{bits}")
            _TABLES[key] = _convert_float(every, input_dtype, output_dtype, rounding_mode)
        return _TABLES[key][input.view(f"uint{bits}")]
    if input_dtype is tl.float32 and output_dtype is tl.bfloat16 and rounding_mode is None:
        whole = input.view(np.uint32)
        exponents = whole & 0x7F800000
        if exponents.all() or not (whole[exponents == 0] << 1).any():  # no subnormal numbers but zeros
            return (whole >> 16).astype(np.uint16)
    return _convert_float(input, input_dtype, output_dtype, rounding_mode)


interpreter._convert_float = _quick_convert

_handle_init = interpreter.TensorHandle.__init__


def _quick_handle_init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    if not dtype.is_ptr() and data.itemsize * 8 > dtype.primitive_bitwidth:
        _handle_init(self, data, dtype)  # which may complain
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


interpreter.TensorHandle.__init__ = _quick_handle_init


# The language, patched once a launch


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


@cache
def _bound(member: Callable[..., Any]) -> Callable[..., Any]:
    """A builtin of the language as the interpreter calls it."""
    inner = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = _semantic
        return inner(*args, **kwargs)

    return call


def _quick_patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        if core.is_builtin(member := getattr(package, name)):
            scope.set_attr(package, name, _bound(member))


_patch_lang_tensor = interpreter._patch_lang_tensor


def _quick_patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Triton 3.6 makes an index of an array with one element, which NumPy 2.4 no longer does."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


_patch_lang, _LangPatchScope = interpreter._patch_lang, interpreter._LangPatchScope
_patched: set[int] = set()
"""The modules that the launch under way has patched."""


class _QuickScope(_LangPatchScope):  # type: ignore[misc, valid-type]
    def restore(self) -> None:
        super().restore()
        _patched.clear()


@cache
def _modules(function: Any) -> set[int]:
    return {id(value) for value in function.__globals__.values() if value is tl or value is core}


def _quick_patch_lang(function: Any) -> Any:
    modules = _modules(function)
    if modules and modules <= _patched:
        return _QuickScope()
    _patched.update(modules)
    return _patch_lang(function)


interpreter._patch_lang_tensor = _quick_patch_lang_tensor
interpreter._patch_builtin = _quick_patch_builtin
interpreter._LangPatchScope = _QuickScope
interpreter._patch_lang = _quick_patch_lang
