"""Paged MLA decode: one or a few query tokens per request against a latent cache that all heads share."""

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
    query_lens: Tensor | None = None,
    causal: bool = True,
    k_scale: float | Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multi-head Latent Attention of a few query tokens per request over a paged cache, in the absorbed form.

    For request b, query token j, head h and the tokens t that j sees (DeepSeek-V2, arXiv:2405.04434, section 2.1)::

        score[t] = softmax_scale * (q_nope[b, j, h] . ckv[t] + q_pe[b, j, h] . kpe[t])
        out[b, j, h] = sum_t softmax(score)[t] * ckv[t],    lse[b, j, h] = log(sum_t exp(score[t]))

    where ``ckv[t]`` and ``kpe[t]`` are the first kv_lora_rank and the remaining elements of
    ``kv_cache[block_table[b, t // page_size], t % page_size]``, for an e4m3 cache times ``k_scale``.

    The query tokens are the last of the request, whose rows are in the cache already. With ``causal``, the j-th of n
    sees the first ``seq_lens[b] - n + 1 + j`` tokens, itself the last of them, and none if that is not positive.
    Without it, each sees all ``seq_lens[b]``.

    Args:
        q_nope: [batch, heads, kv_lora_rank] for one query token a request, or [batch, query_tokens, heads,
            kv_lora_rank]: queries already multiplied by the key up-projection; bfloat16, float16 or float32.
            query_tokens 1 to 16; heads 1 to 128; kv_lora_rank 64 to 512, a multiple of 16. Last stride 1, others free.
        q_pe: As q_nope, of width qk_rope_head_dim and in its dtype; qk_rope_head_dim 0 to 64, a multiple of 16. None
            is width 0. Last stride 1, others free.
        kv_cache: [num_pages, page_size, kv_lora_rank + qk_rope_head_dim] in q_nope's dtype or float8_e4m3fn; page_size
            1 to 128. Last stride 1, others free.
        block_table: [batch, width] int32 or int64 page numbers. Only the first ceil(seq_lens[b] / page_size) of a
            request are read.
        seq_lens: [batch] int32 or int64, in tokens, the query tokens among them. A negative length counts as 0.
        softmax_scale: Factor on the scores, positive.
        query_lens: [batch] int32 or int64, how many query tokens a request has; those behind are padding and see
            nothing. None is all of them. More than there are counts as all, a negative number as 0.
        causal: Whether a query token sees no token behind its own.
        k_scale: Factor on every element of an e4m3 cache, latent and rotary alike: positive, a float or one float32
            element on the device (whose value is not checked). Ignored for another cache dtype
            (vllm-project/vllm#37054).
        num_splits: Slices that a request's tokens are cut into and attended in parallel, 1 or more. None chooses from
            the shapes and the GPU. For a given count a request's bits do not depend on the others; another count
            changes the rounding only.
        out: Where to write the output, or None: the shape of q_nope, in its dtype or float32. Last stride 1, others
            free. Must not overlap an input.
        lse: Where to write the log-sum-exp, or None: that shape without its last dimension, float32, any strides.

    Returns:
        ``(out, lse)``; lse is a natural logarithm. A query token that sees no token gets out 0 and lse -inf. A request
        is NaN in both if its length exceeds width * page_size, and those of its query tokens are that see a token of a
        page number outside ``[0, num_pages)``; no other row is harmed, and neither the table nor the cache is read out
        of bounds. The same call gives the same bits.

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
        q_nope,
        q_pe,
        kv_cache,
        block_table,
        seq_lens,
        query_lens,
        softmax_scale,
        causal,
        k_scale,
        num_splits,
        out,
        lse,
    )
    if out is None:
        out = torch.empty(q_nope.shape, dtype=q_nope.dtype, device=q_nope.device)
    if lse is None:
        lse = torch.empty(q_nope.shape[:-1], dtype=torch.float32, device=q_nope.device)
    if shape.batch > 0:
        queries = (q_nope, q_pe, out, lse)
        if q_nope.dim() == 3:
            queries = (
                q_nope.unsqueeze(1),
                None if q_pe is None else q_pe.unsqueeze(1),
                out.unsqueeze(1),
                lse.unsqueeze(1),
            )
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device_of(q_nope):  # type: ignore[no-untyped-call]
            _launch(
                shape, *queries, kv_cache, block_table, seq_lens, query_lens, softmax_scale, causal, k_scale, num_splits
            )
    return out, lse


def _launch(
    shape: MlaDecodeShape,
    q_nope: Tensor,
    q_pe: Tensor | None,
    out: Tensor,
    lse: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor | None,
    softmax_scale: float,
    causal: bool,
    k_scale: float | Tensor | None,
    num_splits: int | None,
) -> None:
    target = launch.current_target()
    fp8_cache = kv_cache.dtype == torch.float8_e4m3fn
    if fp8_cache and not launch.supports_fp8_cache(target):
        raise ValueError(f"kv_cache is float8_e4m3fn, which {target} cannot read; use a cache of q_nope's dtype there")
    rope_dim = shape.qk_rope_head_dim
    rows = shape.query_tokens * shape.heads
    rows_regular = _rows_regular(kv_cache, shape.kv_lora_rank, rope_dim)
    config = launch.decode_config(target, q_nope.dtype, kv_cache.dtype, rows, shape.page_size, rows_regular)
    query_tiles = triton.cdiv(rows, config.block_q)
    if num_splits is None:
        multiprocessors = launch.sm_count(target, q_nope.device)
        num_splits = launch.choose_num_splits(config, shape.batch, query_tiles, shape.max_tokens, multiprocessors)
    # Splits beyond the tiles of the longest possible request are empty; leaving them out changes no bit.
    num_splits = min(num_splits, max(1, triton.cdiv(shape.max_tokens, config.block_n)))
    if num_splits > launch.MAX_GRID_YZ:
        raise ValueError(f"num_splits is {num_splits}; pass at most {launch.MAX_GRID_YZ}")

    if num_splits == 1:
        split_out, split_lse = out, lse
        out_strides, lse_strides = (*out.stride()[:3], 0), (*lse.stride(), 0)
    else:
        scratch = (shape.batch, shape.query_tokens, shape.heads, num_splits, shape.kv_lora_rank)
        split_out = torch.empty(scratch, dtype=torch.float32, device=out.device)
        split_lse = torch.empty(scratch[:-1], dtype=torch.float32, device=out.device)
        out_strides, lse_strides = split_out.stride()[:4], split_lse.stride()

    # The scale belongs to the e4m3 cache; applying it to another is an error that has been made.
    cache_scale = 1.0 if k_scale is None or not fp8_cache else k_scale
    scale_on_device = isinstance(cache_scale, Tensor)
    mla_decode_split_kernel[(query_tiles, num_splits, shape.batch)](
        q_nope,
        q_pe if rope_dim else None,
        kv_cache,
        block_table,
        seq_lens,
        query_lens,
        cache_scale if scale_on_device else None,
        split_out,
        split_lse,
        softmax_scale * math.log2(math.e),
        1.0 if scale_on_device else float(cache_scale),
        shape.heads,
        shape.query_tokens,
        kv_cache.shape[0],
        block_table.shape[1],
        num_splits,
        *q_nope.stride()[:3],
        *(q_pe.stride()[:3] if q_pe is not None else (0, 0, 0)),
        *kv_cache.stride()[:2],
        *block_table.stride(),
        *seq_lens.stride(),
        *(query_lens.stride() if query_lens is not None else (0,)),
        *out_strides,
        *lse_strides,
        KV_LORA_RANK=shape.kv_lora_rank,
        LATENT_BLOCK=triton.next_power_of_2(shape.kv_lora_rank),
        ROPE_DIM=rope_dim,
        ROPE_BLOCK=triton.next_power_of_2(rope_dim),
        PAGE_SIZE=shape.page_size,
        BLOCK_Q=config.block_q,
        BLOCK_N=config.block_n,
        TILE_IN_PAGE=shape.page_size % config.block_n == 0,
        PREFETCH=config.prefetch,
        ROW_LIMITS=query_lens is not None or (causal and shape.query_tokens > 1),
        CAUSAL=causal,
        FINAL=num_splits == 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=launch.MAX_REGISTERS,
    )
    if num_splits == 1:
        return

    merge = launch.MERGE_CONFIG
    column_blocks = triton.cdiv(shape.kv_lora_rank, merge.block_d)
    mla_decode_merge_kernel[(column_blocks, rows, shape.batch)](
        split_out,
        split_lse,
        seq_lens,
        out,
        lse,
        block_table.shape[1],
        num_splits,
        shape.heads,
        *split_out.flatten(1, 2).stride()[:2],
        *split_lse.flatten(1, 2).stride()[:2],
        *seq_lens.stride(),
        *out.stride()[:3],
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
