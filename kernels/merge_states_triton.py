# mypy: ignore-errors
"""The kernels of ``merge_states`` and ``merge_shards``: rows of tokens and heads, a tile of them a program.

Both find a row's weights from its log-sum-exps, subtract the largest first, and divide before they multiply, so that
outputs as large as the dtype holds do not overflow. The output of an empty state is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INF = tl.constexpr(float("inf"))


@triton.jit
def _offsets(rows, heads, stride_t, stride_h):
    """Offsets of rows, numbered token by token, in 64 bits."""
    return (rows // heads).to(tl.int64) * stride_t + (rows % heads).to(tl.int64) * stride_h


@triton.jit
def _load_lse(ptrs, mask):
    """Log-sum-exps, -inf where empty: some libraries say +inf for it."""
    lse = tl.load(ptrs, mask=mask, other=-_INF)
    return tl.where(lse == _INF, -_INF, lse)


@triton.jit
def _shift(largest):
    """What to subtract from log-sum-exps before ``exp``: their largest, or 0 so that -inf - -inf is not formed."""
    return tl.where(largest == -_INF, 0.0, largest)


@triton.jit
def _merged_lse(shift, total):
    return tl.where(total == 0.0, -_INF, shift + tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "heads",
        "lse_a_stride_t",
        "lse_a_stride_h",
        "lse_b_stride_t",
        "lse_b_stride_h",
        "lse_stride_t",
        "lse_stride_h",
    ],
    do_not_specialize_on_alignment=["lse_a_ptr", "lse_b_ptr", "lse_ptr"],
)
def merge_states_kernel(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    heads,
    out_a_stride_t,
    out_a_stride_h,
    lse_a_stride_t,
    lse_a_stride_h,
    out_b_stride_t,
    out_b_stride_h,
    lse_b_stride_t,
    lse_b_stride_h,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge two states, BLOCK_R rows of WIDTH a program."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_mask = rows < num_rows
    columns = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (columns < WIDTH)[None, :]

    lse_a = _load_lse(lse_a_ptr + _offsets(rows, heads, lse_a_stride_t, lse_a_stride_h), row_mask)
    lse_b = _load_lse(lse_b_ptr + _offsets(rows, heads, lse_b_stride_t, lse_b_stride_h), row_mask)
    a_empty = (lse_a == -_INF)[:, None]
    b_empty = (lse_b == -_INF)[:, None]
    shift = _shift(tl.maximum(lse_a, lse_b))
    weight_a = tl.exp(lse_a - shift)
    weight_b = tl.exp(lse_b - shift)
    total = weight_a + weight_b
    divisor = tl.where(total == 0.0, 1.0, total)

    out_a_ptrs = out_a_ptr + _offsets(rows, heads, out_a_stride_t, out_a_stride_h)[:, None] + columns[None, :]
    out_b_ptrs = out_b_ptr + _offsets(rows, heads, out_b_stride_t, out_b_stride_h)[:, None] + columns[None, :]
    out_a = tl.load(out_a_ptrs, mask=mask & ~a_empty, other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptrs, mask=mask & ~b_empty, other=0.0).to(tl.float32)
    merged = out_a * (weight_a / divisor)[:, None] + out_b * (weight_b / divisor)[:, None]
    # A lone side is passed on as it is, the sign of its zeros included.
    merged = tl.where(b_empty, out_a, tl.where(a_empty, out_b, merged))

    # In place, a warp must not overwrite a log-sum-exp that another has yet to read.
    tl.debug_barrier()
    out_ptrs = out_ptr + _offsets(rows, heads, out_stride_t, out_stride_h)[:, None] + columns[None, :]
    tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + _offsets(rows, heads, lse_stride_t, lse_stride_h), _merged_lse(shift, total), mask=row_mask)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "heads",
        "lses_stride_s",
        "lses_stride_t",
        "lses_stride_h",
        "lse_stride_t",
        "lse_stride_h",
    ],
    do_not_specialize_on_alignment=["lses_ptr", "lse_ptr"],
)
def merge_shards_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    heads,
    outs_stride_s,
    outs_stride_t,
    outs_stride_h,
    lses_stride_s,
    lses_stride_t,
    lses_stride_h,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    SHARDS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the states of SHARDS shards, BLOCK_R rows of WIDTH a program."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_mask = rows < num_rows
    columns = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (columns < WIDTH)[None, :]

    # lses[shards, rows], all at once for the largest and the sum.
    shards = tl.arange(0, BLOCK_S)
    row_lse_ptrs = lses_ptr + _offsets(rows, heads, lses_stride_t, lses_stride_h)
    lses = _load_lse(
        row_lse_ptrs[None, :] + shards.to(tl.int64)[:, None] * lses_stride_s,
        (shards < SHARDS)[:, None] & row_mask[None, :],
    )
    shift = _shift(tl.max(lses, 0))
    total = tl.sum(tl.exp(lses - shift[None, :]), 0)
    divisor = tl.where(total == 0.0, 1.0, total)

    # outs[shard, rows, columns]
    outs_ptrs = outs_ptr + _offsets(rows, heads, outs_stride_t, outs_stride_h)[:, None] + columns[None, :]
    merged = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for shard in tl.static_range(SHARDS):
        shard64 = tl.full([], shard, tl.int64)
        lse = _load_lse(row_lse_ptrs + shard64 * lses_stride_s, row_mask)
        shard_mask = mask & (lse != -_INF)[:, None]
        out = tl.load(outs_ptrs + shard64 * outs_stride_s, mask=shard_mask, other=0.0).to(tl.float32)
        merged += out * (tl.exp(lse - shift) / divisor)[:, None]

    out_ptrs = out_ptr + _offsets(rows, heads, out_stride_t, out_stride_h)[:, None] + columns[None, :]
    tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + _offsets(rows, heads, lse_stride_t, lse_stride_h), _merged_lse(shift, total), mask=row_mask)
