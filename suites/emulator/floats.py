"""Floating-point arithmetic of PTX on NumPy arrays, rounded once, and the instructions built on it.

`kind` is "f16", "bf16", "f32" or "f64"; arrays are registers of that kind as formats.py describes them, and results
have the same dtype. NaN results are canonical, except in f64. Sources: PTX ISA, "Floating Point Instructions" and "Half
Precision Floating Point Instructions".

How a result comes to be rounded once. f32 and f64 rn are the CPU's own IEEE 754 operations, and f16 rn and the bf16 rn
sum are f32's, rounded again: with 24 bits, at least 2p + 2 for p = 11 and p = 8, that is harmless (Figueroa, "When is
double rounding innocuous?", 1995). Elsewhere f16, bf16 and f32 operands are widened to float64, where products are
exact and sums are rounded to odd (exact.py), and whose 53 bits are enough for quotients and roots by the same theorem;
then one rounding follows. What f64 cannot get from the CPU is computed with rational numbers, element by element: slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_conformance.suites.emulator.exact import elementwise, round_exact, sum_to_odd
from mla_conformance.suites.emulator.formats import bf16_from_f32, canonical_nan, f32_from_bf16, narrow, widen

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]

_TINY = {np.dtype(np.float32): np.float32(2.0**-126), np.dtype(np.float16): np.float16(2.0**-14)}
_SIGN_BF16 = np.uint16(0x8000)


def _zero_sum_sign(total: F64, a: F64, b: F64, rounding: str) -> F64:
    """An exact zero sum is +0 unless both addends are -0, but in rm it is -0 unless both are +0 (IEEE 754, 6.3)."""
    if rounding != "rm":
        return total
    return np.where((total == 0) & (np.signbit(a) | np.signbit(b)), -0.0, total)


def _exact_f64(function: Callable[..., Fraction], ieee: F64, zero: F64, rounding: str, *operands: Array) -> F64:
    """`function` of rationals, rounded once; `ieee` holds the result where it is not finite, `zero` where it is 0."""

    def scalar(otherwise: float, at_zero: float, *x: float) -> float:
        if not all(map(math.isfinite, x)) or math.isnan(otherwise):
            return otherwise
        exact = function(*map(Fraction, x))
        return round_exact(exact, rounding) if exact else at_zero

    return elementwise(scalar, ieee, zero, *operands)


def add(a: Array, b: Array, kind: str, rounding: str = "rn") -> Array:
    """add: a + b; rounding "rn", "rz", "rm" or "rp"."""
    if rounding == "rn":
        if kind == "bf16":
            return bf16_from_f32(np.asarray(f32_from_bf16(a) + f32_from_bf16(b)))
        return canonical_nan(np.asarray(np.add(a, b)))
    x, y = widen(a, kind), widen(b, kind)
    if kind == "f64":
        total = x + y
        return _exact_f64(lambda p, q: p + q, total, _zero_sum_sign(total, x, y, rounding), rounding, x, y)
    return narrow(_zero_sum_sign(sum_to_odd(x, y), x, y, rounding), kind, rounding)


def negate(a: Array, kind: str) -> Array:
    """neg: the sign bit inverted, of NaN too."""
    return np.asarray(a ^ _SIGN_BF16 if kind == "bf16" else np.negative(a))


def sub(a: Array, b: Array, kind: str, rounding: str = "rn") -> Array:
    """sub: a - b; rounding "rn", "rz", "rm" or "rp"."""
    if rounding == "rn" and kind != "bf16":
        return canonical_nan(np.asarray(np.subtract(a, b)))
    return add(a, negate(b, kind), kind, rounding)


def mul(a: Array, b: Array, kind: str, rounding: str = "rn") -> Array:
    """mul: a times b; rounding "rn", "rz", "rm" or "rp"."""
    if rounding == "rn" and kind != "bf16":
        return canonical_nan(np.asarray(np.multiply(a, b)))
    product = np.asarray(widen(a, kind) * widen(b, kind))
    if kind == "f64":
        signed_zero = np.copysign(0.0, product)
        return _exact_f64(lambda p, q: p * q, product, signed_zero, rounding, a, b)
    return narrow(product, kind, rounding)


def fma(a: Array, b: Array, c: Array, kind: str, rounding: str = "rn") -> Array:
    """fma: a times b plus c, rounded once; rounding "rn", "rz", "rm" or "rp".

    f16, bf16 and f32: the product is exact in float64, the sum is rounded to odd. f64: rational numbers.
    """
    if kind == "f32" and rounding == "rn":
        return canonical_nan(_fma_f32(a, b, c))
    x, y, z = widen(a, kind), widen(b, kind), widen(c, kind)
    product = np.asarray(x * y)
    if kind != "f64":
        return narrow(_zero_sum_sign(sum_to_odd(product, z), product, z, rounding), kind, rounding)
    finite = np.isfinite(x) & np.isfinite(y)
    sign = np.where(np.signbit(x) != np.signbit(y), -0.0, 0.0)
    zero = _zero_sum_sign(sign + np.copysign(0.0, z), sign, z, rounding)
    zero = np.where((x == 0) | (y == 0), zero, -0.0 if rounding == "rm" else 0.0)  # else z cancels the product
    ieee = np.where(finite, sign, product) + z  # a finite product may have overflowed
    return _exact_f64(lambda p, q, r: p * q + r, ieee, zero, rounding, x, y, z)


def _fma_f32(a: Array, b: Array, c: Array) -> npt.NDArray[np.float32]:
    product = np.multiply(a, b, dtype=np.float64)
    total = np.asarray(product + c)
    # Only a float64 that lies on a tie of float32 can be rounded wrongly, and its 28 last bits are 0.
    if not (total.view(np.int64) & 0x0FFFFFFF).all():
        total = sum_to_odd(product, np.asarray(c, np.float64))
    return np.asarray(total.astype(np.float32))


def divide(a: Array, b: Array, kind: str, rounding: str = "rn") -> Array:
    """div.rn, .rz, .rm and .rp: a over b, rounded once."""
    if rounding == "rn" and kind in ("f32", "f64"):
        return canonical_nan(np.asarray(np.divide(a, b)))
    x, y = widen(a, kind), widen(b, kind)
    quotient = np.asarray(x / y)
    if kind != "f64":
        return narrow(quotient, kind, rounding)

    def scalar(nearest: float, p: float, q: float) -> float:
        if p == 0 or q == 0 or not (math.isfinite(p) and math.isfinite(q)):
            return nearest
        return round_exact(Fraction(p) / Fraction(q), rounding) or math.copysign(0.0, nearest)

    return elementwise(scalar, quotient, x, y)


def reciprocal(a: Array, kind: str, rounding: str = "rn") -> Array:
    """rcp: 1 over a, rounded once; also stands for rcp.approx, whose bound is 1 ulp."""
    one = np.uint16(0x3F80) if kind == "bf16" else a.dtype.type(1)
    return divide(np.asarray(one), a, kind, rounding)


def sqrt(a: Array, kind: str, rounding: str = "rn") -> Array:
    """sqrt: rounded once; -0 gives -0 and a negative number NaN. Also stands for sqrt.approx."""
    if rounding == "rn" and kind in ("f32", "f64"):
        return canonical_nan(np.asarray(np.sqrt(a)))
    root = np.asarray(np.sqrt(widen(a, kind)))
    if kind != "f64":
        return narrow(root, kind, rounding)

    def scalar(nearest: float, x: float) -> float:
        if not math.isfinite(nearest) or nearest == 0:
            return nearest
        square, value = Fraction(nearest) ** 2, Fraction(x)
        if rounding == "rp":
            return math.nextafter(nearest, math.inf) if square < value else nearest
        return math.nextafter(nearest, 0.0) if square > value else nearest

    return elementwise(scalar, root, a)


def flush(x: Array) -> Array:
    """.ftz: subnormal numbers become zeros of the same sign; float32, float16 and uint16 (bf16)."""
    if x.dtype == np.uint16:
        return np.asarray(np.where(x & 0x7F80, x, x & _SIGN_BF16))
    small = np.abs(x) < _TINY[x.dtype]
    return np.asarray(np.where(small, np.copysign(x.dtype.type(0), x), x) if small.any() else x)


def saturate01(x: Array) -> Array:
    """.sat: x clamped to [+0, 1], NaN becomes +0; float16, float32, float64 and uint16 (bf16)."""
    if x.dtype == np.uint16:
        return bf16_from_f32(saturate01(f32_from_bf16(x)))
    one = x.dtype.type(1)
    return np.asarray(np.where(x > 0, np.fmin(x, one), x.dtype.type(0)))


def maximum(a: Array, b: Array, kind: str, nan: bool = False, xorsign_abs: bool = False) -> Array:
    """max: -0 is below +0; a number wins over NaN, or with `nan` (.NaN) any NaN gives NaN.

    With `xorsign_abs` (.xorsign.abs) magnitudes are compared, and the result takes the exclusive or of both signs.
    """
    return _extremum(a, b, kind, nan, xorsign_abs, largest=True)


def minimum(a: Array, b: Array, kind: str, nan: bool = False, xorsign_abs: bool = False) -> Array:
    """min: as `maximum`, for the smaller operand."""
    return _extremum(a, b, kind, nan, xorsign_abs, largest=False)


def _extremum(a: Array, b: Array, kind: str, nan: bool, xorsign_abs: bool, *, largest: bool) -> Array:
    if kind == "bf16":
        chosen = _extremum(f32_from_bf16(a), f32_from_bf16(b), "f32", nan, xorsign_abs, largest=largest)
        return bf16_from_f32(chosen, "rz")
    if xorsign_abs:
        sign = np.where(np.signbit(a) != np.signbit(b), a.dtype.type(-1), a.dtype.type(1))
        chosen = _extremum(np.asarray(np.abs(a)), np.asarray(np.abs(b)), kind, nan, False, largest=largest)
        return canonical_nan(np.asarray(np.copysign(chosen, sign)))
    if nan:
        chosen = np.asarray(np.maximum(a, b) if largest else np.minimum(a, b))
    else:
        chosen = np.asarray(np.fmax(a, b) if largest else np.fmin(a, b))
    equal = a == b
    if equal.any():  # equal numbers differ in nothing but the sign of a zero
        word = f"u{a.dtype.itemsize}"
        merged = a.view(word) & b.view(word) if largest else a.view(word) | b.view(word)
        chosen = np.where(equal, np.asarray(merged).view(a.dtype), chosen)
    return canonical_nan(chosen)
