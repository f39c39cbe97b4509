"""Cases put the drawn numbers where the block table says, and poison everywhere else."""

import pytest
import torch
from hypothesis import given

from mla_conformance.reference.mla import decode_paged
from mla_conformance.suites.harness.buffers import Buffer, trespassed
from mla_conformance.suites.harness.cases import build, subset
from mla_conformance.suites.harness.drawing import decode_problems
from mla_conformance.suites.harness.outcomes import expected
from mla_conformance.suites.harness.problems import POISONS, MLADecodeProblem

BASE = MLADecodeProblem(lengths=(37, 0, 70))


@given(problem=decode_problems())
def test_the_paged_cache_holds_the_dense_rows(problem: MLADecodeProblem) -> None:
    """The oracle through the block table and the oracle on the dense rows agree to the last digits of float64."""
    case = build(problem)
    paged = decode_paged(
        case.q_nope.double(),
        case.q_pe.double(),
        case.kv_cache,
        case.block_table,
        case.seq_lens,
        softmax_scale=problem.scale,
        cache_scale=problem.k_scale if problem.is_fp8 else 1.0,
    )
    for row in range(len(problem.lengths)):
        torch.testing.assert_close(paged.out[row], expected(case, row).out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(paged.lse[row], expected(case, row).lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["dense", "gapped", "layers"])
@pytest.mark.parametrize("poison", POISONS)
def test_what_no_request_owns_is_poison(layout: str, poison: str) -> None:
    """Every cache element is either a row of a request or the fill."""
    case = build(BASE.replace(layout=layout, poison=poison))
    storage = next(buffer.storage for buffer in case.buffers if buffer.name == "kv_cache")
    fill = {"nan": storage.isnan(), "inf": storage.isinf(), "huge": storage == torch.finfo(storage.dtype).max}[poison]
    assert int((~fill).sum()) == sum(row.numel() for row in case.rows)


def test_the_same_problem_gives_the_same_numbers_in_every_layout() -> None:
    """Layout, page order and poison change addresses only."""
    plain = build(BASE)
    other = build(BASE.replace(layout="gapped", pages="in_order", poison="huge", page_size=5))
    torch.testing.assert_close(other.q, plain.q, rtol=0, atol=0)
    for row, same in zip(other.rows, plain.rows, strict=True):
        torch.testing.assert_close(row, same, rtol=0, atol=0)


def test_far_pages_lie_beyond_a_signed_32_bit_offset() -> None:
    """At least one used page starts past 2**31 elements, and a wrapped offset stays inside the reservation."""
    case = build(BASE.replace(layout="far", lengths=(70,)))
    furthest = int(case.block_table[0].max()) * case.kv_cache.stride(0)
    assert furthest > 2**31
    assert case.kv_cache.storage_offset() + (furthest - 2**32) >= 0


def test_shared_pages_are_shared() -> None:
    """Both requests' tables start with the same page and their rows with the same numbers."""
    case = build(BASE.replace(pages="shared", lengths=(40, 37)))
    assert case.block_table[0, 0] == case.block_table[1, 0]
    torch.testing.assert_close(case.rows[0][:16], case.rows[1][:16], rtol=0, atol=0)
    assert case.block_table[0, 1] != case.block_table[1, 1]


@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "seq_lens"])
def test_a_changed_input_is_noticed(name: str) -> None:
    """One element of an input is one trespass."""
    case = build(BASE)
    getattr(case, name).view(-1)[0] += 1
    if name == "kv_cache":
        case.kv_cache[int(case.block_table[0, 0]), 0, 0] = 5
    assert any(name in found for found in trespassed(case.buffers))


def test_writing_the_output_is_allowed_and_beside_it_is_not() -> None:
    """The whole view may be written; the gap behind its first row may not."""
    buffer = Buffer.allocate("out", (2, 3), (5, 1), torch.float32, fill=torch.nan, writable=True)
    buffer.guard()
    buffer.view.zero_()
    assert buffer.trespasses() == 0
    buffer.storage[buffer.view.storage_offset() + 3] = 0
    assert buffer.trespasses() == 1


def test_a_nan_with_another_payload_is_noticed() -> None:
    """Bytes are compared, not numbers: NaN is not equal to itself."""
    buffer = Buffer.allocate("q", (4,), (1,), torch.float16, fill=torch.nan)
    buffer.guard()
    assert buffer.trespasses() == 0
    buffer.storage.view(torch.int16)[0] ^= 1
    assert buffer.trespasses() == 1


def test_a_subset_is_the_same_requests_over_part_of_their_context() -> None:
    """Requests 2 and 0 without their first page."""
    case = build(BASE)
    part = subset(case, [2, 0], first_page=1)
    assert part.seq_lens.tolist() == [54, 21]
    assert part.block_table[0, 0] == case.block_table[2, 1]
    torch.testing.assert_close(part.rows[1], case.rows[0][16:], rtol=0, atol=0)
