# mypy: ignore-errors
"""The kernel of ``dequantize``, one for all formats: which it is says the DECODE argument."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["groups", "row_units"])
def dequantize_kernel(
    data_ptr,
    out_ptr,
    tables_ptr,
    groups,
    row_units,
    out_stride,
    DECODE: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Decode BLOCK_GROUPS groups of eight elements of one row; a row has ``groups`` of them. Axis 1 is the row.

    A lane decodes whole groups and keeps them in its registers: eight half-precision results are one 16-byte store.

    Where a program starts is 64-bit, because a matrix may have more than 2**31 elements; what lies between there and a
    lane's group fits 32 bits. Rows are ``row_units`` times ALIGN bytes apart, so that the compiler knows the alignment.
    """
    WORD: tl.constexpr = min(ALIGN, 4)
    GROUPS_IN_BLOCK: tl.constexpr = BLOCK_ELEMENTS // 8
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK_GROUPS
    left = tl.minimum(groups - first, BLOCK_GROUPS).to(tl.int32)

    group = tl.arange(0, BLOCK_GROUPS)
    # Behind the end of the row its last group is decoded again, and not stored, so that no load needs a mask.
    readable = tl.minimum(group, left - 1)
    tile_ptr = data_ptr + (row * row_units * (ALIGN // WORD) + first // GROUPS_IN_BLOCK * (BLOCK_BYTES // WORD))
    # Unsigned, because dividing a signed number by a power of two is more than a shift.
    block = (readable.to(tl.uint32) // GROUPS_IN_BLOCK).to(tl.int32) * (BLOCK_BYTES // WORD)
    values = DECODE(tile_ptr, block, readable & (GROUPS_IN_BLOCK - 1), tables_ptr, ALIGN)

    out_ptrs = out_ptr + (row * out_stride + first * 8) + (group[:, None] * 8 + tl.arange(0, 8)[None, :])
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=(group < left)[:, None])
