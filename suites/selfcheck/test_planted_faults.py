"""Each planted fault is caught by the requirement that one would expect, and a right implementation by none."""

from __future__ import annotations

from typing import Any

import pytest

from mla_conformance.suites.attention import (
    test_decode_capability,
    test_decode_determinism,
    test_decode_empty,
    test_decode_fp8,
    test_decode_layout,
    test_decode_lse,
    test_decode_memory,
    test_decode_splits,
    test_decode_values,
)
from mla_conformance.suites.harness import requirements
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.lanes.interpreter import Lane
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject
from mla_conformance.suites.selfcheck import broken, broken_more

BASE = MLADecodeProblem(lengths=(37, 1, 50))
FP8 = BASE.replace(cache_dtype="float8_e4m3fn", k_scale=0.5)
values, lse, layout = test_decode_values, test_decode_lse, test_decode_layout
memory, splits, determinism = test_decode_memory, test_decode_splits, test_decode_determinism
SIZES = {"kv_lora_rank": 192, "qk_rope_head_dim": 16}

# Fault, the test that must catch it, and what the test is called with beside the subject.
CAUGHT: list[tuple[type[Implementation], Any, dict[str, Any]]] = [
    (broken.SwappedHeads, values.test_any_number_of_heads, {"problem": BASE}),
    (broken.Zeros, values.test_any_number_of_heads, {"problem": BASE}),
    (broken.Zeros, lse.test_zero_query_gives_ln_n, {"problem": BASE.replace(values="zero_query")}),
    (broken.ScaleOnePercentOff, values.test_softmax_scale_is_applied_as_given, {"problem": BASE}),
    (
        broken.ScaleOnePercentOff,
        lse.test_equal_keys_give_their_latent_and_score_plus_ln_n,
        {"problem": BASE.replace(values="constant")},
    ),
    (broken.PageShiftedByOne, layout.test_any_page_size, {"problem": BASE}),
    (broken.PageShiftedByOne, values.test_output_is_within_the_derived_bound, {"problem": BASE}),
    (broken.LseInBaseTwo, lse.test_lse_is_within_the_derived_bound, {"problem": BASE}),
    (broken.LseInBaseTwo, lse.test_zero_query_gives_ln_n, {"problem": BASE.replace(values="zero_query")}),
    (
        broken.LseInBaseTwo,
        lse.test_halves_merged_by_their_lse_give_the_whole,
        {"problem": BASE.replace(lengths=(70,))},
    ),
    (broken.LseInQueryDtype, lse.test_lse_is_float32, {"problem": BASE}),
    (broken.DropsLastToken, values.test_lengths_around_page_and_split_edges, {"problem": BASE}),
    (broken.DropsLastToken, values.test_long_contexts_of_real_models, {"context": "8k", "model": "glm-5-tp8"}),
    (
        broken.NanInEmptyRows,
        test_decode_empty.test_length_zero_gives_zero_and_minus_infinity,
        {"problem": BASE.replace(lengths=(5, 0))},
    ),
    (broken.RopeUnscaled, test_decode_fp8.test_scale_applies_to_latent_and_rotary_alike, {"problem": FP8}),
    (broken.IgnoresStrides, layout.test_odd_strides_and_gaps, {"problem": BASE.replace(layout="gapped")}),
    (broken.ReadsTheTail, memory.test_memory_that_must_not_matter_changes_no_bit, {"problem": BASE}),
    (broken.ReturnsAnotherBuffer, memory.test_whole_output_is_written_and_nothing_else, {"problem": BASE}),
    (broken.WritesItsInput, memory.test_whole_output_is_written_and_nothing_else, {"problem": BASE}),
    (broken.StaleAnswer, determinism.test_order_and_neighbours_change_no_bit, {"problem": BASE}),
    (broken.DependsOnTheBatch, determinism.test_a_request_has_the_same_bits_alone_and_in_a_batch, {"problem": BASE}),
    (broken_more.NanFromEmptySplits, splits.test_more_splits_than_tokens, {"problem": BASE.replace(num_splits=4)}),
    (
        broken_more.MergesInTheWrongBase,
        splits.test_number_of_splits_changes_rounding_only,
        {"problem": BASE.replace(num_splits=3)},
    ),
    (broken_more.ScaleOfTheAbsorbedWidth, values.test_sizes_of_real_models, {"model": "glm-5-tp8"}),
    (broken_more.LatentCutToAPowerOfTwo, values.test_any_latent_and_rotary_width, SIZES),
    (
        broken_more.ExpWithoutMaximum,
        values.test_large_scores_do_not_overflow,
        {"problem": BASE.replace(softmax_scale=2000.0)},
    ),
    (
        broken_more.LeaksAPartInAThousand,
        values.test_one_dominant_key_gives_its_latent_exactly,
        {"problem": BASE.replace(values="one_hot", softmax_scale=1.0)},
    ),
    (broken_more.OneHeadInHalfPrecision, values.test_one_head_is_as_accurate_as_many, {}),
    (broken_more.OrdersPages, layout.test_where_pages_lie_changes_no_bit, {"problem": BASE}),
    (
        broken_more.OwnsItsPages,
        layout.test_requests_may_share_pages,
        {"problem": BASE.replace(pages="shared", lengths=(40, 37))},
    ),
    (
        broken_more.AssumesDensePages,
        layout.test_cache_may_be_one_layer_of_a_larger_allocation,
        {"problem": BASE.replace(layout="layers")},
    ),
    (broken_more.AssumesPagesOfSixteen, layout.test_any_page_size, {"problem": BASE.replace(page_size=5)}),
    (broken_more.LooksOnePageAhead, memory.test_unused_block_table_entries_change_no_bit, {"problem": BASE}),
    (broken_more.LeavesTheLastHead, memory.test_whole_output_is_written_and_nothing_else, {"problem": BASE}),
    (
        broken_more.OffsetsOf32Bits,
        memory.test_offsets_beyond_two_to_the_31,
        {"problem": BASE.replace(layout="far", lengths=(70,))},
    ),
    (
        broken_more.WrapsPageIds,
        memory.test_page_ids_outside_the_cache,
        {"problem": BASE.replace(pages="invalid", poison="huge")},
    ),
    (broken_more.CountsItsCalls, determinism.test_repeated_runs_give_the_same_bits, {"problem": BASE}),
    (broken_more.SeesItsNeighbours, determinism.test_order_and_neighbours_change_no_bit, {"problem": BASE}),
    (
        broken_more.SubnormalCodesAreZero,
        test_decode_fp8.test_every_finite_code_is_read_as_its_value,
        {"problem": FP8.replace(values="codes", softmax_scale=1e-4, k_scale=1.0, dtype="float32")},
    ),
    (
        broken_more.ScalesEveryCache,
        test_decode_fp8.test_scale_is_ignored_for_a_cache_that_is_not_fp8,
        {"problem": BASE},
    ),
    (
        broken_more.ClaimsTooMuch,
        test_decode_capability.test_what_is_not_declined_is_right,
        {"problem": BASE.replace(heads=130)},
    ),
]


def undecorated(test: Any) -> Any:
    """The test itself, without hypothesis around it."""
    return getattr(getattr(test, "hypothesis", None), "inner_test", test)


@pytest.mark.parametrize(
    ("fault", "test", "arguments"), CAUGHT, ids=[f"{fault.name}-{test.__name__}" for fault, test, _ in CAUGHT]
)
def test_fault_fails_its_requirement(fault: type[Implementation], test: Any, arguments: dict[str, Any]) -> None:
    """The fault is a mismatch there, and the same test passes with nothing broken."""
    if "model" in arguments or not arguments:
        arguments = arguments | {"dtype": "float16"}
    undecorated(test)(subject=Subject(broken.Broken(), AnySize()), **arguments)
    with pytest.raises(Mismatch):
        undecorated(test)(subject=Subject(fault(), AnySize()), **arguments)


class AnySize(Lane):
    """The faults are plain PyTorch: no problem is too large for the interpreter."""

    def declines(self, problem: MLADecodeProblem, implementation: Implementation) -> str | None:
        return None


def test_every_decode_requirement_has_a_planted_fault() -> None:
    """A requirement that nothing was ever seen to break might be one that nothing can."""
    planted = {i for _, test, _ in CAUGHT for mark in test.pytestmark if mark.name == "requirement" for i in mark.args}
    assert planted == {i for i in requirements.load() if i.startswith("MLA-DEC-")}
