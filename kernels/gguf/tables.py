"""The lookup tables of the formats that have one, on a device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from mla_conformance.kernels.gguf import grids


@functools.cache
def _grid(entries: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The entries as integers of ``dtype``, from the hexadecimal digits of their bytes, the lowest byte first."""
    return torch.frombuffer(bytearray.fromhex(entries), dtype=dtype).to(device)


@functools.cache
def _values(values: tuple[int, ...], device: torch.device) -> Tensor:
    """float32, one value a code."""
    return torch.tensor(values, dtype=torch.float32, device=device)


TABLES: dict[str, Callable[[torch.device], Tensor]] = {
    "IQ1_S": functools.partial(_grid, grids.IQ1, torch.int16),
    "IQ1_M": functools.partial(_grid, grids.IQ1, torch.int16),
    "IQ2_XXS": functools.partial(_grid, grids.IQ2_XXS, torch.int16),
    "IQ2_XS": functools.partial(_grid, grids.IQ2_XS, torch.int16),
    "IQ2_S": functools.partial(_grid, grids.IQ2_S, torch.int16),
    "IQ3_XXS": functools.partial(_grid, grids.IQ3_XXS, torch.int32),
    "IQ3_S": functools.partial(_grid, grids.IQ3_S, torch.int16),
    "IQ4_NL": functools.partial(_values, grids.IQ4),
    "IQ4_XS": functools.partial(_values, grids.IQ4),
}
"""By ggml's name of the type, the table that its decode function gets, 1-D, never to be written to.

A type that is not here has none. The first call for a device uploads, which a CUDA graph cannot capture: decode once
before the capture."""
