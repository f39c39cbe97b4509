"""Hostile memory: tensors whose surroundings are poisoned and guarded."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAP_NORESERVE = 0x4000
"""Linux: address space without a promise of memory (``mmap`` names it from Python 3.13 on)."""


def poison_value(dtype: torch.dtype, poison: str) -> float:
    """Return the value of ``dtype`` that stands for ``poison``; e4m3fn has no infinity and takes a NaN for it."""
    if poison == "nan":
        return math.nan
    if poison == "huge":
        return torch.finfo(dtype).max
    return math.nan if dtype == torch.float8_e4m3fn else math.inf


@dataclass
class Buffer:
    """A tensor inside a larger poisoned allocation, with a memory of what surrounded it.

    Args:
        name: how failures call it.
        storage: the whole allocation, 1-D.
        view: the tensor that an implementation is given.
        writable: whether the implementation may write the view (never what surrounds it).
    """

    name: str
    storage: Tensor
    view: Tensor
    writable: bool = False
    _before: Tensor | None = field(default=None, repr=False)

    @classmethod
    def allocate(
        cls,
        name: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        *,
        fill: float,
        margin: int = 64,
        writable: bool = False,
    ) -> Buffer:
        """Allocate ``shape`` with ``strides`` (in elements), ``margin`` elements before and after, all ``fill``."""
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0
        storage = torch.empty(span + 2 * margin, dtype=dtype).fill_(fill)
        return cls(name, storage, storage.as_strided(shape, strides, margin), writable)

    @classmethod
    def gapped(
        cls, name: str, shape: tuple[int, ...], gap: int, dtype: torch.dtype, poison: str, *, writable: bool = False
    ) -> Buffer:
        """Allocate poisoned, rows ``gap`` elements apart, and each outer dimension's entries another ``gap`` apart."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, size * strides[0] + gap)
        return cls.allocate(name, shape, tuple(strides), dtype, fill=poison_value(dtype, poison), writable=writable)

    @classmethod
    def reserve(
        cls, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, margin: int
    ) -> Buffer:
        """Like :meth:`allocate`, but of address space only: memory is taken where something is written.

        Nothing is poisoned (reading untouched addresses gives 0). ``margin`` elements lie before the view, so
        that an offset which wraps at 32 bits lands inside the reservation and gives a wrong number, not a crash.
        """
        elements = margin + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        storage = torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)
        return cls(name, storage, storage.as_strided(shape, strides, margin))

    def to(self, device: torch.device) -> Buffer:
        """Move the allocation, keeping strides and offset."""
        storage = self.storage.to(device)
        view = storage.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        return Buffer(self.name, storage, view, self.writable)

    def guard(self) -> None:
        """Remember every byte."""
        self._before = self.storage.clone()

    def trespasses(self) -> int:
        """Return how many elements changed since :meth:`guard` that nothing was allowed to write."""
        if self._before is None:
            raise RuntimeError(f"buffer {self.name!r} was never guarded")
        width = self.storage.element_size()
        changed = (self.storage.view(torch.uint8) != self._before.view(torch.uint8)).view(-1, width).any(1)
        if self.writable:
            changed.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).fill_(False)
        return int(changed.sum())


def trespassed(buffers: list[Buffer]) -> list[str]:
    """Name every buffer in which something was written that must not be, with the number of elements."""
    found = [(buffer.name, buffer.trespasses()) for buffer in buffers]
    return [f"{name} ({count} elements)" for name, count in found if count]
