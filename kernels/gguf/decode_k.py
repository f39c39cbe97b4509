# mypy: ignore-errors
"""Decoding of the K formats: blocks of 256 elements whose sub-blocks of 16 or 32 have small integer scales.

Every function takes ``group``, the number of the group of eight inside its block, int32 [T], and returns float32
[T, 8]; bytes.py explains the other arguments. The arithmetic is ggml's in float32, operation by operation
(ggml-quants.c, dequantize_row_*; the structs are in ggml-common.h).
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_conformance.kernels.gguf.bytes import (
    f16_of,
    load_2_words,
    load_4_words,
    load_f16,
    load_u8,
    load_u32,
    numbers_of_bytes,
    split_signed_bytes,
)


@triton.jit
def load_crumbs(ptr, block, group, FIRST: tl.constexpr, ALIGN: tl.constexpr):
    """The group's 2-bit numbers out of the 64 bytes from offset FIRST, one a byte, int32 words [T, 2].

    32 bytes hold 128 elements: bits 0 and 1 the first 32, bits 2 and 3 the next, and so on.
    """
    words = load_2_words(ptr, block, FIRST + (group >> 4) * 32 + (group & 3) * 8, ALIGN)
    return words >> ((group >> 2 & 3) * 2)[:, None] & 0x03030303


@triton.jit
def _load_bits(ptr, block, group, FIRST: tl.constexpr, ALIGN: tl.constexpr):
    """The group's single bits out of the 32 bytes from offset FIRST, one a byte, int32 words [T, 2].

    Bit b of byte l belongs to element 32 * b + l.
    """
    words = load_2_words(ptr, block, FIRST + (group & 3) * 8, ALIGN)
    return words >> (group >> 2)[:, None] & 0x01010101


@triton.jit
def decode_q2_k(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q2_K: uint8 scales[16], qs[64], half d, half dmin -> d * scale * q - dmin * min.

    A sub-block of 16 has its scale in the low and its minimum in the high nibble of its byte of scales.
    """
    both = load_u32(ptr, block, 80, ALIGN)
    scales = load_u8(ptr, block, group >> 1, ALIGN)
    scale = f16_of(both) * (scales & 15).to(tl.float32)
    minimum = f16_of(both >> 16) * (scales >> 4).to(tl.float32)
    q = numbers_of_bytes(load_crumbs(ptr, block, group, 16, ALIGN), 0)
    return scale[:, None] * q - minimum[:, None]


@triton.jit
def decode_q3_k(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q3_K: uint8 hmask[32], qs[64], scales[12], half d -> d * (scale - 32) * (q - 4).

    q has its third bit in hmask. Sub-block s of 16 has the low four bits of its scale in a nibble of scales[s % 8], and
    two more in bits 2 * (s // 4) and up of scales[8 + s % 4].
    """
    d = load_f16(ptr, block, 108, ALIGN)
    sub_block = group >> 1
    low = load_u8(ptr, block, 96 + (sub_block & 7), ALIGN) >> (sub_block >> 3 << 2) & 15
    high = load_u8(ptr, block, 104 + (sub_block & 3), ALIGN) >> (sub_block >> 2 << 1) & 3
    scale = d * ((low | high << 4) - 32).to(tl.float32)
    third = _load_bits(ptr, block, group, 0, ALIGN)
    return scale[:, None] * numbers_of_bytes(load_crumbs(ptr, block, group, 32, ALIGN) | third << 2, 4)


@triton.jit
def _scale_and_min(ptr, block, group, ALIGN: tl.constexpr):
    """Scale and minimum of the group's sub-block of 32, d * scale and dmin * min: float32 [T] each (get_scale_min_k4).

    The block starts with half d, half dmin and 12 bytes that hold eight 6-bit scales and minima: bytes 0 to 3 the first
    four scales, 4 to 7 the first four minima, 8 to 11 the low nibbles of the other four of both, whose two high bits
    are on top of bytes 0 to 7.
    """
    both, scales, mins, low = load_4_words(ptr, block, 0, ALIGN)
    sub_block = group >> 2
    shift = (sub_block & 3) * 8
    scales, mins, low = scales >> shift, mins >> shift, low >> shift
    in_first_half = sub_block < 4
    scale = tl.where(in_first_half, scales & 63, low & 15 | scales >> 2 & 48)
    minimum = tl.where(in_first_half, mins & 63, low >> 4 & 15 | mins >> 2 & 48)
    return f16_of(both) * scale.to(tl.float32), f16_of(both >> 16) * minimum.to(tl.float32)


@triton.jit
def _load_nibbles(ptr, block, group, FIRST: tl.constexpr, ALIGN: tl.constexpr):
    """The group's 4-bit numbers out of the 128 bytes from offset FIRST, one a byte, int32 words [T, 2].

    32 bytes hold 64 elements: the low nibbles the first 32, the high nibbles the others.
    """
    words = load_2_words(ptr, block, FIRST + (group >> 3) * 32 + (group & 3) * 8, ALIGN)
    return words >> (group & 4)[:, None] & 0x0F0F0F0F


@triton.jit
def decode_q4_k(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q4_K: half d, half dmin, uint8 scales[12], qs[128] -> d * scale * q - dmin * min."""
    scale, minimum = _scale_and_min(ptr, block, group, ALIGN)
    q = numbers_of_bytes(_load_nibbles(ptr, block, group, 16, ALIGN), 0)
    return scale[:, None] * q - minimum[:, None]


@triton.jit
def decode_q5_k(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q5_K: half d, half dmin, uint8 scales[12], qh[32], qs[128] -> d * scale * q - dmin * min.

    q has its fifth bit in qh.
    """
    scale, minimum = _scale_and_min(ptr, block, group, ALIGN)
    fifth = _load_bits(ptr, block, group, 16, ALIGN)
    q = numbers_of_bytes(_load_nibbles(ptr, block, group, 48, ALIGN) | fifth << 4, 0)
    return scale[:, None] * q - minimum[:, None]


@triton.jit
def decode_q6_k(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q6_K: uint8 ql[128], qh[64], int8 scales[16], half d -> d * scale * (q - 32).

    64 bytes of ql hold 128 elements: the low nibbles the first 64, the high nibbles the others. qh has two more bits.
    """
    d = load_f16(ptr, block, 208, ALIGN)
    scale = load_u8(ptr, block, 192 + (group >> 1), ALIGN) << 24 >> 24
    words = load_2_words(ptr, block, (group >> 4) * 64 + (group & 7) * 8, ALIGN)
    low = words >> (group >> 1 & 4)[:, None] & 0x0F0F0F0F
    q = numbers_of_bytes(low | load_crumbs(ptr, block, group, 128, ALIGN) << 4, 32)
    return (d * scale.to(tl.float32))[:, None] * q


@triton.jit
def decode_q8_k(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_q8_K: float d, int8 qs[256], int16 bsums[16] (sums of qs, not needed here) -> d * q."""
    d = load_u32(ptr, block, 0, ALIGN).to(tl.float32, bitcast=True)
    q = split_signed_bytes(load_2_words(ptr, block, 4 + group * 8, ALIGN))
    return d[:, None] * q.to(tl.float32)
