"""Split-KV decoding: partial attention states over slices of the cache, and their exact merge.

A state is (out, lse) with out [..., dim], lse [...] in natural log. A side is *empty* when its lse is -inf,
or +inf, which some libraries use for a row without keys (vllm-project/vllm#15492). An empty side has no say,
whatever its `out` holds, NaN included; two empty sides give out 0 and lse -inf (vllm-project/vllm#27491,
vllm-project/vllm#39148).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_conformance.reference.mla import DecodeResult, decode_absorbed


def split_bounds(seq_len: int, num_splits: int) -> list[tuple[int, int]]:
    """Cut [0, seq_len) into `num_splits` contiguous ranges (start, end) of ceil(seq_len / num_splits) tokens.

    The last ranges are shorter or empty (start == end) when it does not divide evenly.

    Raises:
        ValueError: if the length is negative or there is no split.

    """
    if seq_len < 0 or num_splits < 1:
        raise ValueError(f"seq_len is {seq_len} and num_splits {num_splits}; need at least 0 and 1")
    size = -(-seq_len // num_splits)
    return [(min(i * size, seq_len), min((i + 1) * size, seq_len)) for i in range(num_splits)]


def partial_states(
    q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, *, softmax_scale: float, num_splits: int
) -> DecodeResult:
    """Attend to each split on its own: out [num_splits, heads, kv_lora_rank], lse [num_splits, heads].

    Arguments and errors as `decode_absorbed` and `split_bounds`.
    """
    states = [
        decode_absorbed(q_nope, q_pe, ckv[start:end], kpe[start:end], softmax_scale=softmax_scale)
        for start, end in split_bounds(ckv.shape[0], num_splits)
    ]
    return DecodeResult(torch.stack([s.out for s in states]), torch.stack([s.lse for s in states]))


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> DecodeResult:
    """Merge two states into the state over the keys of both.

    Args:
        out_a: [..., dim], floating.
        lse_a: [...], natural log.
        out_b: as `out_a`.
        lse_b: as `lse_a`.

    Returns:
        out [..., dim] and lse [...]. If one side is empty, the other side bit for bit.

    Raises:
        ValueError: if the shapes disagree.

    """
    if not (out_a.shape == out_b.shape and out_a.shape[:-1] == lse_a.shape == lse_b.shape):
        shapes = [list(t.shape) for t in (out_a, lse_a, out_b, lse_b)]
        raise ValueError(f"out_a, lse_a, out_b, lse_b have shapes {shapes}; expected [..., dim], [...] twice")
    share_a, share_b = torch.sigmoid(lse_a - lse_b), torch.sigmoid(lse_b - lse_a)
    out = out_a * share_a[..., None] + out_b * share_b[..., None]
    lse = torch.logaddexp(lse_a, lse_b)
    # Rows with an empty side are picked, not weighted with 0, because 0 * NaN is NaN.
    a_empty, b_empty = torch.isinf(lse_a), torch.isinf(lse_b)
    for other_is_empty, own_out, own_lse in ((b_empty, out_a, lse_a), (a_empty, out_b, lse_b)):
        out = torch.where(other_is_empty[..., None], own_out, out)
        lse = torch.where(other_is_empty, own_lse, lse)
    neither = a_empty & b_empty
    return DecodeResult(out.masked_fill(neither[..., None], 0.0), lse.masked_fill(neither, -math.inf))


def merge_many(out: Tensor, lse: Tensor) -> DecodeResult:
    """Merge any number of states at once, not by repeated `merge_states`.

    Args:
        out: [states, ..., dim], floating; at least one state.
        lse: [states, ...], natural log.

    Returns:
        out [..., dim] and lse [...].

    Raises:
        ValueError: if the shapes disagree or there is no state.

    """
    if out.shape[:-1] != lse.shape or lse.dim() == 0 or lse.shape[0] == 0:
        raise ValueError(
            f"out has shape {list(out.shape)} and lse {list(lse.shape)}; expected [states, ..., dim] and "
            "[states, ...] with at least one state"
        )
    empty = torch.isinf(lse)
    lse = lse.masked_fill(empty, -math.inf)
    out = out.masked_fill(empty[..., None], 0.0)
    largest = lse.max(dim=0).values
    all_empty = torch.isinf(largest)
    weights = torch.exp(lse - largest.masked_fill(all_empty, 0.0))
    total = weights.sum(dim=0)
    merged = (weights[..., None] * out).sum(dim=0) / total.masked_fill(all_empty, 1.0)[..., None]
    return DecodeResult(merged, largest + torch.log(total))
