"""Attention of many query tokens per request in MLA's expanded form; the oracle of the prefill kernels.

Dense and one request at a time: every score is computed, and a query's unseen keys are given weight 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class PrefillResult(NamedTuple):
    """out [queries, heads, v_head_dim] and natural-log lse [queries, heads]."""

    out: Tensor
    lse: Tensor


def visibility(queries: int, keys: int, *, causal: bool, device: torch.device | str = "cpu") -> Tensor:
    """Which keys each query sees, bool [queries, keys].

    The last query stands on the last key; with ``causal``, no query sees a key behind its own. So query j sees the keys
    0 to keys - queries + j, and none if that is negative.
    """
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return seen.tril(keys - queries) if causal else seen


def scores(q_nope: Tensor, q_pe: Tensor, k_nope: Tensor, k_pe: Tensor, softmax_scale: float) -> Tensor:
    """Scores of every query with every key, [heads, queries, keys]; arguments as :func:`prefill`."""
    nope = torch.einsum("qhd,khd->hqk", q_nope, k_nope)
    return softmax_scale * (nope + torch.einsum("qhd,kd->hqk", q_pe, k_pe))


def prefill(
    q_nope: Tensor, q_pe: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
) -> PrefillResult:
    """Attend each query of one request to the keys that it sees (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Args:
        q_nope: [queries, heads, qk_nope_head_dim], floating; computed in its dtype, so pass float64.
        q_pe: [queries, heads, qk_rope_head_dim].
        k_nope: [keys, heads, qk_nope_head_dim].
        k_pe: [keys, qk_rope_head_dim], one rotary key for all heads.
        v: [keys, heads, v_head_dim].
        softmax_scale: multiplies the scores.
        causal: see :func:`visibility`.

    Returns:
        out and lse; a query that sees no key has out 0 and lse -inf.

    """
    queries, heads, _ = q_nope.shape
    if queries == 0 or len(v) == 0:
        lse = q_nope.new_full((queries, heads), -math.inf)
        return PrefillResult(q_nope.new_zeros(queries, heads, v.shape[-1]), lse)
    seen = visibility(queries, len(v), causal=causal, device=v.device)
    masked = scores(q_nope, q_pe, k_nope, k_pe, softmax_scale).masked_fill(~seen, -math.inf)
    lse = masked.logsumexp(-1, keepdim=True)
    # Where a query sees nothing, -inf - -inf is NaN, which stands for weight 0.
    weights = (masked - lse).exp().masked_fill(~seen, 0.0)
    return PrefillResult(torch.einsum("hqk,khd->qhd", weights, v), lse.squeeze(-1).T)


def prefill_ragged(
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
) -> PrefillResult:
    """:func:`prefill` of every request of a ragged batch, with rows as ``cu_seqlens_q`` and ``cu_seqlens_k`` say."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    out = q_nope.new_zeros(len(q_nope), q_nope.shape[1], v.shape[-1])
    lse = q_nope.new_full(q_nope.shape[:2], -math.inf)
    for i in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        out[rows], lse[rows] = prefill(
            q_nope[rows], q_pe[rows], k_nope[keys], k_pe[keys], v[keys], softmax_scale=softmax_scale, causal=causal
        )
    return PrefillResult(out, lse)
