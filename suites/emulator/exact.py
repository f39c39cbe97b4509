"""Arithmetic whose rounding error is known exactly, so that a result is rounded only once."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def sum_to_odd(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The sum of float64 a and b rounded to odd; rounded again to at most 51 bits, it is as if rounded once.

    The rounding error comes from TwoSum; where it is not 0 and the last bit is even, the neighbour on the error's side
    is taken. Boldo and Melquiond, "Emulation of FMA and Correctly Rounded Sums: Proved Algorithms Using Rounding to
    Odd", IEEE Transactions on Computers, 2008.
    """
    total = np.asarray(a + b)
    virtual = total - a
    error = np.asarray((a - (total - virtual)) + (b - virtual))
    if not error.any():
        return total
    word = total.view(np.int64)
    step = np.where((error > 0) != (word < 0), 1, -1)
    # `<` and `>`, because an infinite total leaves a NaN as its error
    change = ((error > 0) | (error < 0)) & ((word & 1) == 0)
    return np.asarray(word + step * change).view(np.float64)


def round_exact(value: Fraction, rounding: str) -> float:
    """A rational number as the float64 that `rounding` ("rn", "rz", "rm", "rp") asks for; 0 gives +0."""
    if rounding not in ("rn", "rz", "rm", "rp"):
        raise ValueError(f'rounding {rounding!r} does not exist for f64; use "rn", "rz", "rm" or "rp"')
    try:
        nearest = float(value)
    except OverflowError:
        nearest = math.inf if value > 0 else -math.inf
    if rounding == "rn":
        return nearest
    too_big = nearest > value if math.isfinite(nearest) else nearest > 0
    too_small = nearest < value if math.isfinite(nearest) else nearest < 0
    towards_minus = rounding == "rm" or (rounding == "rz" and value > 0)
    if too_big and towards_minus:
        return math.nextafter(nearest, -math.inf)
    if too_small and not towards_minus:
        return math.nextafter(nearest, math.inf)
    return nearest


def elementwise(function: Callable[..., float], *operands: Array) -> npt.NDArray[np.float64]:
    """`function` of Python scalars applied to each element of the broadcast operands; slow, for rare instructions."""
    arrays = np.broadcast_arrays(*operands)
    results = [function(*scalars) for scalars in zip(*(array.ravel().tolist() for array in arrays), strict=True)]
    return np.array(results, np.float64).reshape(arrays[0].shape)
