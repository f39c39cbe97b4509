"""Paged MLA decode: one query token a row against a latent cache that all heads share."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from mla_conformance.kernels import launch
from mla_conformance.kernels.mla_decode_checks import MlaDecodeShape, check_mla_decode
from mla_conformance.kernels.mla_decode_triton import mla_decode_merge_kernel, mla_decode_split_kernel


def mla_decode(
    q_nope: Tensor,
    q_pe: Tensor | None,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    k_scale: float | Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Doc"""
    shape = check_mla_decode(
        q_nope, q_pe, kv_cache, block_table, seq_lens, softmax_scale, k_scale, num_splits, out, lse
    )
    with torch.cuda.device_of(q_nope):
        return _launch(
            shape, q_nope, q_pe, kv_cache, block_table, seq_lens, softmax_scale, k_scale, num_splits, out, lse
        )


def _launch(
    shape: MlaDecodeShape,
    q_nope: Tensor,
    q_pe: Tensor | None,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    k_scale: float | Tensor | None,
    num_splits: int | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    device = q_nope.device
    out_shape = (shape.batch, shape.heads, shape.kv_lora_rank)
    out = torch.empty(out_shape, dtype=q_nope.dtype, device=device) if out is None else out
    lse = torch.empty(out_shape[:2], dtype=torch.float32, device=device) if lse is None else lse
    if shape.batch == 0:
        return out, lse

    target = launch.current_target()
    fp8_cache = kv_cache.dtype == torch.float8_e4m3fn
    if fp8_cache and not launch.supports_fp8_cache(target):
        raise ValueError(
            f"kv_cache is float8_e4m3fn, which {target} cannot read; use a cache of q_nope's dtype there"
        )
    config = launch.decode_config(target, q_nope.dtype, kv_cache.dtype, shape.heads)
    merge = launch.MERGE_CONFIG
    head_tiles = triton.cdiv(shape.heads, config.block_h)
    if num_splits is None:
        num_splits = launch.choose_num_splits(
            config, shape.batch, head_tiles, shape.max_tokens, launch.sm_count(target, device)
        )
    # More splits than tiles are empty for every row; leaving them out changes no bit and saves their scratch.
    num_splits = min(num_splits, max(1, triton.cdiv(shape.max_tokens, config.block_n)))

    final = num_splits == 1
    if final:
        split_out, split_lse = out.unsqueeze(2), lse.unsqueeze(2)
    else:
        scratch = (shape.batch, shape.heads, num_splits, shape.kv_lora_rank)
        split_out = torch.empty(scratch, dtype=torch.float32, device=device)
        split_lse = torch.empty(scratch[:3], dtype=torch.float32, device=device)

    # A scale that is not the cache's must not be applied (vllm-project/vllm#37054).
    k_scale = 1.0 if k_scale is None or not fp8_cache else k_scale
    rope_dim = shape.qk_rope_head_dim
    mla_decode_split_kernel[(head_tiles, num_splits, shape.batch)](
        q_nope,
        q_pe if rope_dim else None,
        kv_cache,
        block_table,
        seq_lens,
        k_scale if isinstance(k_scale, Tensor) else None,
        split_out,
        split_lse,
        softmax_scale * math.log2(math.e),
        1.0 if isinstance(k_scale, Tensor) else float(k_scale),
        shape.heads,
        kv_cache.shape[0],
        block_table.shape[1],
        num_splits,
        *q_nope.stride()[:2],
        *(q_pe.stride()[:2] if q_pe is not None else (0, 0)),
        *kv_cache.stride()[:2],
        *block_table.stride(),
        *seq_lens.stride(),
        *split_out.stride()[:3],
        *split_lse.stride(),
        KV_LORA_RANK=shape.kv_lora_rank,
        LATENT_BLOCK=triton.next_power_of_2(shape.kv_lora_rank),
        ROPE_DIM=rope_dim,
        ROPE_BLOCK=triton.next_power_of_2(rope_dim),
        PAGE_SIZE=shape.page_size,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        TILE_IN_PAGE=shape.page_size % config.block_n == 0,
        PREFETCH=config.prefetch,
        FINAL=final,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if not final:
        mla_decode_merge_kernel[(triton.cdiv(shape.kv_lora_rank, merge.block_d), shape.heads, shape.batch)](
            split_out,
            split_lse,
            seq_lens,
            out,
            lse,
            block_table.shape[1],
            num_splits,
            *split_out.stride()[:2],
            *split_lse.stride()[:2],
            *seq_lens.stride(),
            *out.stride()[:2],
            *lse.stride(),
            KV_LORA_RANK=shape.kv_lora_rank,
            PAGE_SIZE=shape.page_size,
            BLOCK_N=config.block_n,
            BLOCK_S=merge.block_s,
            BLOCK_D=merge.block_d,
            num_warps=merge.num_warps,
        )
    return out, lse
