"""Problems of quantised matrices: dequantise one, multiply by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.reference.gguf import FORMATS
from mla_conformance.suites.harness.problems.base import (
    DTYPES,
    LAYOUTS,
    POISONS,
    Problem,
    check_integers,
    check_listed,
)

QUANTS = tuple(FORMATS)
"""ggml's names of the types that the reference knows."""
BLOCK_VALUES = ("random", "moderate", "zeros", "ones", "denormal", "negative", "extreme", "counting")
"""What blocks hold: see :func:`blocks.draw`."""
MATRIX_LAYOUTS = (*LAYOUTS, "far")
MAX_ELEMENTS = 2**33
"""More elements than this are refused: nobody means a matrix that fills the machine."""


@dataclass(frozen=True, repr=False)
class QuantisedProblem(Problem):
    """What problems of one quantised matrix [rows, columns] share.

    Args:
        quant: ggml's name of the type, such as ``Q4_K``.
        rows: rows of the matrix, the out-features of a layer; 0 is allowed.
        columns: its columns, the in-features; whole blocks.
        dtype: dtype of the result, and of activations.
        values: what the blocks hold.
        layout: ``dense``; ``gapped`` (odd row strides, unaligned starts); ``far`` (rows more than 2**30 elements
            apart, so that the third lies past a signed 32-bit offset).
        poison: what fills memory that must not matter.
        seed: seed of every drawn number.
    """

    quant: str = "Q4_K"
    rows: int = 3
    columns: int = 512
    dtype: str = "float32"
    values: str = "random"
    layout: str = "dense"
    poison: str = "nan"
    seed: int = 0

    def __post_init__(self) -> None:
        check_listed(self, quant=QUANTS, dtype=DTYPES, values=BLOCK_VALUES, layout=MATRIX_LAYOUTS, poison=POISONS)
        check_integers(self, rows=0, columns=1)
        block = FORMATS[self.quant].block_elements
        if self.columns % block:
            raise ValueError(f"columns={self.columns} must be a multiple of {block}, the block of {self.quant}")
        if self.rows * self.columns > MAX_ELEMENTS:
            raise ValueError(f"rows={self.rows} and columns={self.columns}: more than {MAX_ELEMENTS} elements")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        form = FORMATS[self.quant]
        return self.columns // form.block_elements * form.block_bytes

    @property
    def dtypes(self) -> set[str]:
        """Dtypes that kernels compute with."""
        return {self.dtype}


@dataclass(frozen=True, repr=False)
class GGUFDequantizeProblem(QuantisedProblem):
    """Dequantise a matrix to ``dtype``."""

    operation: ClassVar[str] = "gguf_dequantize"

    @property
    def products(self) -> int:
        """One an element, and some for its bits."""
        return 8 * self.rows * self.columns


@dataclass(frozen=True, repr=False)
class GGUFMatmulProblem(QuantisedProblem):
    """Multiply ``tokens`` activations by a quantised matrix: y = x @ W.T.

    Args:
        tokens: rows of x; 0 is allowed.
    """

    values: str = "moderate"
    dtype: str = "float16"
    tokens: int = 1

    operation: ClassVar[str] = "gguf_matmul"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, tokens=0)

    @property
    def products(self) -> int:
        """Of the tiles that kernels work in, which have 16 tokens at least."""
        return max(16, self.tokens) * self.rows * self.columns
