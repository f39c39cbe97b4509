"""The problem of gathering chunks of cached context into one dense tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.suites.harness.problems.base import (
    DTYPES,
    POISONS,
    Problem,
    check_integers,
    check_listed,
    is_integer,
    is_positive,
)
from mla_conformance.suites.harness.problems.cache import CACHE_FORMATS, DS_MLA, DS_MLA_ROW_BYTES, WRITE_LAYOUTS

PAGES = ("shuffled", "shared", "invalid")
VALUES = ("normal", "codes", "bits")
UNUSED_ENTRIES = ("negative", "beyond")


@dataclass(frozen=True, repr=False)
class KVCacheGatherProblem(Problem):
    """One gather: for request i, ``seq_lens[i]`` cached rows from position ``seq_starts[i]`` on.

    Args:
        seq_lens: rows of each request; 0 is allowed.
        seq_starts: first position of each request; empty means that no starts are given, so all are 0.
        kv_lora_rank: width of the latent part of a row.
        qk_rope_head_dim: width of the rotary part of a row; 0 means none.
        page_size: tokens of one cache page.
        dtype: dtype of the gathered rows.
        cache_format: ``same`` (the cache has that dtype), ``float8_e4m3fn``, or ``fp8_ds_mla`` (512 e4m3 bytes,
            four float32 scales, 64 bfloat16).
        k_scale: what one unit of a ``float8_e4m3fn`` cache is worth.
        values: ``normal``; ``codes`` (every e4m3 code in turn, NaN among them, and scales that are no powers of two);
            ``bits`` (any bits: infinities, subnormals and NaN of every kind).
        pages: how the block table points into the cache: ``shuffled``; ``shared`` (all requests read the pages of the
            longest); ``invalid`` (the last request's first page does not exist).
        layout: ``dense``; ``gapped`` (odd strides and gaps in every tensor); ``far`` (pages more than
            2**30 elements apart).
        spare_rows: rows of the output that no request has, behind the last one.
        unused_entries: what fills block-table entries that no position reaches.
        poison: what fills memory that must not matter.
        seed: seed of every drawn number.
    """

    seq_lens: tuple[int, ...] = (6, 0, 3)
    seq_starts: tuple[int, ...] = (2, 1, 7)
    kv_lora_rank: int = 64
    qk_rope_head_dim: int = 16
    page_size: int = 4
    dtype: str = "bfloat16"
    cache_format: str = "same"
    k_scale: float = 1.0
    values: str = "normal"
    pages: str = "shuffled"
    layout: str = "dense"
    spare_rows: int = 3
    unused_entries: str = "beyond"
    poison: str = "nan"
    seed: int = 0

    operation: ClassVar[str] = "kv_cache_gather"

    def __post_init__(self) -> None:
        check_listed(self, dtype=DTYPES, cache_format=CACHE_FORMATS, values=VALUES, pages=PAGES)
        check_listed(self, layout=WRITE_LAYOUTS, unused_entries=UNUSED_ENTRIES, poison=POISONS)
        check_integers(self, kv_lora_rank=1, qk_rope_head_dim=0, page_size=1, spare_rows=0)
        for name in ("seq_lens", "seq_starts"):
            if not all(is_integer(value, 0) for value in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a tuple of integers of at least 0")
        if self.seq_starts and len(self.seq_starts) != len(self.seq_lens):
            raise ValueError(f"seq_starts={self.seq_starts!r} must be empty or as long as seq_lens={self.seq_lens!r}")
        if not is_positive(self.k_scale):
            raise ValueError(f"k_scale={self.k_scale!r} must be a finite positive number")
        if self.cache_format == "fp8_ds_mla":
            for name, value in DS_MLA.items():
                if getattr(self, name) != value:
                    raise ValueError(f"{name}={getattr(self, name)!r} must be {value!r} for fp8_ds_mla")

    @property
    def starts(self) -> tuple[int, ...]:
        """First position of each request."""
        return self.seq_starts or (0,) * len(self.seq_lens)

    @property
    def width(self) -> int:
        """Elements of a gathered row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def cache_dtype(self) -> str:
        """Dtype of the cache tensor."""
        return {"same": self.dtype, "fp8_ds_mla": "uint8"}.get(self.cache_format, self.cache_format)

    @property
    def cache_width(self) -> int:
        """Elements of a row of the cache tensor."""
        return DS_MLA_ROW_BYTES if self.cache_format == "fp8_ds_mla" else self.width

    @property
    def products(self) -> int:
        """One product an element."""
        return sum(self.seq_lens) * self.width

    @property
    def dtypes(self) -> set[str]:
        """Dtypes that kernels compute with; none where they only copy bits."""
        return set() if self.cache_format == "same" else {self.dtype, "float8_e4m3fn"}
