"""The derived bounds pass a faithful low-precision computation and fail every fault that they must see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.mla import DecodeResult, decode_absorbed
from mla_conformance.reference.tolerance import Arithmetic, decode_bound
from mla_conformance.suites.harness.cases import build
from mla_conformance.suites.harness.outcomes import widened
from mla_conformance.suites.harness.problems import MLADecodeProblem

ROUNDED = {
    "float16": Arithmetic(operands="float16", probabilities="float16", output="float16"),
    "bfloat16": Arithmetic(operands="bfloat16", probabilities="bfloat16", output="bfloat16"),
    "float32": Arithmetic(operands="float32", probabilities="float32", output="float32"),
    "float32-tf32x3": Arithmetic(operands="tf32x3", probabilities="float32", output="float32"),
    "bfloat16-fp8-rounded": Arithmetic("bfloat16", "bfloat16", "bfloat16", cache="bfloat16", lse="bfloat16"),
    "float16-fp8-rounded": Arithmetic("float16", "float16", "float16", cache="float16", lse="float16"),
}
"""Every kind of declaration in use by the adapters."""
SIZES = {
    "short": MLADecodeProblem(lengths=(40,), heads=8),
    "true-sizes": MLADecodeProblem(lengths=(300,), heads=8, kv_lora_rank=512, qk_rope_head_dim=64, page_size=64),
    "long": MLADecodeProblem(lengths=(4096,), heads=4, kv_lora_rank=512, qk_rope_head_dim=64, page_size=64),
}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs_of(problem: MLADecodeProblem, arithmetic: Arithmetic) -> Inputs:
    """The widened low-precision inputs of the only request."""
    return widened(build(problem.replace(dtype=arithmetic.output, cache_dtype=arithmetic.output)), 0)


def violated(result: DecodeResult, inputs: Inputs, scale: float, arithmetic: Arithmetic) -> set[str]:
    """Which bounds ``result`` breaks."""
    oracle = decode_absorbed(*inputs, softmax_scale=scale)
    bound = decode_bound(*inputs, softmax_scale=scale, arithmetic=arithmetic)
    error = (result.out.double() - oracle.out).abs()
    checks = {
        "out": (error <= bound.out).all(),
        "out row norm": (error.norm(dim=-1) <= bound.out_row).all(),
        "lse": ((result.lse.double() - oracle.lse).abs() <= bound.lse).all(),
    }
    return {name for name, holds in checks.items() if not holds}


def low_precision(inputs: Inputs, scale: float, arithmetic: Arithmetic) -> DecodeResult:
    """The declared algorithm in PyTorch: float32 sums, rounded probabilities, rounded cache, rounded output."""
    q_nope, q_pe, ckv, kpe = (t.float() for t in inputs)
    if arithmetic.cache != "float64":
        ckv, kpe = (t.to(getattr(torch, arithmetic.cache)).float() for t in (ckv, kpe))
    scores = (q_nope @ ckv.T + q_pe @ kpe.T) * scale
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    rounded = weights.to(getattr(torch, arithmetic.probabilities)).float()
    out = (rounded @ ckv / total).to(getattr(torch, arithmetic.output))
    lse = (top + total.log()).squeeze(-1).to(getattr(torch, arithmetic.lse))
    return DecodeResult(out, lse)


@pytest.mark.parametrize("declared", ROUNDED)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [0.25, 1.0, 3.0])
def test_a_faithful_computation_passes(size: str, declared: str, scale: float) -> None:
    """The declared algorithm, run in PyTorch at its own precision, breaks no bound in ten draws."""
    arithmetic = ROUNDED[declared]
    for seed in range(10 if size != "long" else 2):
        problem = SIZES[size].replace(seed=seed)
        factor = scale * problem.scale
        inputs = inputs_of(problem, arithmetic)
        assert violated(low_precision(inputs, factor, arithmetic), inputs, factor, arithmetic) == set()


def zeros(result: DecodeResult, inputs: Inputs, scale: float) -> DecodeResult:
    """Nothing computed."""
    return DecodeResult(torch.zeros_like(result.out), torch.zeros_like(result.lse))


def shuffled_heads(result: DecodeResult, inputs: Inputs, scale: float) -> DecodeResult:
    """Each head's result at its neighbour."""
    return DecodeResult(result.out.roll(1, 0), result.lse.roll(1, 0))


def one_page_shift(result: DecodeResult, inputs: Inputs, scale: float) -> DecodeResult:
    """The first 16 tokens replaced by 16 others."""
    q_nope, q_pe, ckv, kpe = inputs
    keys = [torch.cat((t[16:32], t[16:])) for t in (ckv, kpe)]
    return decode_absorbed(q_nope, q_pe, *keys, softmax_scale=scale)


def scale_one_percent_off(result: DecodeResult, inputs: Inputs, scale: float) -> DecodeResult:
    """Every score 1 % too large."""
    return decode_absorbed(*inputs, softmax_scale=scale * 1.01)


def dropped_token(result: DecodeResult, inputs: Inputs, scale: float) -> DecodeResult:
    """The last token left out."""
    q_nope, q_pe, ckv, kpe = inputs
    return decode_absorbed(q_nope, q_pe, ckv[:-1], kpe[:-1], softmax_scale=scale)


def rope_left_out(result: DecodeResult, inputs: Inputs, scale: float) -> DecodeResult:
    """Scores from the latent part only."""
    q_nope, q_pe, ckv, kpe = inputs
    return decode_absorbed(q_nope, 0 * q_pe, ckv, kpe, softmax_scale=scale)


def base_two(result: DecodeResult, inputs: Inputs, scale: float) -> DecodeResult:
    """The lse as a base-2 logarithm."""
    return DecodeResult(result.out, result.lse / torch.log(torch.tensor(2.0)))


EVERY_SIZE = tuple(SIZES)
FAULTS = {
    zeros: (2.0, EVERY_SIZE),
    shuffled_heads: (2.0, EVERY_SIZE),
    one_page_shift: (2.0, EVERY_SIZE),
    scale_one_percent_off: (3.0, ("true-sizes", "long")),
    dropped_token: (0.25, EVERY_SIZE),
    rope_left_out: (2.0, EVERY_SIZE),
    base_two: (2.0, EVERY_SIZE),
}
"""Each fault, the spread of scores at which it is looked for, and the sizes at which every declaration shows it.

A wrong scale shows in wide scores, a lost token in flat ones. Under the widest declaration (bfloat16 throughout, cache
and lse included), 40 tokens are too few to tell a scale that is 1 % off from rounding.
"""


@pytest.mark.parametrize("declared", ROUNDED)
@pytest.mark.parametrize(("fault", "size"), [(fault, size) for fault, (_, sizes) in FAULTS.items() for size in sizes])
def test_a_fault_breaks_a_bound(fault: Callable[..., DecodeResult], size: str, declared: str) -> None:
    """On top of an otherwise exact result, whatever the declared arithmetic and the size."""
    arithmetic = ROUNDED[declared]
    problem = SIZES[size].replace(heads=32)
    scale = FAULTS[fault][0] * problem.scale
    inputs = inputs_of(problem, arithmetic)
    exact = decode_absorbed(*inputs, softmax_scale=scale)
    assert violated(exact, inputs, scale, arithmetic) == set()
    assert violated(fault(exact, inputs, scale), inputs, scale, arithmetic) != set()


@pytest.mark.parametrize("declared", ["float16", "bfloat16", "float32"])
def test_the_output_bound_alone_sees_a_small_error_of_the_scale(declared: str) -> None:
    """Not only the lse does: scores of standard deviation 2, one percent off, move the rows out of their norm."""
    arithmetic, problem = ROUNDED[declared], SIZES["true-sizes"]
    inputs = inputs_of(problem, arithmetic)
    wrong = decode_absorbed(*inputs, softmax_scale=2 * problem.scale * 1.01)
    assert {"out", "out row norm"} & violated(wrong, inputs, 2 * problem.scale, arithmetic)


def test_the_bound_does_not_look_at_the_result() -> None:
    """It is a function of the inputs and the declaration; its terms are recorded and add up to it."""
    inputs = inputs_of(SIZES["short"], ROUNDED["bfloat16"])
    bound = decode_bound(*inputs, softmax_scale=0.1, arithmetic=ROUNDED["bfloat16"])
    assert set(bound.terms) >= {"scores", "exponent", "accumulate", "probabilities", "cache", "output"}
    assert all(0 <= share <= 1 for share in bound.terms.values())
    assert bound.terms["probabilities"] + bound.terms["output"] > 0.9


def test_an_empty_request_allows_nothing_but_zero() -> None:
    """No token, no rounding."""
    inputs = (
        torch.randn(4, 8).double(),
        torch.randn(4, 2).double(),
        torch.empty(0, 8).double(),
        torch.empty(0, 2).double(),
    )
    bound = decode_bound(*inputs, softmax_scale=1.0, arithmetic=ROUNDED["float16"])
    assert not bound.out.any()
    assert not bound.lse.any()
