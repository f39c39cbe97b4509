"""What a run of MLA prefill gave, and what the float64 oracle says of the same inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.prefill import PrefillResult, prefill
from mla_conformance.reference.prefill_tolerance import prefill_bound
from mla_conformance.reference.tolerance import Arithmetic, Bound
from mla_conformance.suites.harness.buffers import poison_value
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.judge import check_equal_bits, check_exact, judge_error
from mla_conformance.suites.harness.outcomes import in_place
from mla_conformance.suites.harness.prefill_cases import MLAPrefillCase, key_parts
from mla_conformance.suites.harness.record import Record


@dataclass
class MLAPrefillOutcome:
    """What a run gave: ``out`` [queries, heads, v_head_dim], ``lse`` [queries, heads], and the case they came from."""

    case: MLAPrefillCase
    out: Tensor
    lse: Tensor
    arithmetic: Arithmetic
    record: Record

    def expected(self, request: int) -> PrefillResult:
        """The float64 oracle's answer for a request, from the dense low-precision inputs, widened: one causal pass."""
        problem = self.case.problem
        return prefill(*self._widened(request), softmax_scale=problem.scale, causal=problem.causal)

    def bound(self, request: int) -> Bound:
        """The derived bound for a request."""
        problem = self.case.problem
        return prefill_bound(
            *self._widened(request),
            softmax_scale=problem.scale,
            causal=problem.causal,
            arithmetic=self.arithmetic,
            parts=[keys[request] for _, keys, _ in key_parts(problem)],
        )

    def _widened(self, request: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k_nope, k_pe, v = (tensor.double() for tensor in self.case.requests[request])
        nope = self.case.problem.qk_nope_head_dim
        return q[..., :nope], q[..., nope:], k_nope, k_pe, v


def prefill_outcome(
    case: MLAPrefillCase, returned: tuple[Tensor, Tensor], implementation: Implementation, record: Record
) -> MLAPrefillOutcome:
    """Take what the implementation returned.

    Raises:
        Mismatch: the output is not the caller's buffer, or the log-sum-exp has another shape.
    """
    out, lse = returned
    in_place(out, case.out)
    if lse.shape != case.lse.shape:
        raise Mismatch(f"lse has shape {tuple(lse.shape)}, not [queries, heads] = {tuple(case.lse.shape)}")
    return MLAPrefillOutcome(case, out, lse, implementation.prefill_arithmetic(case.problem), record)


def check_prefill(outcome: MLAPrefillOutcome) -> None:
    """The output is within the derived bound of the oracle, element by element and row by row."""
    __tracebackhide__ = True
    for i in range(len(outcome.case.requests)):
        out, expected, bound = outcome.out[outcome.case.rows(i)], outcome.expected(i).out, outcome.bound(i)
        error, where = (out.double() - expected).abs(), f" of request {i}"
        judge_error(outcome.record, "out", error, bound.out, out, expected, bound.terms, where)
        norms = error.norm(dim=-1)
        judge_error(outcome.record, "out row norm", norms, bound.out_row, norms, torch.zeros_like(norms), {}, where)


def check_prefill_lse(outcome: MLAPrefillOutcome) -> None:
    """The natural-log lse is within the derived bound of the oracle's; -inf is exact."""
    __tracebackhide__ = True
    for i in range(len(outcome.case.requests)):
        actual, expected = outcome.lse[outcome.case.rows(i)], outcome.expected(i).lse
        error = torch.where(actual.double() == expected, 0.0, (actual.double() - expected).abs())
        judge_error(outcome.record, "lse", error, outcome.bound(i).lse, actual, expected, {}, f" of request {i}")


def check_unseeing(outcome: MLAPrefillOutcome) -> None:
    """A query that sees no key has output 0 and lse -inf."""
    __tracebackhide__ = True
    for i in range(len(outcome.case.requests)):
        blind = outcome.expected(i).lse.isneginf()
        for name, actual, nothing in (("out", outcome.out, 0.0), ("lse", outcome.lse, -math.inf)):
            rows = actual[outcome.case.rows(i)][blind]
            check_equal_bits(rows, torch.full_like(rows, nothing), f"{name} of queries of request {i} that see no key")


def check_spare_rows(outcome: MLAPrefillOutcome) -> None:
    """Rows of the caller's buffers that belong to no request still hold their poison."""
    __tracebackhide__ = True
    case = outcome.case
    for name, rows in (("out", case.out[case.used_rows :]), ("lse", case.lse[case.used_rows :])):
        before = torch.full_like(rows, poison_value(rows.dtype, case.problem.poison))
        check_exact(rows, before, f"rows of {name} that belong to no request")
