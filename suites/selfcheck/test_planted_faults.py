"""Each planted fault is caught by the requirement that one would expect, and a right implementation by none."""

import pytest

from mla_conformance.suites.attention import (
    test_decode_determinism,
    test_decode_empty,
    test_decode_fp8,
    test_decode_layout,
    test_decode_lse,
    test_decode_memory,
    test_decode_values,
)
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.lanes.interpreter import Lane
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject
from mla_conformance.suites.selfcheck import broken

BASE = MLADecodeProblem(lengths=(37, 1, 50))
EQUAL_KEYS = test_decode_lse.test_equal_keys_give_their_latent_and_score_plus_ln_n
VALUES = test_decode_values.test_any_number_of_heads
CAUGHT = [
    (broken.SwappedHeads, VALUES, BASE),
    (broken.Zeros, VALUES, BASE),
    (broken.Zeros, test_decode_lse.test_zero_query_gives_ln_n, BASE.replace(values="zero_query")),
    (broken.ScaleOnePercentOff, test_decode_values.test_softmax_scale_is_applied_as_given, BASE),
    (
        broken.ScaleOnePercentOff,
        test_decode_lse.test_equal_keys_give_their_latent_and_score_plus_ln_n,
        BASE.replace(values="constant"),
    ),
    (broken.PageShiftedByOne, test_decode_layout.test_any_page_size, BASE),
    (broken.LseInBaseTwo, test_decode_lse.test_zero_query_gives_ln_n, BASE.replace(values="zero_query")),
    (
        broken.LseInBaseTwo,
        test_decode_lse.test_halves_merged_by_their_lse_give_the_whole,
        BASE.replace(lengths=(70,)),
    ),
    (broken.LseInQueryDtype, test_decode_lse.test_lse_is_float32, BASE),
    (broken.DropsLastToken, test_decode_values.test_lengths_around_page_and_split_edges, BASE),
    (
        broken.NanInEmptyRows,
        test_decode_empty.test_length_zero_gives_zero_and_minus_infinity,
        BASE.replace(lengths=(5, 0)),
    ),
    (
        broken.RopeUnscaled,
        test_decode_fp8.test_scale_applies_to_latent_and_rotary_alike,
        BASE.replace(cache_dtype="float8_e4m3fn", k_scale=0.5),
    ),
    (broken.IgnoresStrides, test_decode_layout.test_odd_strides_and_gaps, BASE.replace(layout="gapped")),
    (broken.ReadsTheTail, test_decode_memory.test_memory_that_must_not_matter_changes_no_bit, BASE),
    (broken.ReturnsAnotherBuffer, test_decode_memory.test_whole_output_is_written_and_nothing_else, BASE),
    (broken.WritesItsInput, test_decode_memory.test_whole_output_is_written_and_nothing_else, BASE),
    (broken.StaleAnswer, test_decode_determinism.test_order_and_neighbours_change_no_bit, BASE),
    (
        broken.DependsOnTheBatch,
        test_decode_determinism.test_a_request_has_the_same_bits_alone_and_in_a_batch,
        BASE,
    ),
]


def undecorated(test):
    """The test itself, without hypothesis around it."""
    return getattr(getattr(test, "hypothesis", None), "inner_test", test)


@pytest.mark.parametrize(
    ("fault", "test", "problem"),
    CAUGHT,
    ids=[f"{fault.name}-{test.__name__}" for fault, test, _ in CAUGHT],
)
def test_fault_fails_its_requirement(fault: type[Implementation], test: object, problem: MLADecodeProblem) -> None:
    """The fault is a mismatch there, and the same test passes with nothing broken."""
    undecorated(test)(subject=Subject(broken.Broken(), Lane()), problem=problem)
    with pytest.raises(Mismatch):
        undecorated(test)(subject=Subject(fault(), Lane()), problem=problem)
