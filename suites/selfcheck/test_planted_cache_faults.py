"""Each planted fault of cache writing is caught by the requirement that one would expect."""

from __future__ import annotations

from typing import Any

from mla_conformance.suites.cache import test_cache_write as write
from mla_conformance.suites.harness import requirements
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.selfcheck import broken_cache
from mla_conformance.suites.selfcheck.planting import Caught, check_caught, each, requirements_of

CAUGHT: list[Caught] = [
    (broken_cache.RopeFirst, write.test_cache_of_the_rows_dtype_takes_their_bits, {"problem": write.SAME}),
    (
        broken_cache.MultipliesByTheScale,
        write.test_fp8_holds_the_nearest_code_of_the_quotient,
        {"problem": write.FP8},
    ),
    (
        broken_cache.MultipliesByTheInverse,
        write.test_fp8_holds_the_nearest_code_of_the_quotient,
        {"problem": write.FP8.replace(values="special", dtype="float32", k_scale=0.9)},
    ),
    (
        broken_cache.OverflowsToNan,
        write.test_what_is_too_large_saturates_and_nan_stays,
        {"base": write.FP8, "values": "large"},
    ),
    (broken_cache.ScalesAreNotPowersOfTwo, write.test_ds_mla_scales_are_powers_of_two, {"problem": write.DS}),
    (
        broken_cache.NegativeSlotsCountFromTheEnd,
        write.test_padding_is_not_written,
        {"base": write.SAME, "slot_dtype": "int64"},
    ),
    (
        broken_cache.SlotsOf32Bits,
        write.test_slots_outside_the_cache_are_not_written,
        {"base": write.SAME, "slot_dtype": "int64"},
    ),
    (
        broken_cache.LastSlotIsOnePastTheEnd,
        write.test_slots_outside_the_cache_are_not_written,
        {"base": write.SAME, "slot_dtype": "int32"},
    ),
    (broken_cache.WritesTheGapBehindARow, write.test_odd_strides_and_gaps, {"base": write.SAME, "page_size": 5}),
    (broken_cache.CacheOffsetsOf32Bits, write.test_offsets_beyond_two_to_the_31, {"base": write.SAME}),
    (broken_cache.OneTokenASlot, write.test_equal_rows_may_share_a_slot, {"base": write.SAME}),
]


@each(CAUGHT)
def test_fault_fails_its_requirement(fault: type[Implementation], test: Any, arguments: dict[str, Any]) -> None:
    """The fault is a mismatch there, and the same test passes with nothing broken."""
    check_caught(fault, test, arguments)


def test_every_cache_writing_requirement_has_a_planted_fault() -> None:
    """All but the budget, whose planted faults are kernels of their own (test_compile_lane.py)."""
    assert requirements_of(CAUGHT) == {i for i in requirements.load() if i.startswith("MLA-KVW-")} - {"MLA-KVW-20"}
