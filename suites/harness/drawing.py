"""Drawing problems: hypothesis strategies, and lists of problems for pytest's parametrize."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_conformance.reference.gguf import FORMATS
from mla_conformance.suites.harness.errors import Unsupported
from mla_conformance.suites.harness.problems import (
    DTYPES,
    POISONS,
    UNUSED_ENTRIES,
    GGUFDequantizeProblem,
    GGUFLinearProblem,
    GGUFMatmulProblem,
    MLADecodeProblem,
    Problem,
)

HEADS = (2, 5, 8, 12, 16, 17, 20, 40)
PAGE_SIZES = (1, 2, 5, 16, 32, 48, 64, 128)


@st.composite
def decode_problems(draw: st.DrawFn, /, **fixed: Any) -> MLADecodeProblem:
    """Draw an MLA decode problem small enough for the interpreter; ``fixed`` fields are not drawn."""
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32"]))
    fields: dict[str, Any] = {
        "lengths": tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))),
        "heads": draw(st.sampled_from(HEADS)),
        "kv_lora_rank": draw(st.sampled_from([64, 128])),
        "qk_rope_head_dim": draw(st.sampled_from([0, 16, 32, 64])),
        "page_size": draw(st.sampled_from(PAGE_SIZES)),
        "dtype": dtype,
        "cache_dtype": draw(st.sampled_from([dtype, "float8_e4m3fn"])),
        "num_splits": draw(st.sampled_from([None, 1, 2, 3, 8])),
        "layout": draw(st.sampled_from(["dense", "gapped", "layers"])),
        "pages": draw(st.sampled_from(["in_order", "shuffled", "shared"])),
        "poison": draw(st.sampled_from(POISONS)),
        "unused_entries": draw(st.sampled_from(UNUSED_ENTRIES)),
        "seed": draw(st.integers(0, 2**31 - 1)),
    }
    fields |= fixed
    fields["k_scale"] = draw(st.sampled_from([1.0, 0.5, 0.07])) if fields["cache_dtype"].startswith("float8") else 1.0
    width = fields["kv_lora_rank"] + fields["qk_rope_head_dim"]
    fields["softmax_scale"] = round(draw(st.sampled_from([0.25, 1.0, 3.0])) * width**-0.5, 6)
    return MLADecodeProblem(**(fields | fixed))


@st.composite
def dequantize_problems(draw: st.DrawFn) -> GGUFDequantizeProblem:
    """Draw a small quantised matrix of any type, dtype and layout."""
    return GGUFDequantizeProblem(
        **_matrices(draw),
        dtype=draw(st.sampled_from(DTYPES)),
        values=draw(st.sampled_from(["random", "extreme", "negative"])),
        poison=draw(st.sampled_from(POISONS)),
    )


@st.composite
def matmul_problems(draw: st.DrawFn) -> GGUFMatmulProblem:
    """Draw a small product of any type, dtype, layout and number of tokens."""
    return GGUFMatmulProblem(
        **_matrices(draw), dtype=draw(st.sampled_from(["float16", "bfloat16"])), tokens=draw(st.integers(1, 20))
    )


def _matrices(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a quantised matrix of up to 2,048 columns and 40 rows."""
    quant = draw(st.sampled_from(tuple(FORMATS)))
    return {
        "quant": quant,
        "rows": draw(st.integers(1, 40)),
        "columns": 256 * draw(st.integers(1, 8)),
        "layout": draw(st.sampled_from(["dense", "gapped"])),
        "seed": draw(st.integers(0, 2**31 - 1)),
    }


@st.composite
def linear_problems(draw: st.DrawFn) -> GGUFLinearProblem:
    """Draw a layer of up to four shards of mixed types, in any order, for any rank of 1, 2, 4 or 8."""
    degree = draw(st.sampled_from([1, 2, 4, 8]))
    layer = draw(st.sampled_from(["merged", "qkv", "column", "row"]))
    count = {"merged": draw(st.integers(2, 4)), "qkv": 3}.get(layer, 1)
    quants = st.sampled_from(["Q8_0", "Q4_0", "Q5_1", "IQ4_NL", "MXFP4", "F16", "Q4_K", "Q6_K", "IQ3_S"])
    return GGUFLinearProblem(
        layer=layer,
        shards=tuple((draw(quants), rows) for rows in _shard_rows(draw, layer, count, 16 * degree)),
        columns=256 * degree,
        arrival=tuple(draw(st.permutations(range(count)))),
        tp_size=degree,
        tp_rank=draw(st.integers(0, degree - 1)),
        disable_tp=draw(st.booleans()),
        tokens=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


def _shard_rows(draw: st.DrawFn, layer: str, count: int, unit: int) -> list[int]:
    """Rows of each shard, one or two units; of q, k and v the last two have one."""
    if layer == "qkv":
        return [unit * draw(st.integers(1, 2)), unit, unit]
    return [unit * draw(st.integers(1, 2)) for _ in range(count)]


def drawn(
    strategy: st.SearchStrategy[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on drawn problems, as ``@given(problem=strategy)``; declined problems are counted, not failed."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def tolerant(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Unsupported:
                return  # the subject recorded it; a test in which nothing ran ends as unsupported

        tolerant.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
        return given(problem=strategy)(tolerant)

    return decorate


def listed(base: Problem, **choices: Iterable[Any]) -> pytest.MarkDecorator:
    """Run a test on ``base`` with each choice of one field in turn; ``ids`` read ``field=value``.

    Several fields are varied one at a time, not crossed.
    """
    cases = [
        pytest.param(base.replace(**{name: value}), id=f"{name}={_short(value)}")
        for name, values in choices.items()
        for value in values
    ]
    return pytest.mark.parametrize("problem", cases)


def _short(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
