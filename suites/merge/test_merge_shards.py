"""The attention states of all context-parallel ranks become one, whatever an empty shard holds."""

import pytest

from mla_conformance.suites.harness.drawing import listed
from mla_conformance.suites.harness.merge_cases import reordered
from mla_conformance.suites.harness.merge_outcomes import (
    check_empty_states,
    check_lone_states,
    check_merged,
    check_merged_lse,
)
from mla_conformance.suites.harness.problems import DTYPES, MergeShardsProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MergeShardsProblem(tokens=3)
MIXED = BASE.replace(tokens=6, empty="mixed", empty_lse="both")


@pytest.mark.requirement("MLA-CPM-01")
@listed(BASE, shards=[1, 2, 3, 8, 16], dtype=DTYPES, width=[48, 512], tokens=[0])
def test_merged_shards_are_within_the_derived_bound(subject: Subject, problem: MergeShardsProblem) -> None:
    """One to sixteen ranks."""
    check_merged(subject.merge_shards(problem))


@pytest.mark.requirement("MLA-CPM-02")
@listed(BASE.replace(values="constant"), shards=[2, 8])
def test_log_sum_exp_is_a_natural_logarithm(subject: Subject, problem: MergeShardsProblem) -> None:
    """Shards of n keys of one score have log-sum-exp score + ln n, and all of them that + ln of all keys."""
    check_merged_lse(subject.merge_shards(problem))


@pytest.mark.requirement("MLA-CPM-03")
@listed(BASE.replace(empty="one"), empty_lse=["-inf", "both"], poison=["inf", "huge"], shards=[2])
def test_an_empty_shard_has_no_say(subject: Subject, problem: MergeShardsProblem) -> None:
    """In each row another one is, and its output NaN, infinite or huge; of two, the other passes bit for bit."""
    outcome = subject.merge_shards(problem)
    check_merged(outcome)
    check_lone_states(outcome)


@pytest.mark.requirement("MLA-CPM-04")
@listed(MIXED, shards=[2, 8])
def test_only_empty_shards_give_zero_and_minus_infinity(subject: Subject, problem: MergeShardsProblem) -> None:
    """Next to rows that have keys."""
    check_empty_states(subject.merge_shards(problem))


@pytest.mark.requirement("MLA-CPM-05")
@listed(BASE, values=["normal", "extreme"])
def test_the_order_of_the_shards_does_not_matter(subject: Subject, problem: MergeShardsProblem) -> None:
    """Both orders are within the bound, which does not depend on it."""
    case = subject.build(problem)
    check_merged(subject.run(reordered(case, [2, 0, 3, 1])))
    check_merged(subject.run(case))


@pytest.mark.requirement("MLA-CPM-06")
@listed(BASE, values=["extreme", "large"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_overflows(subject: Subject, problem: MergeShardsProblem, dtype: str) -> None:
    """Log-sum-exps of 10,000 of both signs; outputs whose sum is infinite."""
    check_merged(subject.merge_shards(problem.replace(dtype=dtype, tokens=16)))


@pytest.mark.requirement("MLA-CPM-07")
@pytest.mark.parametrize("layout", ["dense", "gapped"])
@pytest.mark.parametrize("lse_layout", ["rows", "transposed"])
def test_any_strides(subject: Subject, layout: str, lse_layout: str) -> None:
    """As many tokens as heads, so that no shape tells them apart."""
    check_merged(subject.merge_shards(BASE.replace(layout=layout, lse_layout=lse_layout)))


@pytest.mark.requirement("MLA-CPM-08")
def test_offsets_beyond_two_to_the_31(subject: Subject) -> None:
    """Shards lie 2**30 elements apart; a 32-bit offset would wrap into memory that is not looked at."""
    check_merged(subject.merge_shards(BASE.replace(layout="far")))
