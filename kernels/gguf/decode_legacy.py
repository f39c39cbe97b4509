# mypy: ignore-errors
"""Decoding of the formats whose blocks of 32 (Q1_0: 128) elements have one scale and at most one minimum.

Every function takes ``group``, the number of the group of eight inside its block, int32 [T], and returns float32
[T, 8]; bytes.py explains the other arguments. The arithmetic is ggml's in float32, operation by operation
(ggml-quants.c, dequantize_row_*; the structs are in ggml-common.h). The 16 bytes of 4-bit numbers hold elements 0 to 15
in their low nibbles and 16 to 31 in the high ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_conformance.kernels.gguf.bytes import (
    f16_of,
    load_2_words,
    load_f16,
    load_u8,
    load_u32,
    numbers_of_bytes,
    split_signed_bytes,
    spread_bits,
)


@triton.jit
def load_nibbles(ptr, block, group, FIRST: tl.constexpr, ALIGN: tl.constexpr):
    """The group's 4-bit numbers out of the 16 bytes from offset FIRST, one a byte, int32 words [T, 2]."""
    words = load_2_words(ptr, block, FIRST + (group & 1) * 8, ALIGN)
    return words >> ((group >> 1) * 4)[:, None] & 0x0F0F0F0F


@triton.jit
def decode_q4_0(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q4_0: half d, uint8 qs[16] -> d * (q - 8)."""
    d = load_f16(ptr, block, 0, ALIGN)
    return d[:, None] * numbers_of_bytes(load_nibbles(ptr, block, group, 2, ALIGN), 8)


@triton.jit
def decode_q4_1(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q4_1: half d, half m, uint8 qs[16] -> d * q + m."""
    both = load_u32(ptr, block, 0, ALIGN)
    q = numbers_of_bytes(load_nibbles(ptr, block, group, 4, ALIGN), 0)
    return f16_of(both)[:, None] * q + f16_of(both >> 16)[:, None]


@triton.jit
def decode_q5_0(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q5_0: half d, uint8 qh[4] (bit e is the fifth bit of element e), qs[16] -> d * (q - 16)."""
    d = load_f16(ptr, block, 0, ALIGN)
    fifth = spread_bits(load_u8(ptr, block, 2 + group, ALIGN))
    return d[:, None] * numbers_of_bytes(load_nibbles(ptr, block, group, 6, ALIGN) | fifth << 4, 16)


@triton.jit
def decode_q5_1(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q5_1: half d, half m, uint8 qh[4] (bit e is the fifth bit of element e), qs[16] -> d * q + m."""
    both = load_u32(ptr, block, 0, ALIGN)
    fifth = spread_bits(load_u8(ptr, block, 4 + group, ALIGN))
    q = numbers_of_bytes(load_nibbles(ptr, block, group, 8, ALIGN) | fifth << 4, 0)
    return f16_of(both)[:, None] * q + f16_of(both >> 16)[:, None]


@triton.jit
def decode_q8_0(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q8_0: half d, int8 qs[32] -> d * q."""
    d = load_f16(ptr, block, 0, ALIGN)
    q = split_signed_bytes(load_2_words(ptr, block, 2 + group * 8, ALIGN))
    return d[:, None] * q.to(tl.float32)


@triton.jit
def decode_q8_1(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q8_1: half d, half s (d times the sum, not needed here), int8 qs[32] -> d * q."""
    d = load_f16(ptr, block, 0, ALIGN)
    q = split_signed_bytes(load_2_words(ptr, block, 4 + group * 8, ALIGN))
    return d[:, None] * q.to(tl.float32)


@triton.jit
def decode_q1_0(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q1_0: half d, uint8 qs[16], bit e for element e -> d where it is set, -d where not."""
    d = load_f16(ptr, block, 0, ALIGN)
    return d[:, None] * numbers_of_bytes(spread_bits(load_u8(ptr, block, 2 + group, ALIGN)) << 1, 1)
