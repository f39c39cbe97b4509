"""Problems: what a case is made of, printable as one line that rebuilds it."""

from __future__ import annotations

import ast
import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self

DTYPES = ("bfloat16", "float16", "float32")
CACHE_DTYPES = (*DTYPES, "float8_e4m3fn")
VALUES = ("normal", "zero_query", "constant", "one_hot", "codes")
LAYOUTS = ("dense", "gapped", "layers", "far")
PAGES = ("in_order", "shuffled", "shared", "invalid")
POISONS = ("nan", "inf", "huge")
UNUSED_ENTRIES = ("negative", "beyond", "valid")
MAX_CACHE_ELEMENTS = 2**31
"""More cached elements than this are refused: nobody means a problem that fills the machine."""


@dataclass(frozen=True)
class MLADecodeProblem:
    """One MLA decode call: every request has one query token and ``lengths[i]`` cached tokens.

    ``str()`` gives a line that :func:`parse_problem` turns back into an equal problem.

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

    def __post_init__(self) -> None:
        for name, allowed in (
            ("dtype", DTYPES),
            ("cache_dtype", CACHE_DTYPES),
            ("values", VALUES),
            ("layout", LAYOUTS),
            ("pages", PAGES),
            ("poison", POISONS),
            ("unused_entries", UNUSED_ENTRIES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        for name, least in (("heads", 1), ("kv_lora_rank", 1), ("qk_rope_head_dim", 0), ("page_size", 1)):
            if not _is_int(getattr(self, name)) or getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)!r} must be an integer of at least {least}")
        if not isinstance(self.lengths, tuple) or not all(_is_int(n) and n >= 0 for n in self.lengths):
            raise ValueError(f"lengths={self.lengths!r} must be a tuple of integers of at least 0")
        if self.num_splits is not None and (not _is_int(self.num_splits) or self.num_splits < 1):
            raise ValueError(f"num_splits={self.num_splits!r} must be None or an integer of at least 1")
        if not _is_positive(self.k_scale):
            raise ValueError(f"k_scale={self.k_scale!r} must be a finite positive number")
        if self.softmax_scale is not None and not _is_positive(self.softmax_scale):
            raise ValueError(f"softmax_scale={self.softmax_scale!r} must be None or a finite positive number")
        elements = sum(self.lengths) * (self.kv_lora_rank + self.qk_rope_head_dim)
        if elements > MAX_CACHE_ELEMENTS:
            raise ValueError(f"lengths={self.lengths!r} need {elements} cached elements, over {MAX_CACHE_ELEMENTS}")

    @property
    def scale(self) -> float:
        """The softmax scale in force."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        return float((self.kv_lora_rank + self.qk_rope_head_dim) ** -0.5)

    @property
    def is_fp8(self) -> bool:
        """Whether the cache is quantised."""
        return self.cache_dtype == "float8_e4m3fn"

    def replace(self, **changes: Any) -> Self:
        """Return a copy with ``changes`` applied."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        shown = [
            f"{field.name}={_literal(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    __repr__ = __str__


PROBLEMS = {MLADecodeProblem.__name__: MLADecodeProblem}


def parse_problem(line: str) -> MLADecodeProblem:
    """Rebuild a problem from the line that it printed.

    Only keyword arguments with literal values are read; nothing is evaluated.

    Raises:
        ValueError: the line is no such line; the message says what is wrong with it.
    """
    try:
        call = ast.parse(line.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"problem {line!r} is not of the form Name(field=value, ...): {error}") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"problem {line!r} is not of the form Name(field=value, ...)")
    kind = PROBLEMS.get(call.func.id)
    if kind is None:
        raise ValueError(f"problem {call.func.id!r} is unknown; known: {', '.join(PROBLEMS)}")
    known = {field.name for field in dataclasses.fields(kind)}
    fields: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg not in known:
            raise ValueError(f"problem field {keyword.arg!r} is unknown; known: {', '.join(sorted(known))}")
        try:
            fields[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise ValueError(f"problem field {keyword.arg!r} has no literal value in {line!r}") from None
    return kind(**fields)


def _literal(value: object) -> str:
    """A Python literal with double quotes, so that a shell can hold the line in single ones."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and math.isfinite(value)
