"""The bound of a prefill holds for faithful arithmetic, and is small enough to see faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.prefill import PrefillResult, prefill, visibility
from mla_conformance.reference.prefill_tolerance import prefill_bound
from mla_conformance.reference.split_kv import merge_states
from mla_conformance.reference.tolerance import Arithmetic
from mla_conformance.suites.harness.prefill_cases import draw
from mla_conformance.suites.harness.problems import MLAPrefillProblem

DTYPES = ("bfloat16", "float16", "float32")
BASE = MLAPrefillProblem(query_lens=(40,), context_lens=(90,), heads=2)
TRUE_SIZES = BASE.replace(qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
THREE_PARTS = [slice(90, None), slice(0, 45), slice(45, 90)]
every_partition = pytest.mark.parametrize("parts", [[], THREE_PARTS], ids=["one pass", "three parts"])
every_case = pytest.mark.parametrize(
    "problem",
    [
        BASE,
        BASE.replace(causal=False),
        TRUE_SIZES,
        BASE.replace(context_lens=(-20,)),
        BASE.replace(values="large"),
        BASE.replace(values="one_hot"),
        BASE.replace(values="constant"),
    ],
    ids=str,
)


def inputs_of(problem: MLAPrefillProblem) -> Inputs:
    """The widened low-precision inputs of the only request."""
    (request,) = draw(problem)
    q, k_nope, k_pe, v = (tensor.double() for tensor in request)
    return q[..., : problem.qk_nope_head_dim], q[..., problem.qk_nope_head_dim :], k_nope, k_pe, v


def ratios(
    result: PrefillResult, inputs: Inputs, problem: MLAPrefillProblem, parts: Sequence[slice] = ()
) -> tuple[float, ...]:
    """Largest error over its bound: of an element, of a row and of a log-sum-exp."""
    arithmetic = Arithmetic(operands=problem.dtype, probabilities=problem.dtype, output=problem.dtype)
    asked = {"softmax_scale": problem.scale, "causal": problem.causal}
    expected = prefill(*inputs, **asked)  # type: ignore[arg-type]
    bound = prefill_bound(*inputs, **asked, arithmetic=arithmetic, parts=parts)  # type: ignore[arg-type]
    error = (result.out.double() - expected.out).abs()
    lse_error = torch.where(result.lse.double() == expected.lse, 0.0, (result.lse.double() - expected.lse).abs())
    pairs = ((error, bound.out), (error.norm(dim=-1), bound.out_row), (lse_error, bound.lse))
    return tuple(float(torch.where(e == 0, 0.0, e / b).max()) for e, b in pairs)


def faithful(inputs: Inputs, problem: MLAPrefillProblem, *, causal: bool) -> PrefillResult:
    """The declared algorithm: float32 scores and sums, rounded probabilities, rounded output."""
    q_nope, q_pe, k_nope, k_pe, v = (tensor.float() for tensor in inputs)
    scores = torch.einsum("qhd,khd->hqk", q_nope, k_nope) + torch.einsum("qhd,kd->hqk", q_pe, k_pe)
    seen = visibility(len(q_nope), len(v), causal=causal)
    scores = (scores * problem.scale).masked_fill(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top.isinf(), 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    dtype = getattr(torch, problem.dtype)
    summed = torch.einsum("hqk,khd->qhd", weights.to(dtype).float(), v)
    divisor = total.where(total > 0, 1.0).squeeze(-1).T[..., None]
    return PrefillResult((summed / divisor).to(dtype), (top + total.log()).squeeze(-1).T)


@every_case
@every_dtype
def test_faithful_arithmetic_is_within_the_bound(problem: MLAPrefillProblem, dtype: str) -> None:
    for seed in range(5):
        problem = problem.replace(dtype=dtype, seed=seed)
        inputs = inputs_of(problem)
        assert max(ratios(faithful(inputs, problem, causal=problem.causal), inputs, problem)) <= 1


@every_dtype
@pytest.mark.parametrize("cut", [30, 60])
def test_merged_parts_are_within_their_bound(dtype: str, cut: int) -> None:
    """Context and new tokens apart, each rounded to the output's dtype, merged in float32 and rounded again."""
    for seed in range(5):
        problem = BASE.replace(dtype=dtype, seed=seed)
        inputs = inputs_of(problem)
        context = faithful((*inputs[:2], *(t[:cut] for t in inputs[2:])), problem, causal=False)
        rest = faithful((*inputs[:2], *(t[cut:] for t in inputs[2:])), problem, causal=True)
        merged = merge_states(rest.out.float(), rest.lse, context.out.float(), context.lse)
        result = PrefillResult(merged.out.to(rest.out.dtype), merged.lse)
        assert max(ratios(result, inputs, problem, [slice(cut, None), slice(0, cut)])) <= 1


def zeros(inputs: Inputs, problem: MLAPrefillProblem) -> PrefillResult:
    """Nothing computed."""
    expected = exact(inputs, problem)
    return PrefillResult(torch.zeros_like(expected.out), torch.zeros_like(expected.lse))


def shuffled_heads(inputs: Inputs, problem: MLAPrefillProblem) -> PrefillResult:
    """Each head's result at its neighbour."""
    return PrefillResult(*(tensor.roll(1, 1) for tensor in exact(inputs, problem)))


def shifted_page(inputs: Inputs, problem: MLAPrefillProblem) -> PrefillResult:
    """The first 16 keys are those of the next 16."""
    shifted = (torch.cat((tensor[16:32], tensor[16:])) for tensor in inputs[2:])
    return exact((*inputs[:2], *shifted), problem)  # type: ignore[arg-type]


def rope_left_out(inputs: Inputs, problem: MLAPrefillProblem) -> PrefillResult:
    """Scores from the part that is not rotated only."""
    return exact((inputs[0], 0 * inputs[1], *inputs[2:]), problem)


def exact(inputs: Inputs, problem: MLAPrefillProblem) -> PrefillResult:
    """The oracle."""
    return prefill(*inputs, softmax_scale=problem.scale, causal=problem.causal)


@every_dtype
@pytest.mark.parametrize("problem", [BASE, TRUE_SIZES, BASE.replace(causal=False)], ids=str)
@pytest.mark.parametrize("fault", [zeros, shuffled_heads, shifted_page, rope_left_out])
@every_partition
def test_a_fault_is_beyond_the_bound(
    fault: Callable[..., PrefillResult], problem: MLAPrefillProblem, dtype: str, parts: list[slice]
) -> None:
    """Also under the bound of three merged parts, which is wider."""
    problem = problem.replace(dtype=dtype)
    inputs = inputs_of(problem)
    element, row, lse = ratios(fault(inputs, problem), inputs, problem, parts)
    assert max(element, row) > 1
    assert lse > 1


@every_dtype
@every_partition
@pytest.mark.parametrize("problem", [BASE, TRUE_SIZES, BASE.replace(causal=False)], ids=str)
def test_an_output_that_is_a_little_too_large_is_beyond_the_bound(
    problem: MLAPrefillProblem, dtype: str, parts: list[slice]
) -> None:
    """By 1 %; by 1.5 % where bfloat16 rounds three parts, a merge of two and the whole."""
    problem = problem.replace(dtype=dtype)
    inputs = inputs_of(problem)
    expected = exact(inputs, problem)
    share = 0.015 if parts and dtype == "bfloat16" else 0.01
    result = PrefillResult(expected.out * (1 + share), expected.lse)
    element, row, _ = ratios(result, inputs, problem, parts)
    assert max(element, row) > 1
