"""MLA prefill in the expanded form: ragged attention of new tokens, with keys and values for each head."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from mla_conformance.kernels import launch
from mla_conformance.kernels.launch import SM90, SM100, SM120, Family
from mla_conformance.kernels.mla_prefill_checks import MlaPrefillShape, check_mla_prefill
from mla_conformance.kernels.mla_prefill_triton import mla_prefill_kernel


class PrefillConfig(NamedTuple):
    """Launch configuration of the prefill kernel.

    Attributes:
        block_m: Queries a program takes.
        block_n: Keys a program reads per step.
        num_warps: Warps a program runs on.
        num_stages: Software-pipeline depth of the loops over keys.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By family and by what is multiplied: "narrow" (16-bit, scores of at most 192 columns and values of at most 128),
# "wide" (16-bit, wider heads), "fp32". Every row must compile without spilled registers, inside the shared memory of
# its family, for every shape that ``mla_prefill`` accepts.
PREFILL_CONFIGS: dict[tuple[Family, str], PrefillConfig] = {
    (SM120, "narrow"): PrefillConfig(64, 64, 8, 2),
    (SM120, "wide"): PrefillConfig(64, 32, 8, 2),
    (SM120, "fp32"): PrefillConfig(16, 16, 8, 1),
    (SM100, "narrow"): PrefillConfig(128, 64, 8, 3),
    (SM100, "wide"): PrefillConfig(64, 64, 8, 2),
    (SM100, "fp32"): PrefillConfig(16, 16, 8, 1),
    (SM90, "narrow"): PrefillConfig(128, 64, 8, 3),
    (SM90, "wide"): PrefillConfig(64, 64, 8, 2),
    (SM90, "fp32"): PrefillConfig(16, 16, 8, 1),
}

MAX_LOW = 128
"""Most of the columns of a query or key that are multiplied at once; more take registers that there are not."""


def mla_prefill(
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    max_seqlen_q: int,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multi-head Latent Attention of many query tokens per request, in the expanded form, over ragged batches.

    Request b has the n queries from row ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` and the m keys from row
    ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``. For its query j, head h and the keys t that j sees
    (DeepSeek-V2, arXiv:2405.04434, section 2.1)::

        score[t] = softmax_scale * (q_nope[j, h] . k_nope[t, h] + q_pe[j, h] . k_pe[t])
        out[j, h] = sum_t softmax(score)[t] * v[t, h],    lse[j, h] = log(sum_t exp(score[t]))

    With ``causal``, query j sees the keys 0 to m - n + j: the last query sees the last key, and the first m - n keys
    are context that was there before. Without it every query sees all m keys, as a chunk of context needs.

    Args:
        q_nope: [queries, heads, qk_nope_head_dim], bfloat16, float16 or float32; heads 1 to 128; qk_nope_head_dim 16 to
            256, a multiple of 16. Last stride 1, others free, as for every tensor below.
        q_pe: [queries, heads, qk_rope_head_dim] in q_nope's dtype; qk_rope_head_dim 0 to 64, a multiple of 16.
        k_nope: [keys, heads, qk_nope_head_dim] in q_nope's dtype. k_nope and v may be two halves of one tensor.
        k_pe: [keys, qk_rope_head_dim] in q_nope's dtype: one rotary key for all heads.
        v: [keys, heads, v_head_dim] in q_nope's dtype; v_head_dim 16 to 256, a multiple of 16.
        cu_seqlens_q: [batch + 1] int32 on the device, not decreasing, from 0; batch at most 65,535. Requests of 0
            queries are allowed. Rows past the end of a tensor are not read, whatever it says.
        cu_seqlens_k: [batch + 1] int32, likewise for the keys. Requests of 0 keys are allowed.
        softmax_scale: Factor on the scores, positive.
        causal: Whether a query sees no key behind its own.
        max_seqlen_q: Queries of the longest request, or more. Of a longer request the queries beyond are not written.
        out: Where to write the output, or None: [queries, heads, v_head_dim] in q_nope's dtype or float32. Must not
            overlap an input.
        lse: Where to write the log-sum-exp, or None: [queries, heads] float32, any strides.

    Returns:
        ``(out, lse)``; lse is a natural logarithm. A query that sees no key gets out 0 and lse -inf. A request's bits
        do not depend on the other requests. Queries of no request are not written.

    Rounding, with u the unit roundoff of q_nope's dtype: scores, softmax statistics and accumulations are float32. Two
    roundings are coarser: the softmax weights before they meet v (u each; the normalising sum takes them unrounded) and
    the output (u). For float32 nothing is coarser than float32: products are IEEE, not TF32.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: An argument has a wrong shape, stride, device or value.
        RuntimeError: Triton has no GPU to compile for.
    """
    shape = check_mla_prefill(
        q_nope, q_pe, k_nope, k_pe, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, max_seqlen_q, out, lse
    )
    if out is None:
        out = torch.empty(shape.queries, shape.heads, shape.v_head_dim, dtype=q_nope.dtype, device=q_nope.device)
    if lse is None:
        lse = torch.empty(shape.queries, shape.heads, dtype=torch.float32, device=q_nope.device)
    longest = min(max_seqlen_q, shape.queries)
    if shape.batch > 0 and longest > 0:
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device_of(q_nope):  # type: ignore[no-untyped-call]
            _launch(
                shape,
                longest,
                q_nope,
                q_pe,
                k_nope,
                k_pe,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                softmax_scale,
                causal,
                out,
                lse,
            )
    return out, lse


def prefill_config(family: Family, shape: MlaPrefillShape, dtype: torch.dtype) -> PrefillConfig:
    """Configuration of the prefill kernel for the dims of a head and the dtype of what is multiplied."""
    if dtype == torch.float32:
        return PREFILL_CONFIGS[family, "fp32"]
    narrow = shape.qk_nope_head_dim + shape.qk_rope_head_dim <= 192 and shape.v_head_dim <= 128
    return PREFILL_CONFIGS[family, "narrow" if narrow else "wide"]


def _launch(
    shape: MlaPrefillShape,
    longest: int,
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    config = prefill_config(launch.family_of(launch.current_target()), shape, q_nope.dtype)
    nope_dim, rope_dim, v_dim = shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim
    low = min(1 << (nope_dim.bit_length() - 1), MAX_LOW)
    mla_prefill_kernel[(triton.cdiv(longest, config.block_m), shape.heads, shape.batch)](
        q_nope,
        q_pe,
        k_nope,
        k_pe,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        out,
        lse,
        softmax_scale * math.log2(math.e),
        shape.queries,
        shape.keys,
        *q_nope.stride()[:2],
        *q_pe.stride()[:2],
        *k_nope.stride()[:2],
        k_pe.stride(0),
        *v.stride()[:2],
        *out.stride()[:2],
        *lse.stride(),
        NOPE_DIM=nope_dim,
        LOW=low,
        HIGH=triton.next_power_of_2(nope_dim - low),
        ROPE_DIM=rope_dim,
        ROPE_BLOCK=triton.next_power_of_2(rope_dim),
        V_DIM=v_dim,
        V_BLOCK=triton.next_power_of_2(v_dim),
        CAUSAL=causal,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=launch.MAX_REGISTERS,
    )
