"""What a merge of attention states gave, and what the float64 oracle says of the same states."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.merge_tolerance import MergeArithmetic, merge_bound
from mla_conformance.reference.mla import DecodeResult
from mla_conformance.reference.split_kv import merge_many
from mla_conformance.reference.tolerance import Bound
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.judge import check_equal_bits, judge_error
from mla_conformance.suites.harness.merge_cases import MergeShardsCase, MergeStatesCase
from mla_conformance.suites.harness.outcomes import in_place
from mla_conformance.suites.harness.record import Record


@dataclass
class MergeOutcome:
    """What a merge gave: ``out`` [tokens, heads, width], ``lse`` [tokens, heads], and the case they came from.

    In place the case's own inputs are overwritten; the states as they were are in ``case.outs`` and ``case.lses``.
    """

    case: MergeStatesCase | MergeShardsCase
    out: Tensor
    lse: Tensor
    arithmetic: MergeArithmetic
    record: Record

    def expected(self) -> DecodeResult:
        """The float64 oracle's answer, from the low-precision states, widened."""
        return merge_many(self.case.outs.double(), self.case.lses.double())

    def bound(self) -> Bound:
        """The derived bound."""
        return merge_bound(self.case.outs.double(), self.case.lses.double(), self.arithmetic)


def merge_outcome(
    case: MergeStatesCase | MergeShardsCase,
    returned: tuple[Tensor, Tensor],
    implementation: Implementation,
    record: Record,
) -> MergeOutcome:
    """Take what the implementation returned.

    Raises:
        Mismatch: the output or the log-sum-exp is not in the caller's buffer.
    """
    out, lse = returned
    in_place(out, case.out)
    if lse.shape != case.lse.shape or lse.dtype != torch.float32:
        raise Mismatch(f"lse is {lse.dtype} {tuple(lse.shape)}, not float32 [tokens, heads] = {tuple(case.lse.shape)}")
    return MergeOutcome(case, out, lse, implementation.merge_arithmetic(case.problem), record)


def check_merged(outcome: MergeOutcome) -> None:
    """Output and log-sum-exp are within the derived bounds of the oracle's, the output by element and by row."""
    __tracebackhide__ = True
    expected, bound = outcome.expected(), outcome.bound()
    error = (outcome.out.double() - expected.out).abs()
    judge_error(outcome.record, "out", error, bound.out, outcome.out, expected.out, bound.terms)
    norms = error.norm(dim=-1)
    judge_error(outcome.record, "out row norm", norms, bound.out_row, norms, torch.zeros_like(norms), {})
    check_merged_lse(outcome)


def check_merged_lse(outcome: MergeOutcome) -> None:
    """The natural-log lse is within the derived bound of the oracle's; -inf is exact."""
    __tracebackhide__ = True
    actual, expected = outcome.lse, outcome.expected().lse
    error = torch.where(actual.double() == expected, 0.0, (actual.double() - expected).abs())
    judge_error(outcome.record, "lse", error, outcome.bound().lse, actual, expected, {})


def check_lone_states(outcome: MergeOutcome) -> None:
    """Where all states but one are empty, the result has that one's bits, whatever the others hold."""
    __tracebackhide__ = True
    outs, lses = outcome.case.outs, outcome.case.lses
    filled = ~lses.isinf()
    for state in range(len(outs)):
        lone = filled[state] & (filled.sum(0) == 1)
        for what, actual, own in (("out", outcome.out, outs[state]), ("lse", outcome.lse, lses[state])):
            check_equal_bits(actual[lone], own[lone], f"{what} of rows of which all but state {state} are empty")


def check_empty_states(outcome: MergeOutcome) -> None:
    """Where every state is empty, the output is 0 and the log-sum-exp -inf."""
    __tracebackhide__ = True
    empty = outcome.case.lses.isinf().all(0)
    for what, actual, nothing in (("out", outcome.out, 0.0), ("lse", outcome.lse, -math.inf)):
        rows = actual[empty]
        check_equal_bits(rows, torch.full_like(rows, nothing), f"{what} of rows of which every state is empty")
