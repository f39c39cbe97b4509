"""Triton's interpreter made trustworthy for bfloat16 and float8.

The interpreter keeps bfloat16 as uint16 and float8 as uint8. In Triton 3.6 to 3.9 its ``tl.dot`` multiplies
those bit patterns as integers (triton-lang/triton#11584), its cast from float32 truncates where hardware rounds to
nearest even, and its cast from float8 turns a NaN into 480. :func:`repair` replaces three methods:

* conversions go through PyTorch, which rounds to nearest even and keeps NaN;
* ``tl.dot`` widens bfloat16 and float8 operands to float32 (exact) and accumulates in float32, as an mma does;
* any other arithmetic on such values is refused (:class:`NotModelled`) instead of computed on bit patterns.

:func:`probe` then decides: only what it finds exact is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

REFUSED = (
    "binary_op",
    "unary_op",
    "ternary_op",
    "create_fma",
)
"""The builder methods through which every element-wise float operation goes."""


class NotModelled(RuntimeError):
    """Arithmetic on bfloat16 or float8 values other than conversion and ``tl.dot``."""


def refusal(error: BaseException | None) -> NotModelled | None:
    """The refusal at the root of an error that the interpreter has wrapped, perhaps more than once."""
    while error is not None and not isinstance(error, NotModelled):
        error = error.__cause__
    return error


TORCH_DTYPES = {
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


def is_raw(dtype: Any) -> bool:
    """Whether the interpreter holds values of this Triton dtype as bit patterns."""
    return dtype.scalar in TORCH_DTYPES and dtype.scalar not in (tl.float16, tl.float32, tl.float64)


def convert(data: np.ndarray[Any, Any], source: Any, target: Any) -> np.ndarray[Any, Any]:
    """Convert the interpreter's ``data`` from Triton dtype ``source`` to ``target``, rounding to nearest even."""
    bits = torch.from_numpy(np.ascontiguousarray(data))
    values = bits.view(TORCH_DTYPES[source.scalar]).to(TORCH_DTYPES[target.scalar])
    storage = interpreter._get_np_dtype(target.scalar)
    return values.view(getattr(torch, storage.name)).numpy().reshape(data.shape)


def repair() -> None:
    """Replace the faulty methods of Triton's interpreter in this process. Safe to call twice."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_mla_conformance_repaired", False):
        return
    original_cast, original_dot = builder.cast_impl, builder.create_dot
    original_fp_to_fp = builder.create_fp_to_fp

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if not (is_raw(source.dtype) or is_raw(target)):
            return original_cast(self, source, target)
        if source.dtype.scalar not in TORCH_DTYPES or target.scalar not in TORCH_DTYPES:
            raise NotModelled(f"the interpreter cannot convert {source.dtype.scalar} to {target.scalar}")
        return interpreter.TensorHandle(convert(source.data, source.dtype, target), target.scalar)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        to_nearest = rounding_mode in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if to_nearest and source.dtype.scalar in TORCH_DTYPES and target.scalar in TORCH_DTYPES:
            return interpreter.TensorHandle(convert(source.data, source.dtype, target), target.scalar)
        return original_fp_to_fp(self, source, target, rounding_mode)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if is_raw(a.dtype):
            a = interpreter.TensorHandle(convert(a.data, a.dtype, tl.float32), tl.float32)
        if is_raw(b.dtype):
            b = interpreter.TensorHandle(convert(b.data, b.dtype, tl.float32), tl.float32)
        return original_dot(self, a, b, d, *rest)

    def refusing(name: str) -> Any:
        original = getattr(builder, name)

        def method(self: Any, *arguments: Any) -> Any:
            for argument in arguments:
                dtype = getattr(argument, "dtype", None)
                if dtype is not None and hasattr(argument, "data") and is_raw(dtype):
                    raise NotModelled(f"the interpreter has no {dtype.scalar} arithmetic ({name})")
            return original(self, *arguments)

        return method

    def apply_impl(self: Any, operands: Any) -> Any:
        if any(is_raw(operand.dtype) for operand in operands):
            raise NotModelled(f"the interpreter cannot reduce {operands[0].dtype.scalar}")
        return original_reduce(self, operands)

    original_reduce = interpreter.ReduceOps.apply_impl
    interpreter.ReduceOps.apply_impl = apply_impl
    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast_impl, create_fp_to_fp, create_dot
    for name in REFUSED:
        setattr(builder, name, refusing(name))
    builder._mla_conformance_repaired = True


def probe() -> str | None:
    """Multiply small integers in bfloat16 through ``tl.dot``; return what is wrong with the result, or None."""
    size = 16
    a = (torch.arange(size * size) % 5 - 2).view(size, size).to(torch.bfloat16)
    b = (torch.arange(size * size) % 7 - 3).view(size, size).to(torch.bfloat16)
    product = torch.empty(size, size, dtype=torch.float32)
    _multiply[(1,)](a, b, product, size)
    error = float((product.double() - a.double() @ b.double()).abs().max())
    return None if error == 0 else f"the interpreter's bfloat16 tl.dot is off by {error:.3g} (triton-lang/triton#11584)"


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(a, b, product, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    offsets = rows * SIZE + columns
    tl.store(product + offsets, tl.dot(tl.load(a + offsets), tl.load(b + offsets)))
