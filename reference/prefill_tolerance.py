"""How far from the float64 oracle a right prefill in MLA's expanded form may be, from its declared arithmetic.

The derivation is that of :mod:`mla_conformance.reference.tolerance`, for keys and values that differ and for queries
that see different numbers of keys. Term by term, with n the keys that a query sees and D the width of a score:

``scores``         the float32 sum of D products behind a score: ``4 sqrt(D) u32`` of the products' magnitudes.
``exponent``       scaling, base change and exp of a score in float32: ``8 u32``, plus ``4 u32 |score|``.
``accumulate``     float32 sums over the keys: ``(n / 16 + 32) u32`` of the magnitudes, blocked by at least 16.
``underflow``      a probability below the normal numbers of its dtype, relative to the largest seen so far.
``merges``         a merge of attention states weighs each with the exp of a difference of log-sum-exps, which are
                   stored in ``arithmetic.lse`` and as large as they are: per merge ``8 u32`` and twice the rounding of
                   both, of the magnitudes.
``probabilities``  rounding of each probability before the second product.
``products``       rounding of matrix operands below their own dtype (TF32 and its split forms), all three factors.
``states``         every state but the last merge's result is stored in the output's dtype: that of each part, and that
                   of each merge but the last. Such a rounding costs u of the state, times the weight that its keys have
                   in the whole.
``output``         one rounding of the result.

The last but one group are roundings of single numbers, independent of each other, and add as random numbers do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mla_conformance.reference.prefill import scores as all_scores
from mla_conformance.reference.prefill import visibility
from mla_conformance.reference.tolerance import (
    LAMBDA,
    ROW_MARGIN,
    SMALLEST_ROUNDING,
    UNIT_ROUNDOFF,
    Arithmetic,
    Bound,
)


def prefill_bound(
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    arithmetic: Arithmetic,
    parts: Sequence[slice] = (),
) -> Bound:
    """Bound the error of the prefill of one request.

    Args:
        q_nope: float64 [queries, heads, qk_nope_head_dim].
        q_pe: float64 [queries, heads, qk_rope_head_dim].
        k_nope: float64 [keys, heads, qk_nope_head_dim].
        k_pe: float64 [keys, qk_rope_head_dim].
        v: float64 [keys, heads, v_head_dim].
        softmax_scale: multiplies the scores.
        causal: whether a query sees no key behind its own.
        arithmetic: the declared roundings.
        parts: keys that were attended apart, in the order in which the results were merged; none means one pass.

    Returns:
        ``out`` [queries, heads, v_head_dim], ``out_row`` and ``lse`` [queries, heads]; 0 for a query without keys.
    """
    queries, heads, _ = q_nope.shape
    keys, _, width = v.shape
    if queries == 0 or keys == 0:
        zero = q_nope.new_zeros(queries, heads)
        return Bound(q_nope.new_zeros(queries, heads, width), zero, zero)
    u32, u_out = UNIT_ROUNDOFF["float32"], UNIT_ROUNDOFF[arithmetic.output]
    u_lse, u_p = UNIT_ROUNDOFF[arithmetic.lse], UNIT_ROUNDOFF[arithmetic.probabilities]
    u_operand = UNIT_ROUNDOFF[arithmetic.operands] if arithmetic.operands.startswith("tf32") else 0.0
    merges = max(len(parts) - 1, 0)

    seen = visibility(queries, keys, causal=causal, device=v.device)
    count = seen.sum(-1)[:, None].double()  # [queries, 1]
    scores = all_scores(q_nope, q_pe, k_nope, k_pe, softmax_scale).masked_fill(~seen, -math.inf)
    magnitude = all_scores(q_nope.abs(), q_pe.abs(), k_nope.abs(), k_pe.abs(), softmax_scale)
    squares = all_scores(q_nope.square(), q_pe.square(), k_nope.square(), k_pe.square(), 1.0)
    spread = softmax_scale * squares.sqrt()
    log_sum = scores.logsumexp(-1, keepdim=True)
    p = (scores - log_sum).exp().masked_fill(~seen, 0.0)
    lse = log_sum.squeeze(-1).T.masked_fill(count == 0, 0.0)
    values = v.abs()

    def weighted(weights: Tensor, of: Tensor) -> Tensor:
        """[heads, queries, keys] times [keys, heads, v_head_dim]: [queries, heads, v_head_dim]."""
        return torch.einsum("hqk,khd->qhd", weights, of)

    out, total = weighted(p, v).abs(), weighted(p, values)
    # Errors of a score that act as one on its probability: relative size per (head, query, key).
    depth = q_nope.shape[-1] + q_pe.shape[-1]
    steady = {
        "scores": 4 * math.sqrt(depth) * u32 * magnitude,
        "exponent": 8 * u32 + 4 * u32 * scores.abs().masked_fill(~seen, 0.0),
    }
    # The normaliser carries the weighted mean of them, so each counts at most once more.
    linear = {name: weighted(p * (e + (p * e).sum(-1, keepdim=True)), values) for name, e in steady.items()}
    linear["accumulate"] = ((count / 16 + 32) * u32)[..., None] * total
    smallest = SMALLEST_ROUNDING.get(arithmetic.probabilities, 0.0)
    largest = (scores.amax(-1) - log_sum.squeeze(-1)).exp().T.masked_fill(count == 0, 0.0)
    linear["underflow"] = smallest * largest[..., None] * torch.einsum("qk,khd->qhd", seen.double(), values)
    largest_lse = torch.maximum(lse.abs(), scores.abs().masked_fill(~seen, 0.0).amax(-1).T + count.clamp_min(1).log())
    linear["merges"] = merges * ((8 * u32 + 4 * (u_lse + u32) * largest_lse)[..., None] * total)

    # What each stored state adds to the whole: the parts', then the sums of them that a merge but the last leaves.
    stored = out.new_zeros(0, *out.shape)
    if merges:
        each = torch.stack([weighted(p[..., part], v[part]) for part in parts])
        stored = torch.cat((each, each.cumsum(0)[1:-1]))

    # Roundings of single numbers: amplitude per element, given as sums of squares.
    root = weighted(p.square(), v.square()).clamp_min(0).sqrt()
    spread_root = weighted((p * spread).square(), v.square()).clamp_min(0).sqrt()
    rounded = {
        "probabilities": u_p * root,
        "products": u_operand * root + 2 * u_operand * spread_root,
        "states": u_out * stored.square().sum(0).sqrt(),
    }
    certain = {
        "probabilities": u_p * total,
        "products": 2 * u_operand * total + 2 * u_operand * weighted(2 * p * magnitude, values),
        "states": u_out * stored.abs().sum(0),
    }
    single = {
        name: torch.minimum(LAMBDA * rounded[name], certain[name]) if arithmetic.independent else certain[name]
        for name in rounded
    }
    smallest_out = SMALLEST_ROUNDING.get(arithmetic.output, 0.0)
    has_keys = (count > 0)[..., None].double()
    final = {"output": (u_out * (out + sum(linear.values())) + (1 + len(stored)) * smallest_out) * has_keys}

    terms = linear | single | final
    bound = torch.stack(list(terms.values())).sum(0)
    variance = torch.stack([a.square() for a in (*rounded.values(), u_out * out)]).sum(0).sum(-1) / 3
    steady_row = torch.stack(list(linear.values())).sum(0).norm(dim=-1)
    row = ROW_MARGIN * variance.sqrt() + steady_row
    row = row + (1 + len(stored)) * smallest_out * math.sqrt(width) * has_keys.squeeze(-1)
    if not arithmetic.independent:
        row = bound.norm(dim=-1)

    lse_error = (p * (steady["scores"] + steady["exponent"])).sum(-1).T + (count / 16 + 32) * u32
    random_score = 2 * u_operand * (p * spread).square().sum(-1).sqrt().T * LAMBDA
    if not arithmetic.independent:
        random_score = 2 * u_operand * (p * magnitude).sum(-1).T
    stored = (4 * u32 + u_lse) * lse.abs() + merges * (8 * u32 + 2 * (u_lse + u32) * largest_lse)
    lse_bound = (lse_error + random_score + stored) * has_keys.squeeze(-1)
    shares = {
        name: float((term / bound.clamp_min(torch.finfo(bound.dtype).tiny)).max()) for name, term in terms.items()
    }
    return Bound(bound, row, lse_bound, shares)
