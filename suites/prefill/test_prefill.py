"""Prefill: every query token against the keys and values of its own head, over ragged batches."""

import pytest
import torch
from hypothesis import strategies as st

from mla_conformance.suites.harness.drawing import drawn, listed
from mla_conformance.suites.harness.judge import check_equal_bits
from mla_conformance.suites.harness.prefill_cases import subset, with_other_last_key
from mla_conformance.suites.harness.prefill_outcomes import (
    check_prefill,
    check_prefill_lse,
    check_spare_rows,
    check_unseeing,
)
from mla_conformance.suites.harness.problems import MLAPrefillProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MLAPrefillProblem(query_lens=(19, 1, 6), context_lens=(0, 9, 30))
CHUNKED = BASE.replace(context_lens=(70, 0, 20), context_chunk=32)


@st.composite
def prefill_problems(draw: st.DrawFn) -> MLAPrefillProblem:
    """Draw a small ragged batch, in one pass or with chunks of context."""
    batch = draw(st.integers(1, 3))
    causal = draw(st.booleans())
    return MLAPrefillProblem(
        query_lens=tuple(draw(st.integers(0, 40)) for _ in range(batch)),
        context_lens=tuple(draw(st.integers(0, 50)) for _ in range(batch)),
        heads=draw(st.integers(1, 3)),
        qk_nope_head_dim=draw(st.sampled_from([16, 32, 48, 64])),
        qk_rope_head_dim=draw(st.sampled_from([0, 16, 32])),
        v_head_dim=draw(st.sampled_from([16, 32, 48])),
        dtype=draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        causal=causal,
        context_chunk=draw(st.sampled_from([None, 16, 33])) if causal else None,
        softmax_scale=draw(st.sampled_from([None, 0.05, 1.0])),
        layout=draw(st.sampled_from(["dense", "gapped", "kv_halves"])),
        spare_rows=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


@pytest.mark.requirement("MLA-PRE-01")
@drawn(prefill_problems())
def test_output_and_lse_are_within_the_derived_bound(subject: Subject, problem: MLAPrefillProblem) -> None:
    """Shapes, dtypes, masks, chunks and layouts as they come."""
    outcome = subject.mla_prefill(problem)
    check_prefill(outcome)
    check_prefill_lse(outcome)


@pytest.mark.requirement("MLA-PRE-02")
@pytest.mark.parametrize(("nope", "rope", "v"), [(128, 64, 128), (192, 64, 256)], ids=["128+64-128", "192+64-256"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_head_dims_of_real_models(subject: Subject, dtype: str, nope: int, rope: int, v: int) -> None:
    """DeepSeek-V3's and GLM-5's; a value is not as wide as a key."""
    dims = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": v}
    problem = MLAPrefillProblem(query_lens=(17, 3), context_lens=(0, 20), heads=1, dtype=dtype, **dims)
    check_prefill(subject.mla_prefill(problem))


@pytest.mark.requirement("MLA-PRE-03")
@listed(BASE.replace(query_lens=(3, 1), context_lens=(0, 4)), heads=[1, 5, 128])
def test_each_head_has_its_own_keys_and_values(subject: Subject, problem: MLAPrefillProblem) -> None:
    """From a rank with one head to all of DeepSeek-V3's."""
    check_prefill(subject.mla_prefill(problem))


@pytest.mark.requirement("MLA-PRE-04")
@listed(BASE, query_lens=[(19, 1, 6), (1, 2, 3)], dtype=["float16"])
def test_the_last_query_stands_on_the_last_key(subject: Subject, problem: MLAPrefillProblem) -> None:
    """Each query before it sees one key less, whatever the context."""
    check_prefill(subject.mla_prefill(problem))


@pytest.mark.requirement("MLA-PRE-04")
def test_a_key_behind_a_query_changes_no_bit_of_it(subject: Subject) -> None:
    """The last key and value of each request become huge; only its last query may notice."""
    case = subject.build(BASE)
    before, after = subject.run(case), subject.run(with_other_last_key(case, 3e4))
    for i, queries in enumerate(BASE.query_lens):
        rows = slice(case.rows(i).start, case.rows(i).start + queries - 1)
        check_equal_bits(after.out[rows], before.out[rows], f"out of queries before the last, request {i}")
        check_equal_bits(after.lse[rows], before.lse[rows], f"lse of queries before the last, request {i}")


@pytest.mark.requirement("MLA-PRE-05")
@listed(BASE.replace(causal=False), context_lens=[(0, 9, 30), (-12, 0, 0)])
def test_without_a_causal_mask_every_query_sees_all_keys(subject: Subject, problem: MLAPrefillProblem) -> None:
    """As context needs; there may be fewer keys than queries."""
    check_prefill(subject.mla_prefill(problem))


@pytest.mark.requirement("MLA-PRE-06")
@listed(BASE.replace(query_lens=(9, 0, 3, 5), context_lens=(-9, 3, 0, -2)), causal=[True, False])
def test_a_query_that_sees_no_key_is_zero(subject: Subject, problem: MLAPrefillProblem) -> None:
    """Requests without keys or without queries, and queries before the first key (vllm-project/vllm#27491)."""
    outcome = subject.mla_prefill(problem)
    assert any(outcome.expected(i).lse.isneginf().any() for i in range(len(problem.query_lens)))
    check_unseeing(outcome)
    check_prefill(outcome)


@pytest.mark.requirement("MLA-PRE-07")
@listed(CHUNKED, context_chunk=[16, 32, 100], dtype=["float32"])
def test_merged_chunks_of_context_equal_one_pass(subject: Subject, problem: MLAPrefillProblem) -> None:
    """Chunks are attended apart without a mask; requests whose context is shorter have empty ones."""
    outcome = subject.mla_prefill(problem)
    check_prefill(outcome)
    check_prefill_lse(outcome)


@pytest.mark.requirement("MLA-PRE-08")
@listed(BASE, softmax_scale=[0.03, 1.0], values=["zero_query"])
def test_lse_is_the_natural_logarithm_in_float32(subject: Subject, problem: MLAPrefillProblem) -> None:
    """With a query of zeros it is the logarithm of the number of keys."""
    outcome = subject.mla_prefill(problem)
    assert outcome.lse.dtype == torch.float32, outcome.lse.dtype
    check_prefill_lse(outcome)


@pytest.mark.requirement("MLA-PRE-09")
@listed(BASE.replace(spare_rows=3), poison=["nan", "inf"], layout=["kv_halves"])
def test_rows_of_no_request_are_neither_read_nor_written(subject: Subject, problem: MLAPrefillProblem) -> None:
    """Rows behind the last request, as a padded graph batch has, and keys of the next request."""
    outcome = subject.mla_prefill(problem)
    check_prefill(outcome)
    check_spare_rows(outcome)


@pytest.mark.requirement("MLA-PRE-10")
@listed(BASE, layout=["gapped", "kv_halves", "far"])
def test_any_strides(subject: Subject, problem: MLAPrefillProblem) -> None:
    """k_nope and v may be halves of kv_b's output; offsets pass 2**31."""
    smaller = problem.replace(query_lens=(4, 2), context_lens=(0, 1)) if problem.layout == "far" else problem
    check_prefill(subject.mla_prefill(smaller))


@pytest.mark.requirement("MLA-PRE-11")
@listed(BASE, values=["large", "one_hot", "constant"], softmax_scale=[2.0])
def test_extreme_scores_stay_within_the_bound(subject: Subject, problem: MLAPrefillProblem) -> None:
    """Scores in the thousands do not overflow; one key takes all the weight, or all take the same."""
    outcome = subject.mla_prefill(problem)
    check_prefill(outcome)
    check_prefill_lse(outcome)


@pytest.mark.requirement("MLA-PRE-12")
@pytest.mark.parametrize("base", [BASE, CHUNKED], ids=["one-pass", "chunks"])
def test_a_request_has_the_same_bits_alone_and_in_a_batch(subject: Subject, base: MLAPrefillProblem) -> None:
    """The batch reversed, and its last request alone."""
    case = subject.build(base)
    batch = subject.run(case)
    for order in ([2, 1, 0], [2]):
        again = subject.run(subset(case, order))
        for place, i in enumerate(order):
            rows = again.case.rows(place)
            check_equal_bits(again.out[rows], batch.out[case.rows(i)], f"out of request {i} among {order}")
            check_equal_bits(again.lse[rows], batch.lse[case.rows(i)], f"lse of request {i} among {order}")
