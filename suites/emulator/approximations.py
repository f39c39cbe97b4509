"""The approximate instructions of PTX (.approx and div.full), and the error that the manual allows them.

Each is computed in float64 and rounded once to the nearest, so it is more accurate than the bound and than a GPU.
`kind` is "f32", and where PTX has them "f16" and "bf16"; registers as in formats.py. No flushing of subnormal numbers
happens here: .ftz is floats.flush on the operands and the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mla_conformance.suites.emulator.formats import canonical_nan, narrow, widen

Array = npt.NDArray[Any]


class ErrorBound(NamedTuple):
    """One clause of the manual: the largest error of `measure` ("ulp", "relative" or "absolute") over `domain`."""

    measure: str
    limit: float
    domain: str


# PTX ISA 9.1, sections 9.7.3.8 (div), .13 (rcp), .15 (sqrt), .16 (rsqrt), .18 (sin), .19 (cos), .20 (lg2), .21 (ex2),
# .22 (tanh), 9.7.4.9 (half-precision tanh) and .10 (half-precision ex2). Names omit .ftz, which changes no bound.
ERROR_BOUNDS: dict[str, tuple[ErrorBound, ...]] = {
    "div.full.f32": (ErrorBound("ulp", 2.0, "all inputs"),),
    "div.approx.f32": (ErrorBound("ulp", 2.0, "2^-126 <= |b| <= 2^126"),),
    "rcp.approx.f32": (ErrorBound("ulp", 1.0, "all inputs"),),
    "sqrt.approx.f32": (ErrorBound("relative", 2.0**-23, "positive finite"),),
    "rsqrt.approx.f32": (ErrorBound("relative", 2.0**-22.9, "positive finite"),),
    "sin.approx.f32": (
        ErrorBound("absolute", 2.0**-20.5, "|a| <= 2 pi"),
        ErrorBound("absolute", 2.0**-14.7, "|a| <= 100 pi"),
    ),
    "cos.approx.f32": (
        ErrorBound("absolute", 2.0**-20.5, "|a| <= 2 pi"),
        ErrorBound("absolute", 2.0**-14.7, "|a| <= 100 pi"),
    ),
    "lg2.approx.f32": (
        ErrorBound("absolute", 2.0**-22, "0.5 < a < 2"),
        ErrorBound("relative", 2.0**-22, "other positive finite"),
    ),
    "ex2.approx.f32": (ErrorBound("ulp", 2.0, "all inputs"),),
    "ex2.approx.f16": (ErrorBound("relative", 2.0**-9.9, "all inputs"),),
    "ex2.approx.bf16": (ErrorBound("relative", 2.0**-7, "all inputs"),),
    "tanh.approx.f32": (ErrorBound("relative", 2.0**-11, "all inputs"),),
    "tanh.approx.f16": (ErrorBound("absolute", 2.0**-10.987, "all inputs"),),
    "tanh.approx.bf16": (ErrorBound("absolute", 2.0**-8, "all inputs"),),
}


def _apply(function: Callable[[npt.NDArray[np.float64]], Any], x: Array, kind: str) -> Array:
    return narrow(np.asarray(function(widen(x, kind))), kind)


def divide_full(a: Array, b: Array) -> Array:
    """div.full.f32: a over b, correctly rounded here; PTX allows 2 ulp."""
    return canonical_nan(np.asarray(np.divide(a, b)))


def divide_approx(a: Array, b: Array) -> Array:
    """div.approx.f32: a over b, correctly rounded here; PTX allows 2 ulp.

    For 2^126 < |b| < 2^128 the result is 0 with the quotient's sign, or NaN if a is infinite, as the manual says.
    """
    size = np.abs(b)
    lost = (size > np.float32(2.0**126)) & np.isfinite(b)
    quotient = np.where(lost, a * np.copysign(np.float32(0), b), np.divide(a, b))
    return canonical_nan(quotient)


def rsqrt(x: Array, kind: str = "f32") -> Array:
    """rsqrt.approx.f32: 1 over the square root; -0 gives -inf, a negative number NaN."""
    return _apply(lambda v: 1.0 / np.sqrt(v), x, kind)


def ex2(x: Array, kind: str = "f32") -> Array:
    """ex2.approx: 2 to the power x, for f32, f16 and bf16."""
    return _apply(np.exp2, x, kind)


def lg2(x: Array, kind: str = "f32") -> Array:
    """lg2.approx.f32: the logarithm to base 2; a zero gives -inf, a negative number NaN."""
    return _apply(np.log2, x, kind)


def sin(x: Array, kind: str = "f32") -> Array:
    """sin.approx.f32: the sine of x radians; an infinity gives NaN."""
    return _apply(np.sin, x, kind)


def cos(x: Array, kind: str = "f32") -> Array:
    """cos.approx.f32: the cosine of x radians; an infinity gives NaN."""
    return _apply(np.cos, x, kind)


def tanh(x: Array, kind: str = "f32") -> Array:
    """tanh.approx: the hyperbolic tangent, for f32, f16 and bf16."""
    return _apply(np.tanh, x, kind)
