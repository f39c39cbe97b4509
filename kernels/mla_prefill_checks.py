"""What ``mla_prefill`` refuses, and the sizes of what it accepts. No content is read, so no GPU is waited for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mla_conformance.kernels.argument_checks import (
    check_dtype,
    check_last_stride,
    check_no_overlap,
    check_rank,
    check_scale,
    check_shape,
    check_size,
    check_tensor,
)
from mla_conformance.kernels.launch import MAX_GRID_YZ

VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Token positions are 32-bit in the kernel, with room to add a tile.
MAX_TOKENS = 2**30


class MlaPrefillShape(NamedTuple):
    """Sizes of an accepted call: counts, and the three dims of a head in elements."""

    batch: int
    queries: int
    keys: int
    heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


def check_mla_prefill(
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool,
    max_seqlen_q: int,
    out: Tensor | None,
    lse: Tensor | None,
) -> MlaPrefillShape:
    """Check the arguments of ``mla_prefill``; see there for what each must be.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: An argument has a wrong shape, stride, device or value.
    """
    tensors = {"q_nope": q_nope, "q_pe": q_pe, "k_nope": k_nope, "k_pe": k_pe, "v": v}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    tensors |= {name: tensor for name, tensor in {"out": out, "lse": lse}.items() if tensor is not None}
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    for name, tensor in tensors.items():
        if tensor.device != q_nope.device:
            raise ValueError(f"{name} is on {tensor.device}, q_nope on {q_nope.device}; move them to one device")

    check_dtype("q_nope", q_nope, VALUE_DTYPES)
    for name in ("q_pe", "k_nope", "k_pe", "v"):
        check_dtype(name, tensors[name], (q_nope.dtype,))
    check_rank("q_nope", q_nope, "[queries, heads, qk_nope_head_dim]")
    queries, heads, nope_dim = q_nope.shape
    check_size("q_nope", "queries", queries, 0, MAX_TOKENS)
    check_size("q_nope", "heads", heads, 1, 128)
    check_size("q_nope", "qk_nope_head_dim", nope_dim, 16, 256, multiple=16)
    check_rank("q_pe", q_pe, "[queries, heads, qk_rope_head_dim]")
    rope_dim = q_pe.shape[2]
    check_size("q_pe", "qk_rope_head_dim", rope_dim, 0, 64, multiple=16)
    check_shape("q_pe", q_pe, (queries, heads, rope_dim))
    check_rank("k_nope", k_nope, "[keys, heads, qk_nope_head_dim]")
    keys = k_nope.shape[0]
    check_size("k_nope", "keys", keys, 0, MAX_TOKENS)
    check_shape("k_nope", k_nope, (keys, heads, nope_dim))
    check_rank("k_pe", k_pe, "[keys, qk_rope_head_dim]")
    check_shape("k_pe", k_pe, (keys, rope_dim))
    check_rank("v", v, "[keys, heads, v_head_dim]")
    v_dim = v.shape[2]
    check_size("v", "v_head_dim", v_dim, 16, 256, multiple=16)
    check_shape("v", v, (keys, heads, v_dim))

    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        check_dtype(name, tensors[name], (torch.int32,))
        check_rank(name, tensors[name], "[batch + 1]")
        check_size(name, "entries", tensors[name].shape[0], 1, MAX_GRID_YZ + 1)
    batch = cu_seqlens_q.shape[0] - 1
    check_shape("cu_seqlens_k", cu_seqlens_k, (batch + 1,))
    if out is not None:
        check_dtype("out", out, (q_nope.dtype, torch.float32))
        check_shape("out", out, (queries, heads, v_dim))
        check_no_overlap("out", out)
    if lse is not None:
        check_dtype("lse", lse, (torch.float32,))
        check_shape("lse", lse, (queries, heads))
        check_no_overlap("lse", lse)
    for name in tensors:
        if name != "lse":
            check_last_stride(name, tensors[name])

    check_scale("softmax_scale", softmax_scale)
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}; pass True or False")
    if isinstance(max_seqlen_q, bool) or not isinstance(max_seqlen_q, int):
        raise TypeError(f"max_seqlen_q is {max_seqlen_q!r}; pass an int")
    if max_seqlen_q < 0:
        raise ValueError(f"max_seqlen_q is {max_seqlen_q}; pass the longest request's queries, 0 or more")
    return MlaPrefillShape(batch, queries, keys, heads, nope_dim, rope_dim, v_dim)
