"""Each planted fault of the products with one matrix a head is caught by the requirement that one would expect."""

from __future__ import annotations

from typing import Any

from mla_conformance.suites.absorption import test_absorption as absorption
from mla_conformance.suites.harness import requirements
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.selfcheck import broken_absorption as broken
from mla_conformance.suites.selfcheck.planting import Caught, check_caught, each, requirements_of

ABSORB, V_UP, SQUARE = absorption.ABSORB, absorption.V_UP, absorption.SQUARE
LARGE = {"values": "beyond_float16", "kv_lora_rank": 128, "head_dim": 128, "heads": 1}
CAUGHT: list[Caught] = [
    (broken.OnePercentOff, absorption.test_absorbed_query_is_the_product, {"problem": ABSORB}),
    (broken.DropsTheLastTerm, absorption.test_any_absorbed_query_is_the_product, {"problem": ABSORB}),
    (
        broken.MultipliesByTheTranspose,
        absorption.test_each_head_has_its_own_key_matrix,
        {"problem": ABSORB.replace(**SQUARE)},
    ),
    (broken.MatrixOfTheNextHead, absorption.test_each_head_has_its_own_key_matrix, {"problem": ABSORB}),
    (
        broken.SumsInFloat16,
        absorption.test_absorbing_sums_pass_what_float16_holds,
        {"problem": ABSORB.replace(**LARGE)},
    ),
    (
        broken.IgnoresTokenStrides,
        absorption.test_queries_of_any_stride_reach_the_callers_buffer,
        {"problem": ABSORB.replace(layout="gapped")},
    ),
    (
        broken.NanSpreads,
        absorption.test_nan_in_a_query_stays_in_its_token_and_head,
        {"problem": ABSORB.replace(values="one_nan")},
    ),
    (
        broken.OffsetsOf32Bits,
        absorption.test_query_offsets_beyond_two_to_the_31,
        {"problem": ABSORB.replace(layout="far", tokens=4)},
    ),
    (broken.WritesWithoutTokens, absorption.test_no_queries_write_nothing, {"problem": ABSORB.replace(tokens=0)}),
    (broken.OnePercentOff, absorption.test_value_is_the_product, {"problem": V_UP}),
    (broken.DropsTheLastTerm, absorption.test_any_value_is_the_product, {"problem": V_UP}),
    (
        broken.MultipliesByTheTranspose,
        absorption.test_each_head_has_its_own_value_matrix,
        {"problem": V_UP.replace(**SQUARE)},
    ),
    (broken.MatrixOfTheNextHead, absorption.test_each_head_has_its_own_value_matrix, {"problem": V_UP}),
    (broken.SumsInFloat16, absorption.test_value_sums_pass_what_float16_holds, {"problem": V_UP.replace(**LARGE)}),
    (
        broken.WritesDensely,
        absorption.test_values_reach_rows_of_a_larger_buffer,
        {"problem": V_UP.replace(layout="rows")},
    ),
    (
        broken.WritesDensely,
        absorption.test_values_of_any_stride_reach_the_callers_buffer,
        {"problem": V_UP.replace(layout="gapped")},
    ),
    (
        broken.NanSpreads,
        absorption.test_nan_in_an_output_stays_in_its_token_and_head,
        {"problem": V_UP.replace(values="one_nan")},
    ),
    (
        broken.OffsetsOf32Bits,
        absorption.test_value_offsets_beyond_two_to_the_31,
        {"problem": V_UP.replace(layout="far", tokens=4)},
    ),
    (broken.WritesWithoutTokens, absorption.test_no_outputs_write_nothing, {"problem": V_UP.replace(tokens=0)}),
]


@each(CAUGHT)
def test_fault_fails_its_requirement(fault: type[Implementation], test: Any, arguments: dict[str, Any]) -> None:
    """The fault is a mismatch there, and the same test passes with nothing broken."""
    check_caught(fault, test, arguments)


def test_every_absorption_requirement_has_a_planted_fault() -> None:
    """All but the budgets, whose planted faults are kernels of their own (test_compile_lane.py)."""
    expected = {i for i in requirements.load() if i.startswith("MLA-ABS-")} - {"MLA-ABS-20", "MLA-ABS-21"}
    assert requirements_of(CAUGHT) == expected
