# mypy: ignore-errors
"""The kernel of ``mla_prefill``: one program a tile of queries, for one head of one request.

Written for hostile memory: rows of K and V beyond the request may hold NaN, and 0 * NaN is NaN, so a masked score is
not enough and the loads are masked as well. Indices become 64-bit before they meet a stride (sgl-project/sglang#20389).
"""

from __future__ import annotations

import triton
import triton.language as tl

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _segment(cu_ptr, request, total):
    """First row and number of rows of a request, never beyond the ``total`` rows that there are."""
    start = tl.minimum(tl.maximum(tl.load(cu_ptr + request), 0), total)
    end = tl.minimum(tl.load(cu_ptr + request + 1), total)
    return start, tl.maximum(end - start, 0)


@triton.jit
def _load_rows(
    row_ptrs, row_mask, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASK_ROWS: tl.constexpr
):
    """Columns FIRST to FIRST + WIDTH of some rows, padded with zeros to BLOCK; masked rows are not read and are 0."""
    columns = tl.arange(0, BLOCK)
    ptrs = row_ptrs[:, None] + FIRST + columns[None, :]
    # Masks that are not needed are left out, because the compiler cannot tell that they are always true.
    if MASK_ROWS and WIDTH != BLOCK:
        rows = tl.load(ptrs, mask=row_mask[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif MASK_ROWS:
        rows = tl.load(ptrs, mask=row_mask[:, None], other=0.0)
    elif WIDTH != BLOCK:
        rows = tl.load(ptrs, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        rows = tl.load(ptrs)
    return rows


@triton.jit
def _attend(
    acc,
    running_sum,
    running_max,
    q_low,
    q_high,
    q_rope,
    k_nope_ptr,
    k_pe_ptr,
    v_ptr,
    k_nope_stride,
    k_pe_stride,
    v_stride,
    first_key,
    end_key,
    num_keys,
    visible_keys,
    score_scale,
    NOPE_DIM: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Let a tile of queries attend to the keys from first_key to end_key, BLOCK_N at a time; return the new state.

    MASKED says that some of the keys do not exist (num_keys and beyond) or that some queries do not see them (query i
    sees the first visible_keys[i]). Otherwise end_key - first_key is a multiple of BLOCK_N and every query sees all.
    """
    for tile_start in range(first_key, end_key, BLOCK_N):
        keys = tile_start + tl.arange(0, BLOCK_N)
        exists = keys < num_keys
        keys64 = keys.to(tl.int64)
        k_rows = k_nope_ptr + keys64 * k_nope_stride
        scores = tl.dot(q_low, tl.trans(_load_rows(k_rows, exists, 0, LOW, LOW, MASKED)), input_precision="ieee")
        if HIGH > 0:
            k_high = _load_rows(k_rows, exists, LOW, NOPE_DIM - LOW, HIGH, MASKED)
            scores = tl.dot(q_high, tl.trans(k_high), acc=scores, input_precision="ieee")
        if ROPE_DIM > 0:
            k_rope = _load_rows(k_pe_ptr + keys64 * k_pe_stride, exists, 0, ROPE_DIM, ROPE_BLOCK, MASKED)
            scores = tl.dot(q_rope, tl.trans(k_rope), acc=scores, input_precision="ieee")
        scores *= score_scale
        if MASKED:
            scores = tl.where(keys[None, :] < visible_keys[:, None], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        # A query that has seen no key yet has no maximum; -inf - -inf would be NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        rescale = tl.exp2(running_max - base)
        weights = tl.exp2(scores - base[:, None])
        running_sum = running_sum * rescale + tl.sum(weights, 1)
        v = _load_rows(v_ptr + keys64 * v_stride, exists, 0, V_DIM, V_BLOCK, MASKED)
        acc = tl.dot(weights.to(v.dtype), v, acc=acc * rescale[:, None], input_precision="ieee")
        running_max = new_max
    return acc, running_sum, running_max


@triton.jit(
    do_not_specialize=["total_q", "total_k", "lse_stride_t", "lse_stride_h"],
    do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr", "lse_ptr"],
)
def mla_prefill_kernel(
    q_nope_ptr,
    q_pe_ptr,
    k_nope_ptr,
    k_pe_ptr,
    v_ptr,
    cu_q_ptr,
    cu_k_ptr,
    out_ptr,
    lse_ptr,
    score_scale,
    total_q,
    total_k,
    q_nope_stride_t,
    q_nope_stride_h,
    q_pe_stride_t,
    q_pe_stride_h,
    k_nope_stride_t,
    k_nope_stride_h,
    k_pe_stride_t,
    v_stride_t,
    v_stride_h,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    NOPE_DIM: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend BLOCK_M queries of one head of one request to the keys that they see.

    The nope columns are multiplied in two parts: a power of two, LOW, and the rest, padded to the power of two HIGH (0
    if there is none). So 192 is 128 + 64 instead of 256.

    The softmax runs online and in base 2 (score_scale holds softmax_scale * log2 e). The tiles of keys that every query
    of the tile sees come first, without any mask; the others follow, and keys that no query of the tile sees are left
    out.
    """
    # The fastest axis runs over the queries that share a head's keys, the tiles with the most keys first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head64 = tl.program_id(1).to(tl.int64)
    request = tl.program_id(2)
    q_start, num_queries = _segment(cu_q_ptr, request, total_q)
    k_start, num_keys = _segment(cu_k_ptr, request, total_k)
    first_query = tile * BLOCK_M
    if first_query >= num_queries:
        return

    queries = first_query + tl.arange(0, BLOCK_M)
    query_mask = queries < num_queries
    rows64 = q_start.to(tl.int64) + queries
    # q_nope[rows, head, :] and q_pe[rows, head, :]
    q_rows = q_nope_ptr + head64 * q_nope_stride_h + rows64 * q_nope_stride_t
    q_low = _load_rows(q_rows, query_mask, 0, LOW, LOW, True)
    q_high = q_low
    if HIGH > 0:
        q_high = _load_rows(q_rows, query_mask, LOW, NOPE_DIM - LOW, HIGH, True)
    q_rope = q_low
    if ROPE_DIM > 0:
        q_pe_rows = q_pe_ptr + head64 * q_pe_stride_h + rows64 * q_pe_stride_t
        q_rope = _load_rows(q_pe_rows, query_mask, 0, ROPE_DIM, ROPE_BLOCK, True)

    # Keys before the first query: of the causal mask, the diagonal ends in the last key.
    context = num_keys - num_queries
    visible_keys = tl.where(query_mask, num_keys, 0)
    seen_by_all = num_keys
    seen_by_any = num_keys
    if CAUSAL:
        visible_keys = tl.minimum(visible_keys, context + queries + 1)
        seen_by_all = tl.maximum(tl.minimum(context + first_query + 1, num_keys), 0)
        seen_by_any = tl.maximum(tl.minimum(context + first_query + BLOCK_M, num_keys), 0)
    unmasked_end = seen_by_all // BLOCK_N * BLOCK_N

    # k_nope[k_start:, head, :], k_pe[k_start:, :] and v[k_start:, head, :]
    k_start64 = k_start.to(tl.int64)
    k_nope_ptr += k_start64 * k_nope_stride_t + head64 * k_nope_stride_h
    k_pe_ptr += k_start64 * k_pe_stride_t
    v_ptr += k_start64 * v_stride_t + head64 * v_stride_h

    acc = tl.zeros([BLOCK_M, V_BLOCK], tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for masked in tl.static_range(2):
        acc, running_sum, running_max = _attend(
            acc,
            running_sum,
            running_max,
            q_low,
            q_high,
            q_rope,
            k_nope_ptr,
            k_pe_ptr,
            v_ptr,
            k_nope_stride_t,
            k_pe_stride_t,
            v_stride_t,
            unmasked_end if masked else 0,
            seen_by_any if masked else unmasked_end,
            num_keys,
            visible_keys,
            score_scale,
            NOPE_DIM,
            LOW,
            HIGH,
            ROPE_DIM,
            ROPE_BLOCK,
            V_DIM,
            V_BLOCK,
            BLOCK_N,
            MASKED=masked == 1,
        )

    # A sum of 0 means a query without keys: its output is 0, not 0 / 0, its lse -inf (vllm-project/vllm#27491).
    divisor = tl.where(running_sum == 0.0, 1.0, running_sum)
    # out[rows, head, :] and lse[rows, head]
    columns = tl.arange(0, V_BLOCK)
    out_ptrs = out_ptr + head64 * out_stride_h + rows64[:, None] * out_stride_t + columns[None, :]
    out = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=query_mask[:, None] & (columns < V_DIM)[None, :])
    lse = (running_max + tl.log2(divisor)) * _LN_2
    tl.store(lse_ptr + head64 * lse_stride_h + rows64 * lse_stride_t, lse, mask=query_mask)
