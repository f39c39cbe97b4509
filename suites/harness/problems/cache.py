"""The problem of writing the rows of new tokens into a paged cache."""

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
    is_positive,
)

CACHE_FORMATS = ("same", "float8_e4m3fn", "fp8_ds_mla")
SLOTS = ("shuffled", "with_skipped", "beyond", "duplicate_equal")
SLOT_DTYPES = ("int32", "int64")
VALUES = ("normal", "large", "special")
WRITE_LAYOUTS = (*LAYOUTS, "far")
DS_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16"}
DS_MLA_ROW_BYTES = 656


@dataclass(frozen=True, repr=False)
class KVCacheWriteProblem(Problem):
    """One write of the rows of new tokens into a paged cache.

    Args:
        tokens: rows to write; 0 is allowed.
        kv_lora_rank: width of the latent part of a row.
        qk_rope_head_dim: width of the rotary part of a row; 0 means none.
        page_size: tokens of one cache page.
        dtype: dtype of the rows.
        cache_format: ``same`` (the cache has the rows' dtype), ``float8_e4m3fn``, or ``fp8_ds_mla`` (512 e4m3 bytes,
            four float32 scales, 64 bfloat16).
        k_scale: what one unit of a ``float8_e4m3fn`` cache is worth.
        slots: ``shuffled`` (each token has a slot of its own); ``with_skipped`` (every third has slot -1); ``beyond``
            (every other lies outside the cache, some by a multiple of 2**32); ``duplicate_equal`` (the last token has
            the slot and the row of the first).
        slot_dtype: dtype of the slots.
        values: ``normal``; ``large`` (up to hundreds of times what e4m3 holds); ``special`` (zeros of both signs,
            subnormals, ties between e4m3 codes, infinity and NaN). Every other element of a skipped token is NaN.
        layout: ``dense``; ``gapped`` (odd strides and gaps in every tensor); ``far`` (pages more than
            2**30 elements apart).
        poison: what fills memory that must not matter.
        seed: seed of every drawn number.
    """

    tokens: int = 7
    kv_lora_rank: int = 64
    qk_rope_head_dim: int = 16
    page_size: int = 4
    dtype: str = "bfloat16"
    cache_format: str = "same"
    k_scale: float = 1.0
    slots: str = "shuffled"
    slot_dtype: str = "int64"
    values: str = "normal"
    layout: str = "dense"
    poison: str = "nan"
    seed: int = 0

    operation: ClassVar[str] = "kv_cache_write"

    def __post_init__(self) -> None:
        check_listed(self, dtype=DTYPES, cache_format=CACHE_FORMATS, slots=SLOTS, slot_dtype=SLOT_DTYPES)
        check_listed(self, values=VALUES, layout=WRITE_LAYOUTS, poison=POISONS)
        check_integers(self, tokens=0, kv_lora_rank=1, qk_rope_head_dim=0, page_size=1)
        if not is_positive(self.k_scale):
            raise ValueError(f"k_scale={self.k_scale!r} must be a finite positive number")
        if self.cache_format == "fp8_ds_mla":
            for name, value in DS_MLA.items():
                if getattr(self, name) != value:
                    raise ValueError(f"{name}={getattr(self, name)!r} must be {value!r} for fp8_ds_mla")

    @property
    def width(self) -> int:
        """Elements of a row."""
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
    def rewrites(self) -> bool:
        """Two tokens with one slot."""
        return self.slots == "duplicate_equal"

    @property
    def products(self) -> int:
        """One quotient an element."""
        return self.tokens * self.width

    @property
    def dtypes(self) -> set[str]:
        """Dtypes that kernels compute with; none where they only copy bits."""
        return set() if self.cache_format == "same" else {self.dtype, "float8_e4m3fn"}
