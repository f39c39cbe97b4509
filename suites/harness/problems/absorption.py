"""The problems of the two products with one matrix a head: queries into the latent space, outputs out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.suites.harness.problems.base import DTYPES, POISONS, Problem, check_integers, check_listed

PRODUCT_LAYOUTS = ("dense", "gapped", "rows", "head_major", "far")
WEIGHT_LAYOUTS = ("dense", "kv_b_rows", "transposed")
PRODUCT_VALUES = ("normal", "beyond_float16", "one_nan")


@dataclass(frozen=True, repr=False)
class HeadsProductProblem(Problem):
    """Tokens times one matrix for each head.

    Args:
        tokens: rows; 0 is allowed.
        heads: heads, each with a matrix of its own.
        kv_lora_rank: width of the latent space.
        head_dim: width on the other side: qk_nope_head_dim of queries, v_head_dim of outputs.
        dtype: dtype of tokens, matrices and result.
        layout: of tokens and result: ``dense``; ``gapped`` (tokens are the first part of wider rows and the heads of
            the result lie apart); ``rows`` (the result is a matrix of rows that lie apart in a larger buffer);
            ``head_major`` (both are transposed views, heads outermost); ``far`` (tokens more than 2**30 elements
            apart in both).
        weight_layout: ``dense``; ``kv_b_rows`` (a view of a kv_b_proj weight, whose rows of the other kind are
            poison); ``transposed`` (the last stride of the dense matrix is the other one's).
        values: ``normal``; ``beyond_float16`` (sums that pass 65,504 on their way to numbers that do not);
            ``one_nan`` (one element of one token and head is NaN).
        poison: what fills memory that must not matter.
        seed: seed of every drawn number.
    """

    tokens: int = 5
    heads: int = 3
    kv_lora_rank: int = 64
    head_dim: int = 32
    dtype: str = "bfloat16"
    layout: str = "dense"
    weight_layout: str = "dense"
    values: str = "normal"
    poison: str = "nan"
    seed: int = 0

    def __post_init__(self) -> None:
        check_listed(self, dtype=DTYPES, layout=PRODUCT_LAYOUTS, weight_layout=WEIGHT_LAYOUTS)
        check_listed(self, values=PRODUCT_VALUES, poison=POISONS)
        check_integers(self, tokens=0, heads=1, kv_lora_rank=1, head_dim=1)

    @property
    def inner(self) -> int:
        """Terms of a sum."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Elements of the result for a token and head."""
        raise NotImplementedError

    @property
    def products(self) -> int:
        """Multiplications."""
        return self.tokens * self.heads * self.kv_lora_rank * self.head_dim

    @property
    def dtypes(self) -> set[str]:
        """The only one."""
        return {self.dtype}


@dataclass(frozen=True, repr=False)
class AbsorbQueryProblem(HeadsProductProblem):
    """Queries into the latent space, by ``W_UK``."""

    operation: ClassVar[str] = "absorb_query"

    @property
    def inner(self) -> int:
        """Terms of a sum."""
        return self.head_dim

    @property
    def width(self) -> int:
        """Elements of the result for a token and head."""
        return self.kv_lora_rank


@dataclass(frozen=True, repr=False)
class VUpProjProblem(HeadsProductProblem):
    """Outputs out of the latent space, by ``W_UV``."""

    operation: ClassVar[str] = "v_up_proj"

    @property
    def inner(self) -> int:
        """Terms of a sum."""
        return self.kv_lora_rank

    @property
    def width(self) -> int:
        """Elements of the result for a token and head."""
        return self.head_dim
