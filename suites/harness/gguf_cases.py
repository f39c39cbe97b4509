"""Cases of quantised matrices: blocks and activations in poisoned memory, and what the oracle says of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.suites.harness import blocks
from mla_conformance.suites.harness.buffers import Buffer, poison_value
from mla_conformance.suites.harness.problems import GGUFDequantizeProblem, GGUFMatmulProblem
from mla_conformance.suites.harness.problems.gguf import QuantisedProblem

ODD = 3
"""Bytes or elements between rows of the ``gapped`` layout."""
MARGIN = 64
FAR = 2**30 + 24
"""Bytes or elements between rows of the ``far`` layout: the third row lies past a signed 32-bit offset."""
FAR_MARGIN = 2**31
"""Elements reserved before a ``far`` tensor: as far as a wrapped 32-bit offset can reach back."""
UNALIGNED = 67
"""Elements before a ``gapped`` tensor: its first element is not even aligned to two bytes."""


@dataclass
class DequantizeCase:
    """The tensors of one dequantisation.

    Attributes:
        data: uint8 [rows, row_bytes], any row stride.
        out: [rows, columns] of the problem's dtype, poisoned; the implementation must write all of it.
    """

    problem: GGUFDequantizeProblem
    data: Tensor
    out: Tensor
    buffers: list[Buffer]


@dataclass
class MatmulCase:
    """The tensors of one product y = x @ W.T.

    Attributes:
        data: W, uint8 [rows, row_bytes], any row stride.
        x: activations [tokens, columns], any row stride.
        out: [tokens, rows], poisoned; the implementation must write all of it.
    """

    problem: GGUFMatmulProblem
    data: Tensor
    x: Tensor
    out: Tensor
    buffers: list[Buffer]


def build_dequantize(problem: GGUFDequantizeProblem, device: torch.device | str = "cpu") -> DequantizeCase:
    """Lay ``problem`` out in poisoned memory on ``device``."""
    generator = torch.Generator().manual_seed(problem.seed)
    data = _data(problem, generator)
    out = _matrix("out", (problem.rows, problem.columns), problem, writable=True)
    data, out = (buffer.to(torch.device(device)) for buffer in (data, out))
    return DequantizeCase(problem, data.view, out.view, _guarded(problem, [data, out]))


def build_matmul(problem: GGUFMatmulProblem, device: torch.device | str = "cpu") -> MatmulCase:
    """Lay ``problem`` out in poisoned memory on ``device``; activations are normal numbers."""
    generator = torch.Generator().manual_seed(problem.seed)
    data = _data(problem, generator)
    x = _matrix("x", (problem.tokens, problem.columns), problem)
    x.view.copy_(torch.randn(x.view.shape, dtype=torch.float64, generator=generator))
    out = _matrix("out", (problem.tokens, problem.rows), problem, writable=True)
    data, x, out = (buffer.to(torch.device(device)) for buffer in (data, x, out))
    return MatmulCase(problem, data.view, x.view, out.view, _guarded(problem, [data, x, out]))


def _data(problem: QuantisedProblem, generator: torch.Generator) -> Buffer:
    buffer = _buffer("data", (problem.rows, problem.row_bytes), torch.uint8, 0xFF, problem.layout)
    buffer.view.copy_(blocks.draw(problem.quant, problem.rows, problem.columns, problem.values, generator))
    return buffer


def _matrix(name: str, shape: tuple[int, int], problem: QuantisedProblem, *, writable: bool = False) -> Buffer:
    dtype = getattr(torch, problem.dtype)
    return _buffer(name, shape, dtype, poison_value(dtype, problem.poison), problem.layout, writable=writable)


def _buffer(
    name: str, shape: tuple[int, int], dtype: torch.dtype, fill: float, layout: str, *, writable: bool = False
) -> Buffer:
    if layout == "far":
        made = Buffer.reserve(name, shape, (FAR, 1), dtype, FAR_MARGIN)
        made.writable = writable
        return made
    odd, margin = (ODD, UNALIGNED) if layout == "gapped" else (0, MARGIN)
    return Buffer.allocate(name, shape, (shape[1] + odd, 1), dtype, fill=fill, margin=margin, writable=writable)


def _guarded(problem: QuantisedProblem, buffers: list[Buffer]) -> list[Buffer]:
    """The buffers, guarded; of ``far`` ones none: they are address space, too large to compare byte by byte."""
    if problem.layout == "far":
        return []
    for buffer in buffers:
        buffer.guard()
    return buffers
