"""Each planted fault of multi-token decode is caught by the requirement that one would expect."""

from __future__ import annotations

from typing import Any

from mla_conformance.suites.attention import test_decode_multi_token as multi
from mla_conformance.suites.harness import requirements
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.selfcheck import broken_multi_token
from mla_conformance.suites.selfcheck.planting import Caught, check_caught, each, requirements_of

BASE = multi.BASE
CAUGHT: list[Caught] = [
    (broken_multi_token.ReversedTokens, multi.test_output_and_lse_are_within_the_derived_bound, {"problem": BASE}),
    (
        broken_multi_token.SeesOneTokenAhead,
        multi.test_the_last_query_token_sees_all_and_each_before_it_one_less,
        {"problem": BASE},
    ),
    (broken_multi_token.SeesOneTokenAhead, multi.test_a_token_behind_a_query_token_changes_no_bit_of_it, {}),
    (
        broken_multi_token.AlwaysCausal,
        multi.test_without_a_causal_mask_every_query_token_sees_all,
        {"problem": BASE.replace(causal=False)},
    ),
    (
        broken_multi_token.NanWhereNothingIsSeen,
        multi.test_a_query_token_that_sees_nothing_is_zero,
        {"problem": BASE},
    ),
    (
        broken_multi_token.PaddingMovesTheMask,
        multi.test_padding_query_tokens_are_zero_and_shift_nothing,
        {"problem": BASE.replace(query_tokens=4, query_lens=(4, 0, 1))},
    ),
    (
        broken_multi_token.MixesHeadsAndTokens,
        multi.test_heads_and_query_tokens_share_tiles_unmixed,
        {"problem": BASE},
    ),
    (
        broken_multi_token.IgnoresQueryStrides,
        multi.test_any_strides_and_pages,
        {"problem": BASE.replace(layout="gapped", lengths=(50, 37))},
    ),
    (broken_multi_token.SeesTheBatch, multi.test_a_request_has_the_same_bits_alone_and_in_a_batch, {"base": BASE}),
]


@each(CAUGHT)
def test_fault_fails_its_requirement(fault: type[Implementation], test: Any, arguments: dict[str, Any]) -> None:
    """The fault is a mismatch there, and the same test passes with nothing broken."""
    check_caught(fault, test, arguments)


def test_every_multi_token_requirement_has_a_planted_fault() -> None:
    """All but the budget, whose planted faults are kernels of their own (test_compile_lane.py)."""
    assert requirements_of(CAUGHT) == {i for i in requirements.load() if i.startswith("MLA-MTD-")} - {"MLA-MTD-20"}
