"""Two attention states of the same queries become one, whatever an empty side holds."""

import pytest

from mla_conformance.suites.harness.drawing import listed
from mla_conformance.suites.harness.merge_outcomes import (
    check_empty_states,
    check_lone_states,
    check_merged,
    check_merged_lse,
)
from mla_conformance.suites.harness.problems import DTYPES, MergeStatesProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MergeStatesProblem()
ALL_EMPTY = BASE.replace(empty="all")
MIXED = BASE.replace(empty="mixed", tokens=6, empty_lse="both")
FAR = BASE.replace(layout="far", tokens=4, heads=2)


@pytest.mark.requirement("MLA-MRG-01")
@listed(BASE, dtype=DTYPES, width=[1, 128, 512, 576], heads=[1, 16], tokens=[0, 33])
def test_merged_states_are_within_the_derived_bound(subject: Subject, problem: MergeStatesProblem) -> None:
    """Widths of a value and of a latent row, one and many heads, no tokens."""
    check_merged(subject.merge_states(problem))


@pytest.mark.requirement("MLA-MRG-02")
@listed(BASE.replace(values="constant"), dtype=["bfloat16", "float32"])
def test_log_sum_exp_is_a_natural_logarithm(subject: Subject, problem: MergeStatesProblem) -> None:
    """Keys of one score: n and m of them have log-sum-exps score + ln n and score + ln m, and together + ln(n + m)."""
    check_merged_lse(subject.merge_states(problem))


@pytest.mark.requirement("MLA-MRG-03")
@listed(BASE, empty=["first", "second", "mixed"], heads=[1])
def test_a_lone_side_passes_bit_for_bit(subject: Subject, problem: MergeStatesProblem) -> None:
    """The output of the empty side is 0 here, as of a library that writes it."""
    check_lone_states(subject.merge_states(problem.replace(empty_out="zero")))


@pytest.mark.requirement("MLA-MRG-04")
@listed(BASE.replace(empty="one"), poison=["nan", "inf", "huge"])
def test_what_an_empty_side_holds_does_not_matter(subject: Subject, problem: MergeStatesProblem) -> None:
    """Some kernels leave the output of a row without keys as it was."""
    check_lone_states(subject.merge_states(problem))


@pytest.mark.requirement("MLA-MRG-05")
@listed(BASE.replace(empty="mixed", tokens=6, empty_out="zero"), empty_lse=["inf", "both"])
def test_plus_infinity_means_empty_as_well(subject: Subject, problem: MergeStatesProblem) -> None:
    """Some libraries return it for a row without keys."""
    outcome = subject.merge_states(problem)
    check_lone_states(outcome)
    check_empty_states(outcome)


@pytest.mark.requirement("MLA-MRG-06")
@listed(ALL_EMPTY, empty_lse=["-inf", "both"], dtype=["float16"])
def test_two_empty_sides_give_zero_and_minus_infinity(subject: Subject, problem: MergeStatesProblem) -> None:
    """0 / 0, and -inf - -inf."""
    check_empty_states(subject.merge_states(problem))


@pytest.mark.requirement("MLA-MRG-07")
@listed(BASE, values=["extreme", "large"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_overflows(subject: Subject, problem: MergeStatesProblem, dtype: str) -> None:
    """Log-sum-exps of 10,000 of both signs; outputs whose sum is infinite."""
    check_merged(subject.merge_states(problem.replace(dtype=dtype, tokens=16)))


@pytest.mark.requirement("MLA-MRG-08")
@pytest.mark.parametrize("layout", ["gapped", "unequal", "halves"])
def test_any_strides(subject: Subject, layout: str) -> None:
    """Gaps between tokens; heads of one side further apart than those of the other; both in one tensor."""
    check_merged(subject.merge_states(BASE.replace(layout=layout, lse_layout="transposed")))


@pytest.mark.requirement("MLA-MRG-09")
@listed(BASE.replace(tokens=5, heads=5), lse_layout=["rows", "transposed"])
def test_tokens_and_heads_of_the_log_sum_exp_are_not_mixed(subject: Subject, problem: MergeStatesProblem) -> None:
    """As many heads as tokens, so that no shape tells them apart."""
    check_merged(subject.merge_states(problem))


@pytest.mark.requirement("MLA-MRG-10")
def test_offsets_beyond_two_to_the_31(subject: Subject) -> None:
    """Tokens lie 2**30 elements apart; a 32-bit offset would wrap into memory that is not looked at."""
    check_merged(subject.merge_states(FAR))


@pytest.mark.requirement("MLA-MRG-11")
@listed(MIXED.replace(in_place=True, empty_out="zero"), layout=["dense", "unequal"], heads=[16], width=[512])
def test_the_result_may_replace_a_side(subject: Subject, problem: MergeStatesProblem) -> None:
    """No output or log-sum-exp is overwritten before all that need it have read it."""
    outcome = subject.merge_states(problem)
    check_merged(outcome)
    check_lone_states(outcome)


@pytest.mark.requirement("MLA-MRG-12")
def test_more_tokens_than_a_grid_axis_has_room_for(subject: Subject) -> None:
    """65,536 and some, the limit of the second and third axis."""
    check_merged(subject.merge_states(BASE.replace(tokens=2**16 + 3, heads=1, width=1)))
