"""How far from the float64 oracle a right merge of attention states may be, from its declared arithmetic.

A merge of N states weighs each output with the exp of its log-sum-exp, less the largest, over the sum of these. With
d the difference to the largest, w the weights (they sum to 1), and u the unit roundoff of a dtype:

``weights``        a difference, its exp and the division in float32: ``8 u32``, plus ``4 u32 |d|`` for rounding d and
                   changing its base. The sum carries the weighted mean of them, so each counts at most once more.
``log_weights``    where a weight is the exp of the difference to the merged log-sum-exp, and not to the largest over
                   the sum, the rounding and the error of that log-sum-exp (below) come on top.
``accumulate``     the N products and their sum in float32: ``N u32`` of the magnitudes, and as much for the sum of
                   weights.
``underflow``      a weight below the smallest normal float32 may become zero.
``contributions``  where each weighted output is rounded before they are added, and each sum as well: ``N u`` of the
                   magnitudes, and half the smallest subnormal number for each.
``output``         one rounding of the result.

Roundings to the output's dtype are independent from element to element; over a row they add like random numbers (see
:mod:`mla_conformance.reference.tolerance`), and the bound of a row's norm follows.

The merged log-sum-exp is the largest plus the log of a sum from 1 to N: that sum is off by its weights' errors and
``N u32``, its log by ``4 u32`` more (CUDA C++ Programming Guide, lg2.approx has an absolute error of 2**-22), and the
result is rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.split_kv import merge_many
from mla_conformance.reference.tolerance import ROW_MARGIN, SMALLEST_ROUNDING, UNIT_ROUNDOFF, Bound

SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class MergeArithmetic:
    """What an implementation declares about its roundings, by dtype name; ``float64`` means not rounded.

    Args:
        output: dtype of the result.
        contributions: what each weighted output, and each partial sum of them, is rounded to before the result.
        weights: dtype in which weights and sums of them are computed.
        log_weights: whether a weight is the exp of its log-sum-exp less the merged one.
    """

    output: str
    contributions: str = "float64"
    weights: str = "float32"
    log_weights: bool = False


def merge_bound(outs: Tensor, lses: Tensor, arithmetic: MergeArithmetic) -> Bound:
    """Bound the error of a merge of all states at once.

    Args:
        outs: float64 [states, tokens, heads, width]; anything where empty.
        lses: float64 [states, tokens, heads], natural log; -inf or +inf is empty.
        arithmetic: the declared roundings.

    Returns:
        ``out`` [tokens, heads, width], ``out_row`` and ``lse`` [tokens, heads]; 0 where all states are empty.
    """
    u_w, u_out = UNIT_ROUNDOFF[arithmetic.weights], UNIT_ROUNDOFF[arithmetic.output]
    u_part = UNIT_ROUNDOFF[arithmetic.contributions]
    states, width = len(outs), outs.shape[-1]
    empty = lses.isinf()
    merged = merge_many(outs, lses)
    alive = ~empty.all(0)
    magnitudes = outs.abs().masked_fill(empty[..., None], 0.0)
    lse = merged.lse.masked_fill(~alive, 0.0)
    largest = lses.masked_fill(empty, -math.inf).amax(0).masked_fill(~alive, 0.0)
    weights = (lses - lse).exp().masked_fill(empty, 0.0)
    # One state alone has weight 1 and is multiplied by it, with no error at all.
    several = ((~empty).sum(0) > 1).double()

    error = (8 * u_w + 4 * u_w * (lses - largest).abs()).masked_fill(empty, 0.0)
    mean_error = (weights * error).sum(0)
    total = (weights[..., None] * magnitudes).sum(0)
    lse_bound = mean_error + (2 * states + 4) * u_w + UNIT_ROUNDOFF["float32"] * lse.abs()
    linear = {
        "weights": ((weights * (error + mean_error))[..., None] * magnitudes).sum(0),
        "log_weights": (lse_bound + u_w * lse.abs())[..., None] * total * arithmetic.log_weights,
        "accumulate": 2 * states * u_w * total,
        "underflow": (SMALLEST_NORMAL if u_w else 0.0) * magnitudes.sum(0),
    }
    linear = {name: term * several[..., None] for name, term in linear.items()}
    smallest_part = states * SMALLEST_ROUNDING.get(arithmetic.contributions, 0.0)
    smallest_out = SMALLEST_ROUNDING.get(arithmetic.output, 0.0)
    parts = (states * u_part * total + smallest_part) * several[..., None]
    final = (u_out * (merged.out.abs() + sum(linear.values())) + smallest_out) * several[..., None]
    terms = linear | {"contributions": parts, "output": final}
    bound = torch.stack(list(terms.values())).sum(0)

    # States roundings of products, of at most `total` together, and as many of sums, each of at most `total`.
    variance = (states * (u_part * total).square() + (u_out * merged.out).square()).sum(-1) / 3
    steady = torch.stack(list(linear.values())).sum(0).norm(dim=-1) + (smallest_part + smallest_out) * math.sqrt(width)
    row = (ROW_MARGIN * variance.sqrt() + steady) * several
    shares = {
        name: float((term / bound.clamp_min(torch.finfo(bound.dtype).tiny)).max()) if term.numel() else 0.0
        for name, term in terms.items()
    }
    return Bound(bound, row, lse_bound * several, shares)
