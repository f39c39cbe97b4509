# mypy: ignore-errors
"""Kernels of ``matmul``: up to 16 tokens times a quantised matrix, decoded in registers, and the sum of its slices.

A program is one warp. It takes BLOCK_N rows of the matrix and a slice of the columns, and always a tile of 16 tokens,
so a token's bits do not depend on how many there are.

The decoded numbers go from the lane that decodes them into the tensor core without passing through shared memory. Of
32 columns of its operands, a lane of ``mma`` holds eight: count the columns in runs of two (or four, or eight:
Triton's kWidth), and they are the runs whose number is q modulo 4, as the lane's is. But a sum may be taken in any
order. So the columns are renamed, those of the matrix and those of the tokens alike: what the multiplication takes for
the eight columns of lane q is group q of eight consecutive columns, which lane q decodes and loads whole. If Triton
should choose another run than RUN, it moves the numbers between lanes: slower, and no less right.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GROUP = tl.constexpr(8)
# Columns of one multiplication: a group for each of the four lanes that share a row.
_CHUNK = tl.constexpr(32)
_TOKENS = tl.constexpr(16)


@triton.jit
def _decode_chunk(
    rows_ptr,
    row_words,
    quarter,
    first_group,
    groups,
    tables_ptr,
    pin_ptrs,
    never,
    X_DTYPE: tl.constexpr,
    DECODE: tl.constexpr,
    LOG2_GROUPS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    ALIGN: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Groups first_group to first_group + 3 of each row, rounded to X_DTYPE, [4 BLOCK_N, 8]; zeros past a row's end."""
    LAST_OF_BLOCK: tl.constexpr = 2**LOG2_GROUPS - 1
    if EVEN:
        # Four groups lie in one block, or in four (plain numbers): the block number is a scalar for all others.
        block = row_words + (first_group >> LOG2_GROUPS) * BLOCK_WORDS + (quarter >> LOG2_GROUPS) * BLOCK_WORDS
        group = (first_group & LAST_OF_BLOCK) + (quarter & LAST_OF_BLOCK)
        weights = DECODE(rows_ptr, block, group, tables_ptr, ALIGN)
    else:
        readable = tl.minimum(first_group + quarter, groups - 1)
        block = row_words + (readable >> LOG2_GROUPS).to(tl.int64) * BLOCK_WORDS
        weights = DECODE(rows_ptr, block, readable & LAST_OF_BLOCK, tables_ptr, ALIGN)
        weights = tl.where((first_group + quarter < groups)[:, None], weights, 0.0)
    weights = weights.to(X_DTYPE)
    if X_DTYPE.primitive_bitwidth == 16:
        # Loads nothing: Triton gives the result of a load the layout that its addresses suggest, here a group a lane.
        # Without it, it derives one from the multiplication and moves every number twice.
        weights = tl.load(pin_ptrs, mask=never, other=weights)
    return weights


@triton.jit
def _renamed(values, RUN: tl.constexpr):
    """Columns 8 q + RUN j + i of [N, 32] as columns 4 RUN j + RUN q + i."""
    return values.reshape(values.shape[0], 4, 8 // RUN, RUN).permute(0, 2, 1, 3).reshape(values.shape[0], _CHUNK)


@triton.jit(do_not_specialize=["tokens", "rows", "groups", "split_steps", "out_stride_s", "out_stride_t"])
def matmul_kernel(
    x_ptr,
    words_ptr,
    tables_ptr,
    out_ptr,
    tokens,
    rows,
    groups,
    split_steps,
    x_stride,
    row_units,
    out_stride_s,
    out_stride_t,
    DECODE: tl.constexpr,
    LOG2_GROUPS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    RUN: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Slice ``program_id(1)`` of the product of all tokens with rows ``program_id(0) * BLOCK_N`` and following.

    out[slice, token, row] is written for existing tokens and rows only. ``groups`` is the number of groups of eight a
    row; EVEN says that they fill whole steps. LOG2_GROUPS is the base-2 logarithm of the groups a block.
    """
    WORD: tl.constexpr = min(ALIGN, 4)
    X_DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_N
    split = tl.program_id(1)

    # Unit 4 r + q is group q of row r. Rows past the end read the last one again and are not stored.
    unit = tl.arange(0, BLOCK_N * 4)
    quarter = unit & 3
    last_row = rows - 1 - first_row
    row_words = tl.minimum((unit >> 2).to(tl.int64), last_row) * row_units * (ALIGN // WORD)
    rows_ptr = words_ptr + first_row * row_units * (ALIGN // WORD)
    # See _decode_chunk; there is at least one token.
    pin_ptrs = x_ptr + (unit[:, None] * 8 + tl.arange(0, 8)[None, :])
    never = (unit < -tokens)[:, None]

    token = tl.arange(0, _TOKENS)
    column = tl.arange(0, _CHUNK)
    x_ptrs = x_ptr + token[:, None].to(tl.int64) * x_stride + column[None, :]
    x_mask = (token < tokens)[:, None]

    acc = tl.zeros([BLOCK_N, _TOKENS], tl.float32)
    steps = (groups * _GROUP + STEP - 1) // STEP
    for step in range(split * split_steps, tl.minimum((split + 1) * split_steps, steps)):
        for chunk in tl.static_range(STEP // _CHUNK):
            first = step * STEP + chunk * _CHUNK
            if EVEN:
                x = tl.load(x_ptrs + first, mask=x_mask, other=0.0)
            else:
                x = tl.load(x_ptrs + first, mask=x_mask & (first + column < groups * _GROUP)[None, :], other=0.0)
            weights = _decode_chunk(
                rows_ptr,
                row_words,
                quarter,
                first // _GROUP,
                groups,
                tables_ptr,
                pin_ptrs,
                never,
                X_DTYPE,
                DECODE,
                LOG2_GROUPS,
                BLOCK_BYTES // WORD,
                ALIGN,
                EVEN,
            )
            weights = _renamed(weights.reshape(BLOCK_N, _CHUNK), RUN)
            acc = tl.dot(weights, tl.trans(_renamed(x, RUN)), acc=acc, input_precision="ieee")

    row = tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + (split.to(tl.int64) * out_stride_s + first_row)
    out_ptrs = out_ptrs + token[None, :].to(tl.int64) * out_stride_t + row[:, None]
    stored = (row <= last_row)[:, None] & (token < tokens)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["rows", "splits", "out_stride_t"])
def matmul_merge_kernel(partial_ptr, out_ptr, rows, splits, out_stride_t, BLOCK_N: tl.constexpr):
    """out[token, row] = the sum of partial[slice, token, row] in float32, slice by slice, rounded once."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64)
    in_matrix = row < rows
    partial_ptrs = partial_ptr + token * rows + row
    total = tl.zeros([BLOCK_N], tl.float32)
    for _ in range(splits):
        total += tl.load(partial_ptrs, mask=in_matrix, other=0.0)
        partial_ptrs += tl.num_programs(1).to(tl.int64) * rows
    tl.store(out_ptr + token * out_stride_t + row, total.to(out_ptr.dtype.element_ty), mask=in_matrix)
