"""Verdicts on GGUF operations: bits where a value is defined, a derived bound where sums may be taken in any order."""

from __future__ import annotations

from mla_conformance.reference.matmul_tolerance import matmul_bound
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.gguf_outcomes import DequantizeOutcome, KvBOutcome, ProductOutcome
from mla_conformance.suites.harness.judge import check_equal_bits, check_exact, judge_error


def check_dequantised(outcome: DequantizeOutcome) -> None:
    """Every element has the reference's bits."""
    __tracebackhide__ = True
    check_exact(outcome.out, outcome.expected(), f"{outcome.case.problem.quant} values")


def check_absorbed(outcome: KvBOutcome) -> None:
    """Both absorbed weights have the reference's bits, but for the sign of zero, which no product of theirs shows."""
    __tracebackhide__ = True
    for name, actual, expected in zip(("W_UK", "W_UV"), (outcome.w_uk, outcome.w_uv), outcome.expected(), strict=True):
        check_equal_bits(actual, expected, name)


def check_product(outcome: ProductOutcome) -> None:
    """Every element is within the derived bound of the float64 product with the exact weight."""
    __tracebackhide__ = True
    x, weight = outcome.x.double(), outcome.weight()
    expected = x @ weight.T
    if outcome.out.shape != expected.shape:
        raise Mismatch(f"the result has shape {tuple(outcome.out.shape)}, not {tuple(expected.shape)}")
    bound = matmul_bound(x, weight, outcome.arithmetic, weight_parts=outcome.weight_parts())
    error = (outcome.out.double() - expected).abs()
    judge_error(outcome.record, "product", error, bound.out, outcome.out, expected, bound.terms)
