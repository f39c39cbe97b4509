"""Each planted fault of cache gathering is caught by the requirement that one would expect."""

from __future__ import annotations

from typing import Any

from mla_conformance.suites.cache import test_cache_gather as gather
from mla_conformance.suites.harness import requirements
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.selfcheck import broken_cache_gather as broken
from mla_conformance.suites.selfcheck.planting import Caught, check_caught, each, requirements_of

SAME, FP8, DS = gather.SAME, gather.FP8, gather.DS
CAUGHT: list[Caught] = [
    (
        broken.ForgetsNanPayloads,
        gather.test_rows_of_the_outputs_dtype_keep_their_bits,
        {"problem": SAME.replace(values="bits")},
    ),
    (
        broken.ScaleInHalfPrecision,
        gather.test_e4m3_is_read_as_its_value_times_the_scale,
        {"problem": FP8.replace(values="codes", k_scale=0.07)},
    ),
    (broken.OneScaleForAllGroups, gather.test_ds_mla_groups_have_a_scale_each, {"problem": DS}),
    (broken.ScalesTheLatentAlone, gather.test_scale_of_another_cache_is_ignored, {"base": FP8}),
    (broken.ScalesEveryCache, gather.test_scale_of_another_cache_is_ignored, {"base": SAME}),
    (broken.StartsWithThePage, gather.test_any_start_and_length, {"problem": SAME}),
    (broken.EmptyRequestTakesTheRow, gather.test_requests_without_tokens, {"seq_lens": (0, 5)}),
    (broken.ClearsSpareRows, gather.test_rows_of_no_request_are_left_alone, {"base": SAME, "spare_rows": 1}),
    (
        broken.LooksAtTheWholeTable,
        gather.test_only_what_the_positions_reach_is_read,
        {"problem": SAME.replace(page_size=2, unused_entries="negative")},
    ),
    (broken.ClampsPages, gather.test_page_ids_outside_the_cache, {"base": SAME, "seed": 0}),
    (broken.IgnoresRowGaps, gather.test_odd_strides_and_gaps, {"base": SAME}),
    (broken.WritesTheGapBehindARow, gather.test_odd_strides_and_gaps, {"base": FP8}),
    (broken.CacheOffsetsOf32Bits, gather.test_offsets_beyond_two_to_the_31, {"base": SAME}),
    (broken.WriterAndReaderDisagree, gather.test_what_was_written_is_what_is_gathered, {"base": FP8}),
]


@each(CAUGHT)
def test_fault_fails_its_requirement(fault: type[Implementation], test: Any, arguments: dict[str, Any]) -> None:
    """The fault is a mismatch there, and the same test passes with nothing broken."""
    check_caught(fault, test, arguments)


def test_every_gathering_requirement_has_a_planted_fault() -> None:
    """All but the budget, whose planted faults are kernels of their own (test_compile_lane.py)."""
    expected = {i for i in requirements.load() if i.startswith("MLA-KVG-")} - {"MLA-KVG-20"}
    assert requirements_of(CAUGHT) == expected
