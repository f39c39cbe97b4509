"""Verdicts on GGUF operations: bits where a value is defined, a derived bound where sums may be taken in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.reference.matmul_tolerance import matmul_bound
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.gguf_outcomes import DequantizeOutcome, KvBOutcome, ProductOutcome
from mla_conformance.suites.harness.judge import check_equal_bits, worst

_BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


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
    wrong = ~(error <= bound.out)  # also where the error is NaN
    ratio = torch.where(error == 0, 0.0, error / bound.out.clamp_min(torch.finfo(torch.float64).tiny))
    largest = float(ratio.nan_to_num(torch.inf).max()) if ratio.numel() else 0.0
    outcome.record.note_error("product", largest, bound.terms)
    if wrong.any():
        raise Mismatch(
            f"product: {int(wrong.sum())} of {wrong.numel()} elements are out of bounds, "
            f"the worst by a factor of {largest:.3g}\n{worst(outcome.out, expected, bound.out)}"
        )


def check_exact(actual: Tensor, expected: Tensor, what: str) -> None:
    """Two tensors have the same dtype, shape and bits, the sign of zero included; every NaN counts as the same."""
    __tracebackhide__ = True
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise Mismatch(f"{what}: {actual.dtype} {tuple(actual.shape)} against {expected.dtype} {tuple(expected.shape)}")
    bits = _BITS[actual.dtype]
    same = (actual.contiguous().view(bits) == expected.contiguous().view(bits)) | (actual.isnan() & expected.isnan())
    if not same.all():
        raise Mismatch(f"{what}: {int((~same).sum())} of {same.numel()} elements differ\n{worst(actual, expected)}")
