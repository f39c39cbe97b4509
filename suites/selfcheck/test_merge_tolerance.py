"""The bound of a merge holds for faithful arithmetic, and is small enough to see a fault of a percent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.merge_tolerance import MergeArithmetic, merge_bound
from mla_conformance.reference.split_kv import merge_many, merge_states
from mla_conformance.suites.harness.merge_cases import draw
from mla_conformance.suites.harness.problems import MergeShardsProblem

DTYPES = ("bfloat16", "float16", "float32")
MANY = MergeShardsProblem(tokens=200, heads=4, width=64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_case = pytest.mark.parametrize(
    "problem",
    [
        MANY,
        MANY.replace(shards=16),
        MANY.replace(shards=1),
        MANY.replace(values="extreme"),
        MANY.replace(values="large"),
        MANY.replace(values="constant", empty="mixed", empty_lse="both"),
    ],
    ids=str,
)


def ratios(out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor, arithmetic: MergeArithmetic) -> tuple[float, ...]:
    """Largest error over its bound: of an element, of a row and of a log-sum-exp."""
    expected = merge_many(outs.double(), lses.double())
    bound = merge_bound(outs.double(), lses.double(), arithmetic)
    error = (out.double() - expected.out).abs()
    lse_error = torch.where(lse.double() == expected.lse, 0.0, (lse.double() - expected.lse).abs())
    pairs = ((error, bound.out), (error.norm(dim=-1), bound.out_row), (lse_error, bound.lse))
    return tuple(float(torch.where(e == 0, 0.0, e / b).max()) for e, b in pairs)


def shares(lses: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp in float32, largest first."""
    lses = lses.masked_fill(lses.isinf(), -torch.inf)
    largest = lses.amax(0)
    shift = largest.masked_fill(largest.isinf(), 0.0)
    weights = (lses - shift).exp()
    total = weights.sum(0)
    return weights / total.where(total > 0, 1.0), shift + total.log()


@every_case
@every_dtype
def test_float32_arithmetic_is_within_the_bound(problem: MergeShardsProblem, dtype: str) -> None:
    outs, lses = draw(problem.replace(dtype=dtype))
    weights, lse = shares(lses)
    out = (weights[..., None] * outs.float().where(~lses.isinf()[..., None], 0.0)).sum(0).to(outs.dtype)
    assert max(ratios(out, lse, outs, lses, MergeArithmetic(output=dtype))) <= 1


@every_case
@every_dtype
def test_rounded_contributions_are_within_their_bound(problem: MergeShardsProblem, dtype: str) -> None:
    """As a sum over ranks in the outputs' dtype, with weights from the merged log-sum-exp."""
    outs, lses = draw(problem.replace(dtype=dtype))
    _, lse = shares(lses)
    out = torch.zeros_like(outs[0])
    for own, own_lse in zip(outs, lses, strict=True):
        weight = (own_lse - lse).exp().where(~own_lse.isinf(), 0.0)
        out += (own.float().where(~own_lse.isinf()[..., None], 0.0) * weight[..., None]).to(out.dtype)
    arithmetic = MergeArithmetic(output=dtype, contributions=dtype, log_weights=True)
    assert max(ratios(out, lse, outs, lses, arithmetic)) <= 1


@every_dtype
@pytest.mark.parametrize("shards", [2, 16])
def test_a_log_sum_exp_that_is_one_percent_off_is_beyond_the_bound(dtype: str, shards: int) -> None:
    """Which moves the weights by a percent at most."""
    outs, lses = draw(MANY.replace(dtype=dtype, shards=shards))
    wrong = lses.clone()
    wrong[0] += 0.01
    merged = merge_many(outs.double(), wrong.double())
    element, row, lse = ratios(merged.out.to(outs.dtype), merged.lse.float(), outs, lses, MergeArithmetic(output=dtype))
    assert max(element, row) > 1
    assert lse > 1


def test_merging_two_is_merging_many() -> None:
    """Two derivations of the oracle, one with sigmoids, agree to float64's rounding."""
    outs, lses = (tensor.double() for tensor in draw(MANY.replace(shards=2, empty="mixed", empty_lse="both")))
    many, two = merge_many(outs, lses), merge_states(outs[0], lses[0], outs[1], lses[1])
    torch.testing.assert_close(two.out, many.out, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(two.lse, many.lse, rtol=1e-14, atol=1e-14)
