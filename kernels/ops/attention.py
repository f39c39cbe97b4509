"""Decode and prefill as operators."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.kernels.mla_decode import mla_decode as decode
from mla_conformance.kernels.mla_prefill import mla_prefill as prefill
from mla_conformance.kernels.ops.fake import nothing


@torch.library.custom_op("mla_conformance::mla_decode", mutates_args=())
def mla_decode(
    q_nope: Tensor,
    q_pe: Tensor | None,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    k_scale: Tensor | None = None,
    num_splits: int | None = None,
    query_lens: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of one or a few query tokens a request: out in the shape and dtype of q_nope, and float32 lse.

    Arguments and errors as :func:`mla_conformance.kernels.mla_decode.mla_decode`; ``k_scale`` is a tensor here.
    """
    return decode(
        q_nope,
        q_pe,
        kv_cache,
        block_table,
        seq_lens,
        softmax_scale=softmax_scale,
        query_lens=query_lens,
        causal=causal,
        k_scale=k_scale,
        num_splits=num_splits,
    )


@torch.library.custom_op("mla_conformance::mla_decode_out", mutates_args=("out", "lse"))
def mla_decode_out(
    q_nope: Tensor,
    q_pe: Tensor | None,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    k_scale: Tensor | None = None,
    num_splits: int | None = None,
    query_lens: Tensor | None = None,
    causal: bool = True,
) -> None:
    """The same into ``out`` and ``lse``, fully written; neither may overlap another argument."""
    decode(
        q_nope,
        q_pe,
        kv_cache,
        block_table,
        seq_lens,
        softmax_scale=softmax_scale,
        query_lens=query_lens,
        causal=causal,
        k_scale=k_scale,
        num_splits=num_splits,
        out=out,
        lse=lse,
    )


@torch.library.custom_op("mla_conformance::mla_prefill", mutates_args=())
def mla_prefill(
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
) -> tuple[Tensor, Tensor]:
    """Attention of ragged batches of new tokens: out [queries, heads, v_head_dim] and float32 lse [queries, heads].

    Arguments and errors as :func:`mla_conformance.kernels.mla_prefill.mla_prefill`. Queries of no request are not set.
    """
    return prefill(
        q_nope,
        q_pe,
        k_nope,
        k_pe,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        softmax_scale=softmax_scale,
        causal=causal,
        max_seqlen_q=max_seqlen_q,
    )


@torch.library.custom_op("mla_conformance::mla_prefill_out", mutates_args=("out", "lse"))
def mla_prefill_out(
    q_nope: Tensor,
    q_pe: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    max_seqlen_q: int,
) -> None:
    """The same into ``out`` and ``lse``, written for all queries of a request; neither may overlap another argument."""
    prefill(
        q_nope,
        q_pe,
        k_nope,
        k_pe,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        softmax_scale=softmax_scale,
        causal=causal,
        max_seqlen_q=max_seqlen_q,
        out=out,
        lse=lse,
    )


def _decoded(q_nope: Tensor, *_others: object, **_options: object) -> tuple[Tensor, Tensor]:
    return q_nope.new_empty(q_nope.shape), q_nope.new_empty(q_nope.shape[:-1], dtype=torch.float32)


def _attended(
    q_nope: Tensor, q_pe: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, *_others: object, **_options: object
) -> tuple[Tensor, Tensor]:
    rows = q_nope.shape[:2]
    return q_nope.new_empty((*rows, v.shape[2])), q_nope.new_empty(rows, dtype=torch.float32)


mla_decode.register_fake(_decoded)
mla_decode_out.register_fake(nothing)
mla_prefill.register_fake(_attended)
mla_prefill_out.register_fake(nothing)
