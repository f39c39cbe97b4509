"""What a product with one matrix a head gave, and what the float64 oracle says of the same inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.absorption import absorb_query, project_output
from mla_conformance.reference.matmul_tolerance import MatmulArithmetic, MatmulBound, matmul_bound
from mla_conformance.suites.harness.absorption_cases import NAN_AT, HeadsProductCase
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.judge import judge_error
from mla_conformance.suites.harness.outcomes import in_place
from mla_conformance.suites.harness.problems.absorption import VUpProjProblem
from mla_conformance.suites.harness.record import Record


@dataclass
class HeadsProductOutcome:
    """What a run left in ``out`` [tokens, heads, width], and the case it came from."""

    case: HeadsProductCase
    out: Tensor
    arithmetic: MatmulArithmetic
    record: Record

    def finite_rows(self) -> Tensor:
        """The tokens in float64, with a 0 in place of the element that is NaN on purpose."""
        rows = self.case.x.double()
        return torch.where(rows.isnan(), 0.0, rows)

    def expected(self) -> Tensor:
        """The float64 oracle's product of :meth:`finite_rows`, [tokens, heads, width]."""
        rows, weight = self.finite_rows(), self.case.weight.double()
        if isinstance(self.case.problem, VUpProjProblem):
            return project_output(rows, weight.transpose(1, 2))
        return absorb_query(rows, weight)

    def bounds(self) -> list[MatmulBound]:
        """The derived bound, one for each head, [tokens, width]."""
        rows, weight = self.finite_rows(), self.case.weight.double()
        return [matmul_bound(rows[:, h], weight[h].T, self.arithmetic) for h in range(len(weight))]


def heads_product_outcome(
    case: HeadsProductCase, returned: Tensor, implementation: Implementation, record: Record
) -> HeadsProductOutcome:
    """Take what the implementation returned.

    Raises:
        Mismatch: the output is not the caller's buffer.
    """
    in_place(returned, case.out)
    return HeadsProductOutcome(case, case.result, implementation.absorption_arithmetic(case.problem), record)


def check_heads_product(outcome: HeadsProductOutcome) -> None:
    """Every element is within the derived bound; what meets a NaN on purpose is NaN, and nothing else is."""
    __tracebackhide__ = True
    expected = outcome.expected()
    lost = outcome.case.problem.values == "one_nan"
    for head, bound in enumerate(outcome.bounds()):
        actual = outcome.out[:, head].double()
        if lost and head == NAN_AT[1]:
            if not actual[NAN_AT[0]].isnan().all():
                raise Mismatch(f"token {NAN_AT[0]} of head {head} has a NaN among its terms and is not NaN")
            actual = actual.clone()
            actual[NAN_AT[0]] = expected[NAN_AT[0], head]
        error = (actual - expected[:, head]).abs()
        judge_error(
            outcome.record, "product", error, bound.out, actual, expected[:, head], bound.terms, f" of head {head}"
        )
