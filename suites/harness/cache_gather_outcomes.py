"""What a gather wrote, and what the reference writes into a copy of the same output."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.cache_gather import gather_rows
from mla_conformance.reference.tolerance import SMALLEST_ROUNDING, UNIT_ROUNDOFF
from mla_conformance.suites.harness.cache_cases import KVCacheWriteCase
from mla_conformance.suites.harness.cache_gather_cases import DS_MLA_SCALES, KVCacheGatherCase
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.judge import check_exact, judge_error
from mla_conformance.suites.harness.outcomes import in_place
from mla_conformance.suites.harness.problems.cache import DS_MLA
from mla_conformance.suites.harness.record import Record

SHOWN = 8
GROUP = 128


@dataclass
class KVCacheGatherOutcome:
    """What a gather left in ``out`` [rows, width], and the case it came from."""

    case: KVCacheGatherCase
    out: Tensor
    record: Record

    def expected(self) -> Tensor:
        """The whole output as the reference leaves it, dense."""
        case = self.case
        out = case.before.clone()
        gather_rows(case.kv_cache, case.block_table, case.cu_seqlens, out, case.seq_starts, case.k_scale)
        return out


def kv_cache_gather_outcome(
    case: KVCacheGatherCase, returned: Tensor, implementation: Implementation, record: Record
) -> KVCacheGatherOutcome:
    """Take what the implementation returned.

    Raises:
        Mismatch: the output is not the caller's buffer.
    """
    in_place(returned, case.out)
    return KVCacheGatherOutcome(case, returned, record)


def check_gathered(outcome: KVCacheGatherOutcome) -> None:
    """Every bit of the output is the reference's, also in rows that no request has.

    Where an e4m3 code is NaN, any NaN will do: converting has no rule for its bits. What is copied keeps them.
    """
    __tracebackhide__ = True
    actual, expected = outcome.out, outcome.expected()
    wrong = _bits(actual) != _bits(expected)
    converted = expected.isnan() & _converted(outcome.case)
    wrong &= ~(converted & actual.isnan())
    _raise_where(wrong, actual, expected, "of the output differ")


def check_invalid(outcome: KVCacheGatherOutcome) -> None:
    """The rows of the last request's first page are NaN, those of its other pages and of other requests right."""
    __tracebackhide__ = True
    case = outcome.case
    problem = case.problem
    length = problem.seq_lens[-1]
    end = sum(problem.seq_lens)
    lost = min(length, problem.page_size - problem.starts[-1] % problem.page_size)
    nan = outcome.out[end - length : end - length + lost]
    if not nan.isnan().all():
        raise Mismatch(f"{int((~nan.isnan()).sum())} elements of a page outside the cache are not NaN")
    # The same table with a page that exists: only the rows compared below are looked at.
    table = case.block_table.clone()
    table[-1, problem.starts[-1] // problem.page_size] = 0
    healthy = dataclasses.replace(outcome, case=dataclasses.replace(case, block_table=table))
    expected = healthy.expected()
    kept = [i for i in range(len(expected)) if not end - length <= i < end - length + lost]
    check_exact(outcome.out[kept], expected[kept], "the other rows")


def check_round_trip(outcome: KVCacheGatherOutcome, written: KVCacheWriteCase) -> None:
    """What was written is what was gathered: the same bits, or within half a step of e4m3.

    A step of e4m3 is at most an eighth of a number, or 2**-9 in units of the scale. To half of it come the float32
    roundings of quotient and product, and the final rounding.
    """
    __tracebackhide__ = True
    problem = written.problem
    rows = torch.cat((written.ckv, written.kpe), -1)
    if problem.cache_format == "same":
        check_exact(outcome.out, rows, "rows written and gathered")
        return
    copied = 0
    scale: Tensor | float = float(written.k_scale)
    if problem.cache_format == "fp8_ds_mla":
        copied = DS_MLA["qk_rope_head_dim"]  # type: ignore[assignment]
        check_exact(outcome.out[:, -copied:], rows[:, -copied:], "rotary parts written and gathered")
        stored = written.kv_cache.flatten(0, 1)[written.slot_mapping.long()][:, DS_MLA_SCALES]
        scale = stored.contiguous().view(torch.float32).double().repeat_interleave(GROUP, dim=1)
    count = rows.shape[1] - copied
    actual, exact = outcome.out[:, :count], rows[:, :count].double()
    half_step = torch.maximum(exact.abs() * 2.0**-4, torch.as_tensor(scale, dtype=torch.float64) * 2.0**-10)
    unrounded = (half_step + 2 * UNIT_ROUNDOFF["float32"] * (exact.abs() + half_step)) * (1 + UNIT_ROUNDOFF["float32"])
    final = UNIT_ROUNDOFF[problem.dtype] * (exact.abs() + unrounded) + SMALLEST_ROUNDING.get(problem.dtype, 0.0)
    error = (actual.double() - exact).abs()
    judge_error(outcome.record, "rows written and gathered", error, unrounded + final, actual, exact, {})


def _converted(case: KVCacheGatherCase) -> Tensor:
    """Which columns are converted from e4m3, bool [1, width]."""
    problem = case.problem
    columns = torch.arange(problem.width, device=case.out.device)
    count = {"same": 0, "fp8_ds_mla": problem.kv_lora_rank}.get(problem.cache_format, problem.width)
    return (columns < count)[None]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _raise_where(wrong: Tensor, actual: Tensor, expected: Tensor, what: str) -> None:
    __tracebackhide__ = True
    if not wrong.any():
        return
    places = wrong.nonzero()
    lines = [
        f"row {row}, column {column}: {float(actual[row, column])}, expected {float(expected[row, column])}"
        for row, column in itertools.islice(places.tolist(), SHOWN)
    ]
    raise Mismatch(f"{len(places)} of {wrong.numel()} elements {what}\n" + "\n".join(lines))
