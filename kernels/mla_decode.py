"""Paged MLA decode: one query token per row against a latent cache that all heads share."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from mla_conformance.kernels import launch
from mla_conformance.kernels.mla_decode_checks import MlaDecodeShape, check_mla_decode
from mla_conformance.kernels.mla_decode_merge_triton import mla_decode_merge_kernel
from mla_conformance.kernels.mla_decode_split_triton import mla_decode_split_kernel


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
    """Multi-head Latent Attention of one query token per row over a paged cache, in the absorbed form.

    For row b, head h and the first ``seq_lens[b]`` tokens t of the row (DeepSeek-V2, arXiv:2405.04434, section 2.1)::

        score[t] = softmax_scale * (q_nope[b, h] . ckv[t] + q_pe[b, h] . kpe[t])
        out[b, h] = sum_t softmax(score)[t] * ckv[t],    lse[b, h] = log(sum_t exp(score[t]))

    where ``ckv[t]`` and ``kpe[t]`` are the first kv_lora_rank and the remaining elements of
    ``kv_cache[block_table[b, t // page_size], t % page_size]``, for an e4m3 cache times ``k_scale``.

    Args:
        q_nope: [batch, heads, kv_lora_rank], queries already multiplied by the key up-projection; bfloat16, float16 or
            float32. heads 1 to 128; kv_lora_rank 64 to 512, a multiple of 16. Last stride 1, others free.
        q_pe: [batch, heads, qk_rope_head_dim] in q_nope's dtype; qk_rope_head_dim 0 to 64, a multiple of 16. None is
            width 0. Last stride 1, others free.
        kv_cache: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim] in q_nope's dtype or float8_e4m3fn; page_size
            1 to 128. Last stride 1, others free.
        block_table: [batch, width] int32 or int64 page numbers. Only the first ceil(seq_lens[b] / page_size) of a row
            are read.
        seq_lens: [batch] int32 or int64, in tokens. A negative length counts as 0.
        softmax_scale: Factor on the scores, positive.
        k_scale: Factor on every element of an e4m3 cache, latent and rotary alike: positive, a float or one float32
            element on the device (whose value is not checked). Ignored for another cache dtype
            (vllm-project/vllm#37054).
        num_splits: Slices that a row's tokens are cut into and attended in parallel, 1 or more. None chooses from the
            shapes and the GPU. For a given count a row's bits do not depend on the other rows; another count
            changes the rounding only.
        out: Where to write the output, or None: [batch, heads, kv_lora_rank] in q_nope's dtype or float32. Last stride
            1, others free. Must not overlap an input.
        lse: Where to write the log-sum-exp, or None: [batch, heads] float32, any strides.

    Returns:
        ``(out, lse)``; lse is a natural logarithm. A row of length 0 gets out 0 and lse -inf. A row is NaN in both, and
        harms no other row, if its length exceeds width * page_size or if a page number that it uses lies outside
        ``[0, num_pages)``; neither the table nor the cache is read out of bounds. The same call gives the same bits.

    Rounding, with u the unit roundoff of q_nope's dtype: scores, softmax statistics and both accumulations are float32
    and an e4m3 element is widened exactly, its scale applied to the float32 sums. Two roundings are coarser: the
    softmax weights before they meet ckv (u each; the normalising sum takes them unrounded) and the output (u).
    For float32 queries nothing is coarser than float32: products are IEEE, not TF32, and a dot product of n terms is
    off by at most n * 2**-24 times the sum of their magnitudes.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: An argument has a wrong shape, stride, device or value, or the GPU cannot read e4m3.
        RuntimeError: Triton has no GPU to compile for.
    """
    shape = check_mla_decode(
        q_nope, q_pe, kv_cache, block_table, seq_lens, softmax_scale, k_scale, num_splits, out, lse
    )
    if out is None:
        out_shape = (shape.batch, shape.heads, shape.kv_lora_rank)
        out = torch.empty(out_shape, dtype=q_nope.dtype, device=q_nope.device)
    if lse is None:
        lse = torch.empty((shape.batch, shape.heads), dtype=torch.float32, device=q_nope.device)
    if shape.batch > 0:
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device_of(q_nope):  # type: ignore[no-untyped-call]
            _launch(shape, q_nope, q_pe, kv_cache, block_table, seq_lens, softmax_scale, k_scale, num_splits, out, lse)
    return out, lse


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
    out: Tensor,
    lse: Tensor,
) -> None:
    target = launch.current_target()
    fp8_cache = kv_cache.dtype == torch.float8_e4m3fn
    if fp8_cache and not launch.supports_fp8_cache(target):
        raise ValueError(f"kv_cache is float8_e4m3fn, which {target} cannot read; use a cache of q_nope's dtype there")
    rope_dim = shape.qk_rope_head_dim
    rows_regular = _rows_regular(kv_cache, shape.kv_lora_rank, rope_dim)
    config = launch.decode_config(target, q_nope.dtype, kv_cache.dtype, shape.heads, shape.page_size, rows_regular)
    head_tiles = triton.cdiv(shape.heads, config.block_h)
    if num_splits is None:
        multiprocessors = launch.sm_count(target, q_nope.device)
        num_splits = launch.choose_num_splits(config, shape.batch, head_tiles, shape.max_tokens, multiprocessors)
    # Splits beyond the tiles of the longest possible row are empty; leaving them out changes no bit.
    num_splits = min(num_splits, max(1, triton.cdiv(shape.max_tokens, config.block_n)))
    if num_splits > launch.MAX_GRID_YZ:
        raise ValueError(f"num_splits is {num_splits}; pass at most {launch.MAX_GRID_YZ}")

    if num_splits == 1:
        split_out, split_lse = out.unsqueeze(2), lse.unsqueeze(2)
    else:
        scratch = (shape.batch, shape.heads, num_splits, shape.kv_lora_rank)
        split_out = torch.empty(scratch, dtype=torch.float32, device=out.device)
        split_lse = torch.empty(scratch[:3], dtype=torch.float32, device=out.device)

    # The scale belongs to the e4m3 cache; applying it to another is an error that has been made.
    cache_scale = 1.0 if k_scale is None or not fp8_cache else k_scale
    scale_on_device = isinstance(cache_scale, Tensor)
    mla_decode_split_kernel[(head_tiles, num_splits, shape.batch)](
        q_nope,
        q_pe if rope_dim else None,
        kv_cache,
        block_table,
        seq_lens,
        cache_scale if scale_on_device else None,
        split_out,
        split_lse,
        softmax_scale * math.log2(math.e),
        1.0 if scale_on_device else float(cache_scale),
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
        FINAL=num_splits == 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=launch.MAX_REGISTERS,
    )
    if num_splits == 1:
        return

    merge = launch.MERGE_CONFIG
    column_blocks = triton.cdiv(shape.kv_lora_rank, merge.block_d)
    mla_decode_merge_kernel[(column_blocks, shape.heads, shape.batch)](
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


def _rows_regular(kv_cache: Tensor, kv_lora_rank: int, rope_dim: int) -> bool:
    starts = [kv_cache.data_ptr(), *(stride * kv_cache.element_size() for stride in kv_cache.stride()[:2])]
    return all(start % 16 == 0 for start in starts) and kv_lora_rank in (256, 512) and rope_dim in (0, 16, 32, 64)
