"""The problem of one MLA decode call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.suites.harness.problems.base import (
    DTYPES,
    LAYOUTS,
    POISONS,
    Problem,
    check_integers,
    check_listed,
    is_integer,
    is_positive,
)

CACHE_DTYPES = (*DTYPES, "float8_e4m3fn")
VALUES = ("normal", "zero_query", "constant", "one_hot", "codes")
CACHE_LAYOUTS = (*LAYOUTS, "layers", "far")
PAGES = ("in_order", "shuffled", "shared", "invalid")
UNUSED_ENTRIES = ("negative", "beyond", "valid")
MAX_CACHE_ELEMENTS = 2**31
"""More cached elements than this are refused: nobody means a problem that fills the machine."""


@dataclass(frozen=True, repr=False)
class MLADecodeProblem(Problem):
    """One MLA decode call: every request has one query token and ``lengths[i]`` cached tokens.

    Args:
        lengths: cached tokens of each request; 0 is allowed.
        heads: query heads that share the single latent KV head.
        kv_lora_rank: width of the latent part of a cache row.
        qk_rope_head_dim: width of the rotary part of a cache row; 0 means none.
        page_size: tokens of one cache page.
        dtype: dtype of the queries and of the output.
        cache_dtype: ``dtype``, or ``float8_e4m3fn``.
        num_splits: parts into which the tokens of a request are split; ``None`` leaves it to the launcher.
        softmax_scale: multiplies every score; ``None`` gives scores of standard deviation 1 for normal values.
        k_scale: dequantised value of one unit of an fp8 cache, for latent and rope alike.
        values: ``normal``; ``zero_query`` (every score 0); ``constant`` (all keys of a request equal);
            ``one_hot`` (the last key takes all the weight); ``codes`` (the cache holds every finite e4m3 code).
        layout: ``dense``; ``gapped`` (odd strides and gaps in every tensor); ``layers`` (the cache is one layer
            of a cross-layer allocation); ``far`` (pages more than 2**31 elements apart).
        pages: how block tables point into the cache: ``in_order``, ``shuffled``, ``shared`` (requests share
            their first page) or ``invalid`` (the last request's table names a page that does not exist).
        poison: what fills memory that must not matter.
        unused_entries: what fills block-table entries that a length does not reach: ``negative`` numbers, pages
            ``beyond`` the cache, or a ``valid`` page of somebody else.
        seed: seed of every drawn number.
    """

    lengths: tuple[int, ...] = (37,)
    heads: int = 16
    kv_lora_rank: int = 64
    qk_rope_head_dim: int = 16
    page_size: int = 16
    dtype: str = "float16"
    cache_dtype: str = "float16"
    num_splits: int | None = 2
    softmax_scale: float | None = None
    k_scale: float = 1.0
    values: str = "normal"
    layout: str = "dense"
    pages: str = "shuffled"
    poison: str = "nan"
    unused_entries: str = "negative"
    seed: int = 0

    operation: ClassVar[str] = "mla_decode"

    def __post_init__(self) -> None:
        check_listed(self, dtype=DTYPES, cache_dtype=CACHE_DTYPES, values=VALUES, layout=CACHE_LAYOUTS)
        check_listed(self, pages=PAGES, poison=POISONS, unused_entries=UNUSED_ENTRIES)
        check_integers(self, heads=1, kv_lora_rank=1, qk_rope_head_dim=0, page_size=1)
        if not isinstance(self.lengths, tuple) or not all(is_integer(n, 0) for n in self.lengths):
            raise ValueError(f"lengths={self.lengths!r} must be a tuple of integers of at least 0")
        if self.num_splits is not None and not is_integer(self.num_splits, 1):
            raise ValueError(f"num_splits={self.num_splits!r} must be None or an integer of at least 1")
        if not is_positive(self.k_scale):
            raise ValueError(f"k_scale={self.k_scale!r} must be a finite positive number")
        if self.softmax_scale is not None and not is_positive(self.softmax_scale):
            raise ValueError(f"softmax_scale={self.softmax_scale!r} must be None or a finite positive number")
        elements = sum(self.lengths) * self.width
        if elements > MAX_CACHE_ELEMENTS:
            raise ValueError(f"lengths={self.lengths!r} need {elements} cached elements, over {MAX_CACHE_ELEMENTS}")

    @property
    def width(self) -> int:
        """Elements of a cache row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def products(self) -> int:
        """Score products of the call."""
        return sum(self.lengths) * self.heads * self.width

    @property
    def dtypes(self) -> set[str]:
        """Dtypes that kernels compute with."""
        return {self.dtype, self.cache_dtype}

    @property
    def scale(self) -> float:
        """The softmax scale in force."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        return float(self.width**-0.5)

    @property
    def is_fp8(self) -> bool:
        """Whether the cache is quantised."""
        return self.cache_dtype == "float8_e4m3fn"
