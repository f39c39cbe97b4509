"""The prefill kernel's public function: what it refuses, and what no other lane runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mla_conformance.kernels.mla_prefill import mla_prefill
from mla_conformance.reference.prefill import prefill_ragged
from mla_conformance.suites.harness.implementations import kernels
from mla_conformance.suites.harness.prefill_cases import MLAPrefillCase, build
from mla_conformance.suites.harness.problems import MLAPrefillProblem
from mla_conformance.suites.selfcheck.test_planted_faults import AnySize

BASE = MLAPrefillProblem(query_lens=(5, 2), context_lens=(0, 3), dtype="float32")


@pytest.fixture(autouse=True)
def _in_a_lane() -> Iterator[None]:
    with AnySize().running():
        yield


def arguments(case: MLAPrefillCase, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a right call, with some changed."""
    (part,) = case.parts
    given = {name: getattr(case, name) for name in ("q_nope", "q_pe", "cu_seqlens_q", "max_seqlen_q", "out", "lse")}
    given |= {name: getattr(part, name) for name in ("k_nope", "k_pe", "v", "cu_seqlens_k", "causal")}
    return given | {"softmax_scale": case.problem.scale} | changes


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("q_nope", lambda t: [1.0], TypeError),
        ("q_nope", lambda t: t.double(), TypeError),
        ("q_nope", lambda t: t[0], ValueError),
        ("q_nope", lambda t: t[..., :8], ValueError),
        ("q_nope", lambda t: t.new_zeros(7, 2, 272), ValueError),
        ("q_nope", lambda t: t.new_zeros(7, 1, 32).expand(7, 129, 32), ValueError),
        ("q_nope", lambda t: t.new_zeros(7, 32, 2).mT, ValueError),
        ("q_pe", lambda t: t[:6], ValueError),
        ("q_pe", lambda t: t[..., :8], ValueError),
        ("q_pe", lambda t: t.half(), TypeError),
        ("k_nope", lambda t: t[..., :16], ValueError),
        ("k_nope", lambda t: t[:, :1], ValueError),
        ("k_nope", lambda t: None, TypeError),
        ("k_pe", lambda t: t[:-1], ValueError),
        ("k_pe", lambda t: t[:, None], ValueError),
        ("v", lambda t: t[:-1], ValueError),
        ("v", lambda t: t[..., :8], ValueError),
        ("v", lambda t: t.bfloat16(), TypeError),
        ("v", lambda t: t.to("meta"), ValueError),
        ("cu_seqlens_q", lambda t: t.long(), TypeError),
        ("cu_seqlens_q", lambda t: t[None], ValueError),
        ("cu_seqlens_q", lambda t: t[:0], ValueError),
        ("cu_seqlens_q", lambda t: torch.stack((t, t), 1)[:, 0], ValueError),
        ("cu_seqlens_k", lambda t: t[:-1], ValueError),
        ("cu_seqlens_k", lambda t: t.tolist(), TypeError),
        ("softmax_scale", lambda t: 0.0, ValueError),
        ("softmax_scale", lambda t: float("inf"), ValueError),
        ("softmax_scale", lambda t: None, TypeError),
        ("causal", lambda t: 1, TypeError),
        ("max_seqlen_q", lambda t: -1, ValueError),
        ("max_seqlen_q", lambda t: 5.0, TypeError),
        ("out", lambda t: t.half(), TypeError),
        ("out", lambda t: t[:-1], ValueError),
        ("out", lambda t: t[:1].expand(7, -1, -1), ValueError),
        ("lse", lambda t: t.double(), TypeError),
        ("lse", lambda t: t.T, ValueError),
        ("lse", lambda t: t[:1].expand(7, -1), ValueError),
    ],
)
def test_a_wrong_argument_is_named(name: str, change: Any, error: type[Exception]) -> None:
    """And nothing is written."""
    case = build(BASE)
    given = arguments(case)
    with pytest.raises(error, match=rf"^{name} "):
        mla_prefill(**(given | {name: change(given[name])}))
    assert case.out.isnan().all()
    assert case.lse.isnan().all()


def test_results_are_allocated_where_none_are_given() -> None:
    """In the queries' dtype, and float32."""
    case = build(BASE)
    given = arguments(case, out=None, lse=None)
    out, lse = mla_prefill(**given)
    names = ("q_nope", "q_pe", "k_nope", "k_pe", "v")
    wide = {name: given[name].double() for name in names}
    offsets = {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    expected = prefill_ragged(**wide, **offsets, softmax_scale=BASE.scale, causal=True)
    torch.testing.assert_close(out, expected.out.float())
    torch.testing.assert_close(lse, expected.lse.float())


def test_queries_beyond_the_longest_that_was_announced_are_not_written() -> None:
    """A tile of queries is written whole or not at all."""
    case, whole = build(BASE.replace(query_lens=(40,), context_lens=(0,))), None
    mla_prefill(**arguments(case, max_seqlen_q=16))
    whole = build(case.problem)
    mla_prefill(**arguments(whole))
    assert torch.equal(case.out[:16], whole.out[:16])
    assert case.out[32:].isnan().all()


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_offsets_beyond_a_tensor_read_and_write_nothing_outside(name: str) -> None:
    """The last offset names rows that there are not."""
    case = build(BASE)
    given = arguments(case)
    offsets = given[name].clone()
    offsets[-1] = 1000
    mla_prefill(**(given | {name: offsets}))
    right = build(BASE)
    mla_prefill(**arguments(right))
    assert torch.equal(case.out[:5], right.out[:5])


def test_sizes_out_of_range_are_declined() -> None:
    adapter = kernels.Adapter()
    for name, size in {"heads": 129, "qk_nope_head_dim": 24, "qk_rope_head_dim": 80, "v_head_dim": 272}.items():
        assert f"{name}={size}" in str(adapter.declines(BASE.replace(**{name: size})))
