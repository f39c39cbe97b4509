"""Each planted fault of merging attention states is caught by the requirement that one would expect."""

from __future__ import annotations

from typing import Any

from mla_conformance.suites.harness import requirements
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.merge import test_merge_shards as shards
from mla_conformance.suites.merge import test_merge_states as states
from mla_conformance.suites.selfcheck import broken_merges
from mla_conformance.suites.selfcheck.planting import Caught, check_caught, each, requirements_of

STATES, SHARDS = states.BASE, shards.BASE
STATES_CAUGHT: list[Caught] = [
    (broken_merges.EqualWeights, states.test_merged_states_are_within_the_derived_bound, {"problem": STATES}),
    (
        broken_merges.WeightsInHalfPrecision,
        states.test_merged_states_are_within_the_derived_bound,
        {"problem": STATES},
    ),
    (
        broken_merges.LseInBaseTwo,
        states.test_log_sum_exp_is_a_natural_logarithm,
        {"problem": STATES.replace(values="constant")},
    ),
    (
        broken_merges.EmptyStatesHaveAFiniteLse,
        states.test_a_lone_side_passes_bit_for_bit,
        {"problem": STATES.replace(empty="first")},
    ),
    (
        broken_merges.EmptyOnlyForAllTokens,
        states.test_a_lone_side_passes_bit_for_bit,
        {"problem": STATES.replace(empty="mixed")},
    ),
    (
        broken_merges.ZeroTimesNan,
        states.test_what_an_empty_side_holds_does_not_matter,
        {"problem": STATES.replace(empty="one")},
    ),
    (
        broken_merges.PlusInfinityIsLarge,
        states.test_plus_infinity_means_empty_as_well,
        {"problem": states.MIXED.replace(empty_lse="inf")},
    ),
    (
        broken_merges.NanWhereAllAreEmpty,
        states.test_two_empty_sides_give_zero_and_minus_infinity,
        {"problem": states.ALL_EMPTY},
    ),
    (
        broken_merges.NothingSubtracted,
        states.test_nothing_overflows,
        {"problem": STATES.replace(values="extreme"), "dtype": "bfloat16"},
    ),
    (
        broken_merges.DividesLast,
        states.test_nothing_overflows,
        {"problem": STATES.replace(values="large"), "dtype": "bfloat16"},
    ),
    (broken_merges.IgnoresTokenStrides, states.test_any_strides, {"layout": "gapped"}),
    (broken_merges.HeadStrideOfTheFirst, states.test_any_strides, {"layout": "unequal"}),
    (broken_merges.WritesTheGaps, states.test_any_strides, {"layout": "gapped"}),
    (
        broken_merges.LseOfTheOtherLayout,
        states.test_tokens_and_heads_of_the_log_sum_exp_are_not_mixed,
        {"problem": STATES.replace(tokens=5, heads=5)},
    ),
    (broken_merges.OffsetsOf32Bits, states.test_offsets_beyond_two_to_the_31, {}),
    (
        broken_merges.OverwritesTheLseFirst,
        states.test_the_result_may_replace_a_side,
        {"problem": states.MIXED.replace(in_place=True, empty_out="zero")},
    ),
    (broken_merges.FewerTokensThanAsked, states.test_more_tokens_than_a_grid_axis_has_room_for, {}),
]
SHARDS_CAUGHT: list[Caught] = [
    (broken_merges.EqualWeights, shards.test_merged_shards_are_within_the_derived_bound, {"problem": SHARDS}),
    (broken_merges.DropsTheLastState, shards.test_merged_shards_are_within_the_derived_bound, {"problem": SHARDS}),
    (
        broken_merges.LseInBaseTwo,
        shards.test_log_sum_exp_is_a_natural_logarithm,
        {"problem": SHARDS.replace(values="constant")},
    ),
    (broken_merges.ZeroTimesNan, shards.test_an_empty_shard_has_no_say, {"problem": SHARDS.replace(empty="one")}),
    (
        broken_merges.EmptyStatesHaveAFiniteLse,
        shards.test_an_empty_shard_has_no_say,
        {"problem": SHARDS.replace(empty="one", poison="huge")},
    ),
    (
        broken_merges.PlusInfinityIsLarge,
        shards.test_an_empty_shard_has_no_say,
        {"problem": SHARDS.replace(empty="one", empty_lse="both")},
    ),
    (
        broken_merges.NanWhereAllAreEmpty,
        shards.test_only_empty_shards_give_zero_and_minus_infinity,
        {"problem": shards.MIXED},
    ),
    (
        broken_merges.SubtractsTheFirst,
        shards.test_the_order_of_the_shards_does_not_matter,
        {"problem": SHARDS.replace(values="extreme")},
    ),
    (
        broken_merges.NothingSubtracted,
        shards.test_nothing_overflows,
        {"problem": SHARDS.replace(values="extreme"), "dtype": "bfloat16"},
    ),
    (
        broken_merges.DividesLast,
        shards.test_nothing_overflows,
        {"problem": SHARDS.replace(values="large"), "dtype": "float32"},
    ),
    (broken_merges.IgnoresTokenStrides, shards.test_any_strides, {"layout": "gapped", "lse_layout": "rows"}),
    (broken_merges.LseOfTheOtherLayout, shards.test_any_strides, {"layout": "dense", "lse_layout": "transposed"}),
    (broken_merges.OffsetsOf32Bits, shards.test_offsets_beyond_two_to_the_31, {}),
]
CAUGHT = STATES_CAUGHT + SHARDS_CAUGHT


@each(CAUGHT)
def test_fault_fails_its_requirement(fault: type[Implementation], test: Any, arguments: dict[str, Any]) -> None:
    """The fault is a mismatch there, and the same test passes with nothing broken."""
    check_caught(fault, test, arguments)


def test_every_merging_requirement_has_a_planted_fault() -> None:
    """All but the budgets, whose planted faults are kernels of their own (test_compile_lane.py)."""
    named = {i for i in requirements.load() if i.startswith(("MLA-MRG-", "MLA-CPM-"))}
    assert requirements_of(CAUGHT) == named - {"MLA-MRG-20", "MLA-CPM-20"}
