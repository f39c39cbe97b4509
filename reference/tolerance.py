"""How far from the float64 oracle a right implementation may be: derived from its declared arithmetic.

Nothing here looks at a kernel's output. An implementation declares what it rounds to which dtype
(:class:`Arithmetic`); :func:`decode_bound` turns that and the *inputs* into bounds, term by term:

``scores``      the float32 sum of D products behind a score: ``4 sqrt(D) u32`` times the sum of the products'
                magnitudes. Probabilistic rounding analysis (Higham and Mary, SIAM J. Sci. Comput. 41, 2019) gives
                sqrt(D) u for random errors; the factor 4 also covers tensor cores, which truncate once per 16
                products (D/16 steps of 2 u32; smaller than 4 sqrt(D) u32 for D up to 4096).
``exponent``    scaling, base change and exp of a score in float32: ``8 u32`` relative, plus ``4 u32 |score|``.
``products``    rounding of matrix operands below their own dtype (TF32 and its split forms), both factors.
``cache``       rounding of a dequantised cache value, in the score and in the value.
``probabilities``  rounding of each probability before the second product.
``accumulate``  float32 sums over the tokens: ``(n / 16 + 32) u32`` of the magnitudes, blocked by at least 16.
``output``      one rounding of the result.

Roundings of different tokens are independent, so the last-but-one group adds like random numbers: Hoeffding's
inequality bounds a sum of independent errors ``|e_t| <= u a_t`` by ``LAMBDA u sqrt(sum a_t^2)`` but for a chance of
``2 exp(-LAMBDA^2 / 2)`` an element. Where errors are *not* independent (equal keys round alike), say
``independent=False``, and they add by magnitude.

Two bounds are checked. ``out`` holds element by element. ``out_row`` holds the Euclidean norm of a whole row to
``ROW_MARGIN`` root-mean-square errors (an error uniform in [-u, u] has variance u^2/3); it sees small errors spread
over a row, such as one dropped token among thousands, that no bound on single elements can see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

LAMBDA = 6.5
"""Chance that a right element exceeds the Hoeffding part: 2 exp(-6.5^2/2) = 1.3e-9."""

ROW_MARGIN = 3.0
"""Root-mean-square errors that a row's norm may reach; over sqrt(3), the worst case of a single rounding."""

UNIT_ROUNDOFF = {
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "tf32": 2.0**-11,
    "tf32x3": 2.0**-21,
    "float32": 2.0**-24,
    "float64": 0.0,
}
"""Half the distance from 1 to the next larger number; ``tf32x3`` is the error of a value split into two TF32 parts."""

SMALLEST_ROUNDING = {"float16": 2.0**-25}
"""Largest absolute error of rounding a subnormal number, where the format has a range narrower than float32's."""


@dataclass(frozen=True)
class Arithmetic:
    """What an implementation declares about its roundings, by dtype name; ``float64`` means not rounded.

    Args:
        operands: what the operands of both matrix products are, or are rounded to inside the product.
        probabilities: what softmax probabilities are rounded to before the second product.
        output: dtype of the output.
        cache: what a *dequantised* cache value is rounded to.
        lse: dtype of the log-sum-exp.
        independent: False where roundings of different tokens are equal (equal keys).
    """

    operands: str
    probabilities: str
    output: str
    cache: str = "float64"
    lse: str = "float32"
    independent: bool = True


@dataclass(frozen=True)
class Bound:
    """Bounds of one request: ``out`` [heads, kv_lora_rank], ``out_row`` [heads], ``lse`` [heads], and their terms.

    ``terms`` maps each term's name to its largest share of ``out`` over the elements, for the audit record.
    """

    out: Tensor
    out_row: Tensor
    lse: Tensor
    terms: dict[str, float] = field(default_factory=dict)


def decode_bound(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    *,
    softmax_scale: float,
    arithmetic: Arithmetic,
) -> Bound:
    """Bound the error of an absorbed MLA decode of one request.

    Args:
        q_nope: float64 [heads, kv_lora_rank], absorbed.
        q_pe: float64 [heads, qk_rope_head_dim].
        ckv: float64 [tokens, kv_lora_rank], dequantised.
        kpe: float64 [tokens, qk_rope_head_dim], dequantised.
        softmax_scale: multiplies the scores.
        arithmetic: the declared roundings.
    """
    u32, u_p = UNIT_ROUNDOFF["float32"], UNIT_ROUNDOFF[arithmetic.probabilities]
    u_operand = UNIT_ROUNDOFF[arithmetic.operands] if arithmetic.operands.startswith("tf32") else 0.0
    u_cache, u_out = UNIT_ROUNDOFF[arithmetic.cache], UNIT_ROUNDOFF[arithmetic.output]
    heads, width = q_nope.shape
    tokens = len(ckv)
    if tokens == 0:
        zero = q_nope.new_zeros(heads)
        return Bound(q_nope.new_zeros(heads, width), zero, zero)

    query, key = torch.cat((q_nope, q_pe), -1), torch.cat((ckv, kpe), -1)
    scores = softmax_scale * query @ key.T
    magnitude = softmax_scale * query.abs() @ key.abs().T
    spread = softmax_scale * (query.square() @ key.T.square()).sqrt()
    lse = scores.logsumexp(-1, keepdim=True)
    p, values = (scores - lse).exp(), ckv.abs()
    out = p @ ckv

    # Errors of a score that act as one on its probability: relative size per (head, token).
    steady = {
        "scores": 4 * math.sqrt(query.shape[-1]) * u32 * magnitude,
        "exponent": 8 * u32 + 4 * u32 * scores.abs(),
    }
    # The normaliser carries the weighted mean of them, so each counts at most once more.
    linear = {name: (p * (e + (p * e).sum(-1, keepdim=True))) @ values for name, e in steady.items()}
    linear["accumulate"] = (tokens / 16 + 32) * u32 * (p @ values)
    smallest = SMALLEST_ROUNDING.get(arithmetic.probabilities, 0.0)
    linear["underflow"] = smallest * (scores.amax(-1, keepdim=True) - lse).exp() * values.sum(0)

    # Roundings of single numbers: amplitude per (head, token) or (head, token, element), given as sums of squares.
    rounded = {
        "probabilities": u_p * _root(p.square() @ ckv.square()),
        "cache": u_cache * _root(p.square() @ ckv.square()) + u_cache * _root((p * spread).square() @ ckv.square()),
        "products": u_operand * _root(p.square() @ ckv.square())
        + 2 * u_operand * _root((p * spread).square() @ ckv.square()),
    }
    certain = {
        "probabilities": u_p * (p @ values),
        "cache": u_cache * (p @ values) + u_cache * (2 * p * magnitude) @ values,
        "products": 2 * u_operand * (p @ values) + 2 * u_operand * (2 * p * magnitude) @ values,
    }
    single = {
        name: torch.minimum(LAMBDA * rounded[name], certain[name]) if arithmetic.independent else certain[name]
        for name in rounded
    }
    final = {"output": u_out * (out.abs() + sum(linear.values())) + SMALLEST_ROUNDING.get(arithmetic.output, 0.0)}

    terms = linear | single | final
    bound = torch.stack(list(terms.values())).sum(0)
    variance = torch.stack([a.square() for a in (*rounded.values(), u_out * out)]).sum(0).sum(-1) / 3
    steady_row = torch.stack(list(linear.values())).sum(0).norm(dim=-1)
    row = ROW_MARGIN * variance.sqrt() + steady_row + SMALLEST_ROUNDING.get(arithmetic.output, 0.0) * math.sqrt(width)
    if not arithmetic.independent:
        row = bound.norm(dim=-1)

    lse_error = (p * (steady["scores"] + steady["exponent"])).sum(-1) + (tokens / 16 + 32) * u32
    random_score = (u_cache + 2 * u_operand) * (p * spread).square().sum(-1).sqrt() * LAMBDA
    if not arithmetic.independent:
        random_score = (u_cache + 2 * u_operand) * (p * magnitude).sum(-1)
    lse = lse.squeeze(-1)
    lse_bound = lse_error + random_score + (4 * u32 + UNIT_ROUNDOFF[arithmetic.lse]) * lse.abs()
    shares = {
        name: float((term / bound.clamp_min(torch.finfo(bound.dtype).tiny)).max()) for name, term in terms.items()
    }
    return Bound(bound, row, lse_bound, shares)


def _root(square: Tensor) -> Tensor:
    return square.clamp_min(0).sqrt()
