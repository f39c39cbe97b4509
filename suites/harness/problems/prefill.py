"""The problem of one MLA prefill in the expanded form."""

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

PREFILL_LAYOUTS = (*LAYOUTS, "kv_halves", "far")
VALUES = ("normal", "large", "zero_query", "constant", "one_hot")
MAX_ELEMENTS = 2**28
"""More elements of keys than this are refused: nobody means a problem that fills the machine."""


@dataclass(frozen=True, repr=False)
class MLAPrefillProblem(Problem):
    """One prefill of a ragged batch, every head with keys and values of its own.

    Args:
        query_lens: new tokens of each request; 0 is allowed.
        context_lens: keys of each request before its first new token. A negative number takes keys away, so that as
            many queries at the start see none: at least -query_lens.
        heads: heads of queries, keys and values.
        qk_nope_head_dim: width of the part of queries and keys that is not rotated.
        qk_rope_head_dim: width of the rotary part, whose key all heads share.
        v_head_dim: width of a value.
        dtype: dtype of everything but the log-sum-exp.
        causal: whether a query sees no key behind its own; without it, each sees all keys of its request.
        context_chunk: tokens of a chunk of context: new tokens and each chunk are attended apart, and merged. None is
            one call over context and new tokens.
        softmax_scale: multiplies every score; None is (qk_nope_head_dim + qk_rope_head_dim) ** -0.5.
        values: ``normal``; ``large`` (scores in the thousands); ``zero_query`` (every score 0); ``constant`` (all keys
            of a request equal, and all values); ``one_hot`` (the first key of a request takes all the weight).
        layout: ``dense``; ``gapped`` (odd strides and gaps in every tensor); ``kv_halves`` (k_nope and v are the halves
            of one tensor); ``far`` (so they are, with keys 2**30 elements apart).
        spare_rows: rows behind those of the last request, of queries, output and keys, that belong to none.
        poison: what fills memory that must not matter.
        seed: seed of every drawn number.
    """

    query_lens: tuple[int, ...] = (37,)
    context_lens: tuple[int, ...] = (0,)
    heads: int = 2
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    dtype: str = "bfloat16"
    causal: bool = True
    context_chunk: int | None = None
    softmax_scale: float | None = None
    values: str = "normal"
    layout: str = "dense"
    spare_rows: int = 0
    poison: str = "nan"
    seed: int = 0

    operation: ClassVar[str] = "mla_prefill"

    def __post_init__(self) -> None:
        check_listed(self, dtype=DTYPES, values=VALUES, layout=PREFILL_LAYOUTS, poison=POISONS)
        check_integers(self, heads=1, qk_nope_head_dim=1, qk_rope_head_dim=0, v_head_dim=1, spare_rows=0)
        if not isinstance(self.query_lens, tuple) or not all(is_integer(n, 0) for n in self.query_lens):
            raise ValueError(f"query_lens={self.query_lens!r} must be a tuple of integers of at least 0")
        if not isinstance(self.context_lens, tuple) or len(self.context_lens) != len(self.query_lens):
            raise ValueError(f"context_lens={self.context_lens!r} must be a tuple as long as query_lens")
        chunked = self.context_chunk is not None
        for context, queries in zip(self.context_lens, self.query_lens, strict=True):
            if not is_integer(context, 0 if chunked else -queries):
                least = "0" if chunked else "-query_lens"
                raise ValueError(f"context_lens={self.context_lens!r} must be integers of at least {least}")
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal={self.causal!r} must be True or False")
        if chunked and not (self.causal and is_integer(self.context_chunk, 1)):
            raise ValueError(f"context_chunk={self.context_chunk!r} must be None or, if causal, an integer above 0")
        if self.softmax_scale is not None and not is_positive(self.softmax_scale):
            raise ValueError(f"softmax_scale={self.softmax_scale!r} must be None or a finite positive number")
        elements = sum(self.key_lens) * self.heads * (self.width + self.v_head_dim)
        if elements > MAX_ELEMENTS:
            raise ValueError(f"query_lens and context_lens need {elements} elements of keys, over {MAX_ELEMENTS}")

    @property
    def key_lens(self) -> tuple[int, ...]:
        """Keys of each request, context and new tokens."""
        return tuple(n + context for n, context in zip(self.query_lens, self.context_lens, strict=True))

    @property
    def chunks(self) -> int:
        """Chunks of context that are attended apart."""
        return 0 if self.context_chunk is None else -(-max(self.context_lens, default=0) // self.context_chunk)

    @property
    def width(self) -> int:
        """Elements of a query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def products(self) -> int:
        """Score products of the call."""
        pairs = sum(n * m for n, m in zip(self.query_lens, self.key_lens, strict=True))
        return pairs * self.heads * self.width

    @property
    def dtypes(self) -> set[str]:
        """Dtypes that kernels compute with."""
        return {self.dtype}

    @property
    def scale(self) -> float:
        """The softmax scale in force."""
        return float(self.width**-0.5) if self.softmax_scale is None else self.softmax_scale
