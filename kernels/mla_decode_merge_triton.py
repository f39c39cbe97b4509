# mypy: ignore-errors
"""Second kernel of ``mla_decode``: merges the partial results of a request's slices."""

from __future__ import annotations

import triton
import triton.language as tl

from mla_conformance.kernels.mla_decode_rows_triton import request_length, tokens_per_split

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=[
        "table_width",
        "num_splits",
        "seq_lens_stride",
        "num_heads",
        "lse_stride_b",
        "lse_stride_t",
        "lse_stride_h",
        "partial_lse_stride_b",
        "partial_lse_stride_r",
    ],
    do_not_specialize_on_alignment=["seq_lens_ptr", "lse_ptr", "partial_lse_ptr"],
)
def mla_decode_merge_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    seq_lens_ptr,
    out_ptr,
    lse_ptr,
    table_width,
    num_splits,
    num_heads,
    partial_out_stride_b,
    partial_out_stride_r,
    partial_lse_stride_b,
    partial_lse_stride_r,
    seq_lens_stride,
    out_stride_b,
    out_stride_t,
    out_stride_h,
    lse_stride_b,
    lse_stride_t,
    lse_stride_h,
    KV_LORA_RANK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the partial results of one row, a query token and a head of a request, for BLOCK_D output columns.

        lse = log(sum_s(exp(lse_s))),   out = sum_s(exp(lse_s - lse) * out_s)

    It recomputes where the splits were cut and looks only at those that hold tokens, so the scratch of the others may
    hold anything. A split of which the row sees no token has lse -inf. It passes over the splits twice, BLOCK_S at a
    time: first over their lse, one number each and in base 2, for the maximum; then over their outputs. The programs of
    all column blocks find the same lse; the first stores it. A row without tokens gets out 0 and lse -inf, those of a
    request too long for its table NaN.
    """
    column_block = tl.program_id(0)
    row = tl.program_id(1)
    request = tl.program_id(2)
    request64 = request.to(tl.int64)
    row64 = row.to(tl.int64)
    token64 = (row // num_heads).to(tl.int64)
    head64 = (row % num_heads).to(tl.int64)

    seq_len, too_long = request_length(seq_lens_ptr, seq_lens_stride, request, table_width, PAGE_SIZE)
    split_len = tokens_per_split(seq_len, num_splits, BLOCK_N)
    # An empty request has split_len 0 as well; any positive divisor gives it its 0 splits.
    used_splits = tl.cdiv(seq_len, tl.maximum(split_len, 1))

    split_block = tl.arange(0, BLOCK_S)
    columns = column_block * BLOCK_D + tl.arange(0, BLOCK_D)
    column_mask = columns < KV_LORA_RANK
    # partial_lse[request, row, :] and partial_out[request, row, :, columns]
    row_lse_ptr = partial_lse_ptr + request64 * partial_lse_stride_b + row64 * partial_lse_stride_r
    row_out_ptrs = partial_out_ptr + request64 * partial_out_stride_b + row64 * partial_out_stride_r + columns[None, :]

    running_max = tl.full([BLOCK_S], float("-inf"), tl.float32)
    for first in range(0, used_splits, BLOCK_S):
        splits = first + split_block
        split_lse = tl.load(row_lse_ptr + splits, mask=splits < used_splits, other=float("-inf"))
        running_max = tl.maximum(running_max, split_lse)
    max_lse = tl.max(running_max, 0)
    # Splits that the row sees nothing of must not become exp2(-inf + inf).
    max_lse = tl.where(max_lse == float("-inf"), 0.0, max_lse)

    weight_sum = tl.zeros([BLOCK_S], tl.float32)
    acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for first in range(0, used_splits, BLOCK_S):
        splits = first + split_block
        used = splits < used_splits
        split_lse = tl.load(row_lse_ptr + splits, mask=used, other=float("-inf"))
        weights = tl.exp2(split_lse - max_lse)
        # partial_out[request, row, splits, columns]
        split_out = tl.load(
            row_out_ptrs + splits.to(tl.int64)[:, None] * KV_LORA_RANK,
            mask=used[:, None] & column_mask[None, :],
            other=0.0,
        )
        weight_sum += weights
        acc += weights[:, None] * split_out
    total = tl.where(too_long, float("nan"), tl.sum(weight_sum, 0))
    divisor = tl.where(total == 0.0, 1.0, total)

    # out[request, token, head, columns]
    out_ptrs = out_ptr + request64 * out_stride_b + token64 * out_stride_t + head64 * out_stride_h + columns
    out = (tl.sum(acc, 0) / divisor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=column_mask)
    if column_block == 0:
        lse = tl.where(total == 0.0, float("-inf"), (max_lse + tl.log2(divisor)) * _LN_2)
        tl.store(lse_ptr + request64 * lse_stride_b + token64 * lse_stride_t + head64 * lse_stride_h, lse)
