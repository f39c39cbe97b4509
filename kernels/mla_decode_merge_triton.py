# mypy: ignore-errors
"""Second kernel of ``mla_decode``: merges the partial results of a row's slices."""

from __future__ import annotations

import triton
import triton.language as tl

from mla_conformance.kernels.mla_decode_rows_triton import row_length, tokens_per_split

_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=[
        "table_width",
        "num_splits",
        "seq_lens_stride",
        "lse_stride_b",
        "lse_stride_h",
        "partial_lse_stride_b",
        "partial_lse_stride_h",
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
    partial_out_stride_b,
    partial_out_stride_h,
    partial_lse_stride_b,
    partial_lse_stride_h,
    seq_lens_stride,
    out_stride_b,
    out_stride_h,
    lse_stride_b,
    lse_stride_h,
    KV_LORA_RANK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the partial results of one head of one row, for BLOCK_D output columns.

        lse = log(sum_s(exp(lse_s))),   out = sum_s(exp(lse_s - lse) * out_s)

    It recomputes where the splits were cut and looks only at those that hold tokens, so the scratch of the others may
    hold anything. It passes over the splits twice, BLOCK_S at a time: first over their lse, one number each and in base
    2, for the maximum; then over their outputs. The programs of all column blocks find the same lse; the first stores
    it. A row without tokens gets out 0 and lse -inf, a row too long for its table NaN.
    """
    column_block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    row64 = row.to(tl.int64)
    head64 = head.to(tl.int64)

    seq_len, too_long = row_length(seq_lens_ptr, seq_lens_stride, row, table_width, PAGE_SIZE)
    split_len = tokens_per_split(seq_len, num_splits, BLOCK_N)
    # An empty row has split_len 0 as well; any positive divisor gives it its 0 splits.
    used_splits = tl.cdiv(seq_len, tl.maximum(split_len, 1))

    split_block = tl.arange(0, BLOCK_S)
    columns = column_block * BLOCK_D + tl.arange(0, BLOCK_D)
    column_mask = columns < KV_LORA_RANK
    # partial_lse[row, head, :] and partial_out[row, head, :, columns]
    row_lse_ptr = partial_lse_ptr + row64 * partial_lse_stride_b + head64 * partial_lse_stride_h
    row_out_ptrs = partial_out_ptr + row64 * partial_out_stride_b + head64 * partial_out_stride_h + columns[None, :]

    running_max = tl.full([BLOCK_S], float("-inf"), tl.float32)
    for first in range(0, used_splits, BLOCK_S):
        splits = first + split_block
        split_lse = tl.load(row_lse_ptr + splits, mask=splits < used_splits, other=float("-inf"))
        running_max = tl.maximum(running_max, split_lse)
    max_lse = tl.max(running_max, 0)

    weight_sum = tl.zeros([BLOCK_S], tl.float32)
    acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for first in range(0, used_splits, BLOCK_S):
        splits = first + split_block
        used = splits < used_splits
        split_lse = tl.load(row_lse_ptr + splits, mask=used, other=float("-inf"))
        weights = tl.exp2(split_lse - max_lse)
        # partial_out[row, head, splits, columns]
        split_out = tl.load(
            row_out_ptrs + splits.to(tl.int64)[:, None] * KV_LORA_RANK,
            mask=used[:, None] & column_mask[None, :],
            other=0.0,
        )
        weight_sum += weights
        acc += weights[:, None] * split_out
    total = tl.where(too_long, float("nan"), tl.sum(weight_sum, 0))
    divisor = tl.where(total == 0.0, 1.0, total)

    # out[row, head, columns]
    out_ptrs = out_ptr + row64 * out_stride_b + head64 * out_stride_h + columns
    out = (tl.sum(acc, 0) / divisor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptrs, out, mask=column_mask)
    if column_block == 0:
        lse = (max_lse + tl.log2(divisor)) * _LN_2
        tl.store(lse_ptr + row64 * lse_stride_b + head64 * lse_stride_h, lse)
