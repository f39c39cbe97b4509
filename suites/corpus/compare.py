"""How far apart two results lie: the share of bit-equal elements, and the largest difference in steps.

A step leads from one value of a dtype to the next (one ulp, counted through zero and across powers of two). Bits
and steps treat the special values differently:

* +0 and -0 are not bit-equal and 0 steps apart;
* two NaNs are bit-equal only if sign and payload agree, and always 0 steps apart;
* a NaN and a number are infinitely many steps apart;
* an infinity is one step beyond the largest finite number.

Only elements that either side changed are counted, so untouched memory cannot raise the share, and memory that
one side wrote and the other did not counts as a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Agreement:
    """How well two results agree.

    Args:
        elements: how many elements either side changed.
        equal: how many of them have the same bits.
        steps: the largest difference in steps.
        relative: the largest difference over the largest finite magnitude on the first side: steps say little
            where a sum cancels.
    """

    elements: int
    equal: int
    steps: float
    relative: float

    @property
    def bit_equal(self) -> float:
        """Share of bit-equal elements; 1 if nothing was changed."""
        return self.equal / self.elements if self.elements else 1.0


def compare(before: Tensor, expected: Tensor, actual: Tensor, dtype: torch.dtype) -> Agreement:
    """Compare two states of one storage.

    Args:
        before: uint8 [bytes], what both sides started from.
        expected: uint8 [bytes], one result.
        actual: uint8 [bytes], the other.
        dtype: of the elements; the storage is a whole number of them.

    Raises:
        ValueError: the sizes differ, or are no multiple of the element size.
    """
    if not before.numel() == expected.numel() == actual.numel() or before.numel() % dtype.itemsize:
        sizes = f"{before.numel()}, {expected.numel()} and {actual.numel()} bytes"
        raise ValueError(f"{sizes} are not three equal whole numbers of {dtype} elements")
    start, one, two = (_bits(storage, dtype) for storage in (before, expected, actual))
    changed = (one != start) | (two != start)
    one, two = one[changed], two[changed]
    if not len(one):
        return Agreement(0, 0, 0.0, 0.0)
    values, others = one.view(dtype), two.view(dtype)
    return Agreement(
        len(one), int((one == two).sum()), float(steps(values, others).max()), _largest_relative(values, others)
    )


def combine(agreements: Iterable[Agreement]) -> Agreement:
    """One agreement over several storages."""
    parts = list(agreements)
    return Agreement(
        sum(part.elements for part in parts),
        sum(part.equal for part in parts),
        max((part.steps for part in parts), default=0.0),
        max((part.relative for part in parts), default=0.0),
    )


def steps(one: Tensor, two: Tensor) -> Tensor:
    """Distance of each pair in steps, as float64 (exact below 2**53); see the module for zeros and NaN."""
    distance = _distance(_ordinal(one), _ordinal(two))
    if one.dtype.is_floating_point:
        nan_one, nan_two = one.double().isnan(), two.double().isnan()
        distance[nan_one & nan_two] = 0.0
        distance[nan_one ^ nan_two] = math.inf
    return distance


def _bits(storage: Tensor, dtype: torch.dtype) -> Tensor:
    return storage.clone().view(_BITS[dtype.itemsize])


def _ordinal(values: Tensor) -> Tensor:
    """Number the values of a dtype in their order, both zeros 0: int64."""
    if not values.dtype.is_floating_point:
        return values.long()
    bits = values.contiguous().view(_BITS[values.element_size()])
    magnitude = (bits & torch.iinfo(bits.dtype).max).long()
    return torch.where(bits < 0, -magnitude, magnitude)


def _distance(one: Tensor, two: Tensor) -> Tensor:
    # A difference of int64 may need 64 bits without sign: it wraps, and is read as unsigned.
    difference = torch.maximum(one, two) - torch.minimum(one, two)
    return torch.where(difference < 0, difference.double() + 2.0**64, difference.double())


def _largest_relative(one: Tensor, two: Tensor) -> float:
    a, b = one.double(), two.double()
    finite = a.isfinite() & b.isfinite()
    if not finite.any():
        return 0.0
    largest = float(a[finite].abs().max())
    return float((a[finite] - b[finite]).abs().max()) / largest if largest else 0.0
