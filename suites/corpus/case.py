"""A case of the corpus, and the tensors that cases are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SEED = 20_261


@dataclass(frozen=True)
class Case:
    """One case.

    Args:
        name: letters, digits and underscores; the first word is the group.
        run: builds the inputs on the given device and launches.
        exact: whether any right execution gives the same bits: integers, copies, conversions, dequantisation.
    """

    name: str
    run: Callable[[torch.device], None]
    exact: bool = False


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers (floating dtypes) or whole numbers of the dtype's whole range (integer ones)."""
    generator = torch.Generator().manual_seed(SEED + seed)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)
    limits = torch.iinfo(dtype)
    low, high = max(limits.min, -(2**62)), min(limits.max, 2**62)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype).to(device)


def blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An output: NaN, or for an integer dtype 90."""
    return torch.full(shape, math.nan if dtype.is_floating_point else 90, dtype=dtype).to(device)
