# mypy: ignore-errors
"""The kernel of ``gather_kv_cache``: one program a row of the output, in one of three row formats."""

from __future__ import annotations

import triton
import triton.language as tl

_GROUP = tl.constexpr(128)
_E4M3_NAN = tl.constexpr(0x7F)
_NAN_BITS = tl.constexpr(-1)
"""All bits set: a NaN in every floating dtype, whatever its width."""


@triton.jit
def _request_of_row(row, cu_seqlens_ptr, cu_stride, batch, search_steps):
    """The last request that starts at ``row`` or before it, by bisection; requests without tokens are passed over."""
    low = tl.zeros([], tl.int64)
    high = low + batch
    for _ in range(search_steps):
        middle = (low + high) // 2
        starts_before = tl.load(cu_seqlens_ptr + middle * cu_stride) <= row
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle)
    return low


@triton.jit
def _e4m3_values(ptrs, mask):
    """E4m3 bytes as float32; NaN where the mask is false."""
    return tl.load(ptrs, mask=mask, other=_E4M3_NAN).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit(
    do_not_specialize=[
        "batch",
        "search_steps",
        "num_pages",
        "table_width",
        "table_stride_b",
        "table_stride_w",
        "cu_stride",
        "starts_stride",
    ],
    do_not_specialize_on_alignment=["table_ptr", "cu_seqlens_ptr", "seq_starts_ptr", "k_scale_ptr"],
)
def gather_kv_cache_kernel(
    cache_ptr,
    table_ptr,
    cu_seqlens_ptr,
    seq_starts_ptr,
    k_scale_ptr,
    out_ptr,
    k_scale,
    batch,
    search_steps,
    num_pages,
    table_width,
    page_stride,
    row_stride,
    table_stride_b,
    table_stride_w,
    cu_stride,
    starts_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Write one row of the output, or nothing if no request has it.

    FORMAT "same": cache and output are integers as wide as the elements, and are copied. "e4m3": the cache is bytes;
    elements are multiplied by the scale, in memory or an argument. "grouped": the cache is bytes, LATENT of them e4m3
    with a float32 scale for every 128 behind them, and then ROPE elements of 16 bits, which are copied.

    A row whose position lies outside the table, or whose page lies outside the cache, is not looked for and becomes
    NaN: masked loads stand in for it. The position is 64-bit, because a start and a row may add to more than 2**31.
    """
    row = tl.program_id(0).to(tl.int64)
    first_row = tl.load(cu_seqlens_ptr)
    end_row = tl.load(cu_seqlens_ptr + batch.to(tl.int64) * cu_stride)
    if (row >= first_row) & (row < end_row):
        request = _request_of_row(row, cu_seqlens_ptr, cu_stride, batch, search_steps)
        position = row - tl.load(cu_seqlens_ptr + request * cu_stride)
        if seq_starts_ptr is not None:
            position += tl.load(seq_starts_ptr + request * starts_stride)
        entry = position // PAGE_SIZE
        named = (position >= 0) & (entry < table_width)
        # block_table[request, entry]
        page = tl.load(table_ptr + request * table_stride_b + entry * table_stride_w, mask=named, other=-1).to(tl.int64)
        found = (page >= 0) & (page < num_pages)
        # kv_cache[page, position % PAGE_SIZE, :] and out[row, :]
        row_ptr = cache_ptr + page * page_stride + position % PAGE_SIZE * row_stride
        out_row_ptr = out_ptr + row * out_stride
        if FORMAT == "grouped":
            GROUPS: tl.constexpr = LATENT // _GROUP
            groups = tl.arange(0, GROUPS)
            columns = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
            values = _e4m3_values(row_ptr + columns, found)
            scale_ptr = (row_ptr + LATENT).to(tl.pointer_type(tl.float32))
            scales = tl.load(scale_ptr + groups, mask=found, other=1.0)
            tl.store(out_row_ptr + columns, (values * scales[:, None]).to(out_ptr.dtype.element_ty))
            rope = tl.arange(0, ROPE)
            rope_ptr = (row_ptr + LATENT + GROUPS * 4).to(tl.pointer_type(tl.int16))
            rope_out_ptr = (out_row_ptr + LATENT).to(tl.pointer_type(tl.int16))
            tl.store(rope_out_ptr + rope, tl.load(rope_ptr + rope, mask=found, other=_NAN_BITS))
        else:
            columns = tl.arange(0, BLOCK)
            in_row = columns < WIDTH
            if FORMAT == "e4m3":
                scale = k_scale if k_scale_ptr is None else tl.load(k_scale_ptr)
                values = _e4m3_values(row_ptr + columns, in_row & found) * scale
                tl.store(out_row_ptr + columns, values.to(out_ptr.dtype.element_ty), mask=in_row)
            else:
                bits = tl.load(row_ptr + columns, mask=in_row & found, other=_NAN_BITS)
                tl.store(out_row_ptr + columns, bits, mask=in_row)
