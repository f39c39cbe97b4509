"""Several query tokens a request, as speculation makes them: each sees its own part of the context."""

import pytest
import torch
from hypothesis import strategies as st

from mla_conformance.suites.harness.drawing import drawn, listed
from mla_conformance.suites.harness.judge import check_empty_rows, check_equal_bits, check_lse, check_output
from mla_conformance.suites.harness.multi_token_cases import subset, with_other_last_token
from mla_conformance.suites.harness.problems import MLAMultiTokenProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MLAMultiTokenProblem(lengths=(37, 5, 50), heads=4)
FP8 = BASE.replace(dtype="bfloat16", cache_dtype="float8_e4m3fn", k_scale=0.5)


@st.composite
def multi_token_problems(draw: st.DrawFn) -> MLAMultiTokenProblem:
    """Draw a small problem in which every query token sees a token."""
    tokens = draw(st.integers(1, 8))
    dtype = draw(st.sampled_from(["float16", "bfloat16"]))
    return MLAMultiTokenProblem(
        lengths=tuple(draw(st.lists(st.integers(tokens, 60), min_size=1, max_size=3))),
        query_tokens=tokens,
        causal=draw(st.booleans()),
        heads=draw(st.sampled_from([2, 3, 16])),
        page_size=draw(st.sampled_from([1, 16, 64])),
        dtype=dtype,
        cache_dtype=draw(st.sampled_from([dtype, "float8_e4m3fn"])),
        num_splits=draw(st.sampled_from([None, 1, 3])),
        layout=draw(st.sampled_from(["dense", "gapped"])),
        seed=draw(st.integers(0, 2**31 - 1)),
    )


@pytest.mark.requirement("MLA-MTD-01")
@drawn(multi_token_problems())
def test_output_and_lse_are_within_the_derived_bound(subject: Subject, problem: MLAMultiTokenProblem) -> None:
    """Each query token against the oracle over the tokens that it sees."""
    outcome = subject.mla_decode_multi(problem)
    check_output(outcome)
    check_lse(outcome)


@pytest.mark.requirement("MLA-MTD-02")
@listed(BASE, query_tokens=[1, 2, 4, 5, 8], num_splits=[1, 5], page_size=[1, 64], cache_dtype=["float8_e4m3fn"])
def test_the_last_query_token_sees_all_and_each_before_it_one_less(
    subject: Subject, problem: MLAMultiTokenProblem
) -> None:
    """No request is shorter than its query tokens here, but for eight of them over five tokens."""
    lengths = (37, max(5, problem.query_tokens), 50)
    check_output(subject.mla_decode_multi(problem.replace(lengths=lengths)))


@pytest.mark.requirement("MLA-MTD-02")
def test_a_token_behind_a_query_token_changes_no_bit_of_it(subject: Subject) -> None:
    """The last cached row of each request becomes huge; only the last query token may notice."""
    case = subject.build(BASE)
    before, after = subject.run(case), subject.run(with_other_last_token(case, 3e4))
    earlier = [i for i in range(len(before.out)) if i % BASE.query_tokens != BASE.query_tokens - 1]
    check_equal_bits(after.out[earlier], before.out[earlier], "out of the query tokens before the last")
    check_equal_bits(after.lse[earlier], before.lse[earlier], "lse of the query tokens before the last")


@pytest.mark.requirement("MLA-MTD-03")
@listed(BASE.replace(causal=False), query_tokens=[2, 8], num_splits=[1, 5], cache_dtype=["float8_e4m3fn"])
def test_without_a_causal_mask_every_query_token_sees_all(subject: Subject, problem: MLAMultiTokenProblem) -> None:
    """As a draft block needs that is denoised as a whole."""
    check_output(subject.mla_decode_multi(problem))


@pytest.mark.requirement("MLA-MTD-04")
@listed(BASE, num_splits=[1, 4], query_tokens=[4, 8])
def test_a_query_token_that_sees_nothing_is_zero(subject: Subject, problem: MLAMultiTokenProblem) -> None:
    """A padding request of length 0, and a request shorter than its query tokens (vllm-project/vllm#47181)."""
    problem = problem.replace(lengths=(20, 0, 2))
    outcome = subject.mla_decode_multi(problem)
    assert 0 in outcome.case.problem.lengths
    check_empty_rows(outcome)


@pytest.mark.requirement("MLA-MTD-05")
@listed(BASE.replace(query_tokens=4, query_lens=(4, 0, 1)), causal=[True, False], num_splits=[1, 3])
def test_padding_query_tokens_are_zero_and_shift_nothing(subject: Subject, problem: MLAMultiTokenProblem) -> None:
    """Ragged numbers of drafts in a batch of one width: the first query tokens count, and end at the last token."""
    outcome = subject.mla_decode_multi(problem)
    check_empty_rows(outcome)
    real = [i for i, length in enumerate(outcome.case.problem.lengths) if length > 0]
    for i in real:
        assert torch.isfinite(outcome.lse[i]).all(), f"lse of query token {i}"
    check_output(outcome)


@pytest.mark.requirement("MLA-MTD-06")
@listed(BASE, heads=[1, 5, 16, 128], dtype=["bfloat16", "float32"])
def test_heads_and_query_tokens_share_tiles_unmixed(subject: Subject, problem: MLAMultiTokenProblem) -> None:
    """3, 15, 48 and 384 rows: below, at and above every tile, a token's heads cut by its edge."""
    check_output(subject.mla_decode_multi(problem.replace(cache_dtype=problem.dtype)))


@pytest.mark.requirement("MLA-MTD-07")
@listed(BASE, layout=["gapped", "far"], pages=["shared"])
def test_any_strides_and_pages(subject: Subject, problem: MLAMultiTokenProblem) -> None:
    """Query tokens, heads, pages and output rows lie apart; offsets pass 2**31."""
    check_output(subject.mla_decode_multi(problem.replace(lengths=(50, 37))))


@pytest.mark.requirement("MLA-MTD-08")
@pytest.mark.parametrize("base", [BASE, FP8.replace(query_lens=(3, 1, 2))], ids=["float16", "ragged-fp8"])
def test_a_request_has_the_same_bits_alone_and_in_a_batch(subject: Subject, base: MLAMultiTokenProblem) -> None:
    """The batch reversed, and its second request alone."""
    case = subject.build(base)
    batch = subject.run(case)
    tokens = base.query_tokens
    for order in ([2, 1, 0], [1]):
        again = subject.run(subset(case, order))
        rows = [i * tokens + j for i in order for j in range(tokens)]
        check_equal_bits(again.out, batch.out[rows], f"out of requests {order}")
        check_equal_bits(again.lse, batch.lse[rows], f"lse of requests {order}")
