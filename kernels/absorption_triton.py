# mypy: ignore-errors
"""The kernel of ``absorb_query`` and ``v_up_proj``: tokens times one matrix for each head."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def heads_matmul_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    tokens,
    x_token_stride,
    x_head_stride,
    weight_head_stride,
    weight_inner_stride,
    weight_width_stride,
    out_token_stride,
    out_head_stride,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write one tile of ``out[:, head] = x[:, head] @ weight[head]``.

    Axis 0 of the grid counts tiles, those of a row of tiles first, so that neighbours read the same tokens; axis 1
    counts heads. All offsets are 64-bit: indices are widened before they meet a stride.
    """
    WIDTH_TILES: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    rows = (tile // WIDTH_TILES).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = (tile % WIDTH_TILES).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows < tokens
    in_columns = columns < WIDTH
    x_rows = x_ptr + head * x_head_stride + rows[:, None] * x_token_stride
    weight_columns = weight_ptr + head * weight_head_stride + columns[None, :] * weight_width_stride
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for start in range(0, INNER, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        in_inner = inner < INNER
        x = tl.load(x_rows + inner[None, :], mask=in_rows[:, None] & in_inner[None, :], other=0.0)
        weight = tl.load(
            weight_columns + inner.to(tl.int64)[:, None] * weight_inner_stride,
            mask=in_inner[:, None] & in_columns[None, :],
            other=0.0,
        )
        total = tl.dot(x, weight, total, input_precision="ieee")
    out_tile = out_ptr + head * out_head_stride + rows[:, None] * out_token_stride + columns[None, :]
    tl.store(out_tile, total.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])
