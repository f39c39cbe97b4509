# mypy: ignore-errors
"""Decoding of the ternary and micro-scaling formats, and of plain numbers.

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
)
from mla_conformance.kernels.gguf.decode_k import load_crumbs
from mla_conformance.kernels.gguf.decode_legacy import load_nibbles


@triton.jit
def _power_of_3(n):
    """3 to the power of 0 to 4, int32."""
    return tl.where(n == 4, 81, 0x1B090301 >> (n * 8) & 0xFF)


@triton.jit
def decode_tq1_0(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_tq1_0: uint8 qs[48], qh[4], half d -> d * (digit - 1), a byte holding five ternary digits (qh: four).

    Digit n of a byte is the top one of byte * 3**n modulo 256. Elements 0 to 159 are digits 0 to 4, in this order, of
    qs[0:32]; 160 to 239 those of qs[32:48]; 240 to 255 digits 0 to 3 of qh, so a group of these has two digits.
    """
    d = load_f16(ptr, block, 52, ALIGN)
    in_first, in_last = group < 20, group >= 30
    digit = tl.where(in_first, group >> 2, tl.where(in_last, (group - 30) * 2, (group - 20) >> 1))
    at = tl.where(in_first, (group & 3) * 8, tl.where(in_last, 48, 32 + (group & 1) * 8))
    words = tl.join(load_u32(ptr, block, at, ALIGN), load_u32(ptr, block, tl.where(in_last, 48, at + 4), ALIGN))
    powers = tl.join(_power_of_3(digit), _power_of_3(tl.where(in_last, digit + 1, digit)))
    # Two products of 16 bits a word: the even bytes, then the odd ones.
    even = (words & 0x00FF00FF) * powers & 0x00FF00FF
    odd = (words >> 8 & 0x00FF00FF) * powers & 0x00FF00FF
    digits = even * 3 >> 8 & 0x00030003 | odd * 3 & 0x03000300
    return d[:, None] * numbers_of_bytes(digits, 1)


@triton.jit
def decode_tq2_0(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_tq2_0: uint8 qs[64], half d -> d * (q - 1), the 2-bit q laid out as in Q2_K."""
    d = load_f16(ptr, block, 64, ALIGN)
    return d[:, None] * numbers_of_bytes(load_crumbs(ptr, block, group, 0, ALIGN), 1)


@triton.jit
def _twice_e2m1(codes):
    """int32 words [T, 2] of eight e2m1 codes, one a byte -> twice their values, float32 [T, 8]; minus 0 becomes 0.

    The sign, two exponent bits and one mantissa bit of a code are moved to where a float16 has them. That is 2**-14
    times the value, its exponent being biased by 15 and not by 1, subnormal numbers included.
    """
    high_bytes = (codes & 0x08080808) << 4 | (codes & 0x07070707) << 1
    even, odd = high_bytes << 8 & ~0x00FF00FF, high_bytes & ~0x00FF00FF
    halves = tl.join(even, odd)[:, :, None, :] >> (tl.arange(0, 2) * 16)[None, None, :, None]
    return (f16_of(halves) * 32768.0 + 0.0).reshape(codes.shape[0], 8)


@triton.jit
def decode_mxfp4(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_mxfp4: uint8 e, qs[16] -> half of 2**(e - 127), times twice the e2m1 value.

    ggml's rule for every e, 255 included, which the OCP specification makes NaN (ggml_e8m0_to_fp32_half).
    """
    e = load_u8(ptr, block, 0, ALIGN)
    half_scale = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23).to(tl.float32, bitcast=True)
    return half_scale[:, None] * _twice_e2m1(load_nibbles(ptr, block, group, 1, ALIGN))


@triton.jit
def decode_nvfp4(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_nvfp4: uint8 d[4] (UE4M3), qs[32] -> half the sub-block's scale, times twice the e2m1 value.

    A sub-block of 16 has 8 bytes of qs: the low nibbles its first 8 elements, the high nibbles the others. The top bit
    of a scale is ignored, except that code 0x7F alone stands for 0 (ggml_ue4m3_to_fp32).
    """
    sub_block = group >> 1
    code = load_u8(ptr, block, sub_block, ALIGN)
    exponent, mantissa = code >> 3 & 15, code & 7
    half_normal = ((exponent + 119) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
    half_scale = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.0009765625, half_normal)
    half_scale = tl.where(code == 0x7F, 0.0, half_scale)
    words = load_2_words(ptr, block, 4 + sub_block * 8, ALIGN)
    return half_scale[:, None] * _twice_e2m1(words >> ((group & 1) * 4)[:, None] & 0x0F0F0F0F)


@triton.jit
def _load_8_halves(ptr, block, ALIGN: tl.constexpr):
    """Eight consecutive 16-bit numbers in the low half of an int32 [T, 8]."""
    word_0, word_1, word_2, word_3 = load_4_words(ptr, block, 0, ALIGN)
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
    shifts = tl.arange(0, 2) * 16
    return (words[:, :, :, None] >> shifts[None, None, None, :]).reshape(words.shape[0], 8)


@triton.jit
def decode_f16(ptr, block, group, tables, ALIGN: tl.constexpr):
    """Eight float16; they count as a block of 16 bytes with one group."""
    return _load_8_halves(ptr, block, ALIGN).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def decode_bf16(ptr, block, group, tables, ALIGN: tl.constexpr):
    """Eight bfloat16; they count as a block of 16 bytes with one group."""
    return (_load_8_halves(ptr, block, ALIGN) << 16).to(tl.float32, bitcast=True)


@triton.jit
def decode_f32(ptr, block, group, tables, ALIGN: tl.constexpr):
    """Eight float32; they count as a block of 32 bytes with one group."""
    word_0, word_1, word_2, word_3 = load_4_words(ptr, block, 0, ALIGN)
    word_4, word_5, word_6, word_7 = load_4_words(ptr, block, 16, ALIGN)
    even = tl.join(tl.join(word_0, word_4), tl.join(word_2, word_6))
    odd = tl.join(tl.join(word_1, word_5), tl.join(word_3, word_7))
    return tl.join(even, odd).reshape(word_0.shape[0], 8).to(tl.float32, bitcast=True)
