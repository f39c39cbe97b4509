"""The fixed kernel's public function: what it refuses, and the documented cases that no requirement covers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_conformance.kernels import mla_decode
from mla_conformance.suites.harness.cases import DecodeCase, build
from mla_conformance.suites.harness.problems import MLADecodeProblem

PROBLEM = MLADecodeProblem(lengths=(20, 5), heads=3)


def arguments(case: DecodeCase, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a right call, with some changed."""
    given = {
        "q_nope": case.q_nope,
        "q_pe": case.q_pe,
        "kv_cache": case.kv_cache,
        "block_table": case.block_table,
        "seq_lens": case.seq_lens,
        "softmax_scale": 0.1,
        "k_scale": None,
        "num_splits": 2,
        "out": None,
        "lse": None,
    }
    return given | changes


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("q_nope", lambda c: c.q_nope[0], ValueError),
        ("q_nope", lambda c: c.q_nope.double(), TypeError),
        ("q_nope", lambda c: c.q_nope[..., :48], ValueError),
        ("q_nope", lambda c: c.q_nope.transpose(1, 2).contiguous().transpose(1, 2), ValueError),
        ("q_nope", lambda c: [1, 2], TypeError),
        ("q_nope", lambda c: c.q_nope.unsqueeze(1).expand(-1, 17, -1, -1), ValueError),
        ("q_nope", lambda c: c.q_nope[:, None, None], ValueError),
        ("q_pe", lambda c: c.q_pe[:1], ValueError),
        ("q_pe", lambda c: c.q_pe.unsqueeze(1), ValueError),
        ("q_pe", lambda c: c.q_pe[..., :8], ValueError),
        ("q_pe", lambda c: c.q_pe.float(), TypeError),
        ("kv_cache", lambda c: c.kv_cache[0], ValueError),
        ("kv_cache", lambda c: c.kv_cache[..., :72], ValueError),
        ("kv_cache", lambda c: c.kv_cache.float(), TypeError),
        ("kv_cache", lambda c: c.kv_cache.view(torch.uint8), TypeError),
        ("kv_cache", lambda c: c.kv_cache.new_zeros(2, 129, 80), ValueError),
        ("block_table", lambda c: c.block_table[:1], ValueError),
        ("block_table", lambda c: c.block_table.float(), TypeError),
        ("block_table", lambda c: c.block_table.new_zeros(1).expand(2, 2**31), ValueError),
        ("seq_lens", lambda c: c.seq_lens[:1], ValueError),
        ("seq_lens", lambda c: c.seq_lens.float(), TypeError),
        ("query_lens", lambda c: c.seq_lens[:1], ValueError),
        ("query_lens", lambda c: c.seq_lens.float(), TypeError),
        ("causal", lambda c: 1, TypeError),
        ("softmax_scale", lambda c: 0.0, ValueError),
        ("softmax_scale", lambda c: -1.0, ValueError),
        ("softmax_scale", lambda c: float("nan"), ValueError),
        ("softmax_scale", lambda c: torch.ones(()), TypeError),
        ("num_splits", lambda c: 0, ValueError),
        ("num_splits", lambda c: 2.0, TypeError),
        ("out", lambda c: torch.empty(2, 3, 32, dtype=torch.float16), ValueError),
        ("out", lambda c: torch.empty(2, 3, 64, dtype=torch.bfloat16), TypeError),
        ("out", lambda c: torch.empty(1, 1, 64, dtype=torch.float16).expand(2, 3, 64), ValueError),
        ("lse", lambda c: torch.empty(2, 3, dtype=torch.float16), TypeError),
        ("lse", lambda c: torch.empty(3, 2), ValueError),
        ("k_scale", lambda c: -0.5, ValueError),
        ("k_scale", lambda c: torch.ones(2), ValueError),
        ("k_scale", lambda c: torch.ones((), dtype=torch.float64), TypeError),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name: str, change: Any, error: type[Exception]) -> None:
    """Before anything is launched, with the argument's name in the message."""
    case = build(PROBLEM)
    with pytest.raises(error, match=rf"^{name}\b"):
        mla_decode(**arguments(case, **{name: change(case)}))


def test_an_empty_batch_gives_empty_results() -> None:
    """No rows, no launch."""
    case = build(PROBLEM)
    empty = {name: getattr(case, name)[:0] for name in ("q_nope", "q_pe", "block_table", "seq_lens")}
    out, lse = mla_decode(**arguments(case, **empty))
    assert out.shape == (0, 3, 64)
    assert lse.shape == (0, 3)


def test_equivalent_arguments_give_the_same_bits() -> None:
    """64-bit tables and lengths, a scale as number or tensor, buffers given or not."""
    case = build(PROBLEM.replace(cache_dtype="float8_e4m3fn", k_scale=0.5))
    out, lse = mla_decode(**arguments(case, k_scale=0.5))
    for changes in (
        {"block_table": case.block_table.long(), "seq_lens": case.seq_lens.long()},
        {"k_scale": torch.tensor([0.5])},
        {"out": case.out, "lse": case.lse},
    ):
        other_out, other_lse = mla_decode(**arguments(case, **({"k_scale": 0.5} | changes)))
        torch.testing.assert_close(other_out, out, rtol=0, atol=0)
        torch.testing.assert_close(other_lse, lse, rtol=0, atol=0)


def test_no_rotary_part_is_none_or_width_zero() -> None:
    """Both mean the same."""
    case = build(PROBLEM.replace(qk_rope_head_dim=0))
    of_none, _ = mla_decode(**arguments(case, q_pe=None))
    of_empty, _ = mla_decode(**arguments(case))
    torch.testing.assert_close(of_none, of_empty, rtol=0, atol=0)


def test_a_float32_output_holds_what_a_float16_one_rounds() -> None:
    """Asking for float32 saves the last rounding."""
    case = build(PROBLEM)
    wide = torch.full((2, 3, 64), torch.nan)
    mla_decode(**arguments(case, out=wide))
    narrow, _ = mla_decode(**arguments(case))
    torch.testing.assert_close(wide.half(), narrow, rtol=0, atol=0)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_length_that_the_table_cannot_name_makes_its_row_nan(num_splits: int) -> None:
    """Neither a read past the table nor a silent answer; the other row is as before."""
    case = build(PROBLEM)
    out, lse = mla_decode(**arguments(case, num_splits=num_splits))
    lengths = torch.tensor([20, 2**31 - 1], dtype=torch.int32)
    long_out, long_lse = mla_decode(**arguments(case, num_splits=num_splits, seq_lens=lengths))
    assert long_out[1].isnan().all()
    assert long_lse[1].isnan().all()
    torch.testing.assert_close(long_out[0], out[0], rtol=0, atol=0)
    torch.testing.assert_close(long_lse[0], lse[0], rtol=0, atol=0)


def test_a_negative_length_counts_as_zero() -> None:
    """A padded row of a captured graph may be clamped below nothing."""
    case = build(PROBLEM)
    out, lse = mla_decode(**arguments(case, seq_lens=torch.tensor([20, -7], dtype=torch.int32)))
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()
