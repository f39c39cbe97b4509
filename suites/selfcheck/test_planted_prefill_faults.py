"""Each planted fault of prefill is caught by the requirement that one would expect."""

from __future__ import annotations

from typing import Any

from mla_conformance.suites.harness import requirements
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.prefill import test_prefill as prefill
from mla_conformance.suites.selfcheck import broken_prefill as broken
from mla_conformance.suites.selfcheck.planting import Caught, check_caught, each, requirements_of

BASE, CHUNKED = prefill.BASE, prefill.CHUNKED
FAR = BASE.replace(layout="far")
CAUGHT: list[Caught] = [
    (broken.ScaleOnePercentOff, prefill.test_output_and_lse_are_within_the_derived_bound, {"problem": BASE}),
    (
        broken.ValuesAsWideAsKeys,
        prefill.test_head_dims_of_real_models,
        {"dtype": "bfloat16", "nope": 192, "rope": 64, "v": 256},
    ),
    (broken.KeysOfTheNextHead, prefill.test_each_head_has_its_own_keys_and_values, {"problem": BASE.replace(heads=5)}),
    (broken.SeesOneKeyAhead, prefill.test_the_last_query_stands_on_the_last_key, {"problem": BASE}),
    (broken.FirstQueryOnTheFirstKey, prefill.test_the_last_query_stands_on_the_last_key, {"problem": BASE}),
    (broken.SeesOneKeyAhead, prefill.test_a_key_behind_a_query_changes_no_bit_of_it, {}),
    (
        broken.AlwaysCausal,
        prefill.test_without_a_causal_mask_every_query_sees_all_keys,
        {"problem": BASE.replace(causal=False)},
    ),
    (
        broken.NanWhereNothingIsSeen,
        prefill.test_a_query_that_sees_no_key_is_zero,
        {"problem": BASE.replace(query_lens=(9, 0, 3, 5), context_lens=(-9, 3, 0, -2))},
    ),
    (broken.LosesTheLastChunk, prefill.test_merged_chunks_of_context_equal_one_pass, {"problem": CHUNKED}),
    (broken.LseInBaseTwo, prefill.test_lse_is_the_natural_logarithm_in_float32, {"problem": BASE}),
    (
        broken.ClearsSpareRows,
        prefill.test_rows_of_no_request_are_neither_read_nor_written,
        {"problem": BASE.replace(spare_rows=3)},
    ),
    (
        broken.ZeroTimesSpareKeys,
        prefill.test_rows_of_no_request_are_neither_read_nor_written,
        {"problem": BASE.replace(spare_rows=3)},
    ),
    (broken.IgnoresKeyStrides, prefill.test_any_strides, {"problem": BASE.replace(layout="kv_halves")}),
    (broken.OffsetsOf32Bits, prefill.test_any_strides, {"problem": FAR}),
    (
        broken.ExpWithoutMaximum,
        prefill.test_extreme_scores_stay_within_the_bound,
        {"problem": BASE.replace(values="large")},
    ),
    (broken.SeesTheBatch, prefill.test_a_request_has_the_same_bits_alone_and_in_a_batch, {"base": BASE}),
]


@each(CAUGHT)
def test_fault_fails_its_requirement(fault: type[Implementation], test: Any, arguments: dict[str, Any]) -> None:
    """The fault is a mismatch there, and the same test passes with nothing broken."""
    check_caught(fault, test, arguments)


def test_every_prefill_requirement_has_a_planted_fault() -> None:
    """All but the budget, whose planted faults are kernels of their own (test_compile_lane.py)."""
    assert requirements_of(CAUGHT) == {i for i in requirements.load() if i.startswith("MLA-PRE-")} - {"MLA-PRE-20"}
