# mypy: ignore-errors
"""Decoding of the IQ formats: super-blocks of 256 elements (32 in IQ4_NL) that take a few values each.

Every function takes ``group``, the number of the group of eight inside its block, int32 [T], and returns float32
[T, 8]. ``tables`` points to the format's grid or values (tables.py). The struct of a block is ggml-common.h's.

ggml multiplies in an order of its own (ggml-quants.c, dequantize_row_*). Here each product is exact in float32: a
float16 has 11 significant bits, the multiplier of a sub-block at most 6 and a grid value at most 7. So every order
gives ggml's bits, and the one that costs least is taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_conformance.kernels.gguf.bytes import (
    f16_of,
    load_2_words,
    load_f16,
    load_u8,
    load_u16,
    load_u32,
    split_bits,
    split_bytes,
)


@triton.jit
def _look_up(tables, index, ENTRIES: tl.constexpr):
    """The grid entries at the low bits of ``index``, int32; of a 16-bit entry, the upper half repeats its sign.

    ENTRIES is a power of two: with the index cut to its bits, no pattern of a block reads outside the grid
    (ggml-org/llama.cpp#28581).
    """
    return tl.load(tables + (index & (ENTRIES - 1))).to(tl.int32)


@triton.jit
def _seven_signs(field):
    """Eight sign bits from a field of seven: the eighth makes the number of minus signs even."""
    field = field & 0x7F
    # Bit n of the constant is the parity of n.
    parity = (0x6996 >> ((field ^ (field >> 4)) & 15)) & 1
    return field | (parity << 7)


@triton.jit
def _choose(entry, neither, low, high):
    """float32 [T, 8] of three [T]: ``low`` or ``high`` where the element's bit of the entry's low or high byte is 1."""
    entry = entry & 0xFFFF
    of_two = tl.where(split_bits(entry) != 0, low[:, None], neither[:, None])
    return tl.where(split_bits(entry >> 8) != 0, high[:, None], of_two)


@triton.jit
def _negate(elements, signs):
    """The elements, negated where their bit of ``signs`` is set."""
    # Triton 3.6 compiles -x as 0 - x, which is +0 where x is +0.
    return tl.where(split_bits(signs) != 0, elements * -1.0, elements)


@triton.jit
def _iq1_elements(entry, delta_is_negative, scale):
    """Elements scale * (grid + delta), the grid's values being 0, -1 and 1 and delta 1/8 or -1/8."""
    delta = tl.where(delta_is_negative, -0.125, 0.125)
    return _choose(entry, scale * delta, scale * (delta - 1), scale * (delta + 1))


@triton.jit
def _iq2_elements(entry, signs, scale):
    """Elements scale * grid * sign, the grid's values being 8, 25 and 43."""
    return _negate(_choose(entry, scale * 8, scale * 25, scale * 43), signs)


@triton.jit
def _iq4_elements(tables, words, high_nibbles, scale):
    """Elements scale * value, from the low or high nibbles of eight bytes, int32 [T, 2]."""
    shifts = tl.arange(0, 4) * 8
    codes = (words >> (high_nibbles * 4)[:, None])[:, :, None] >> shifts[None, None, :]
    return scale[:, None] * tl.load(tables + (codes.reshape(words.shape[0], 8) & 15))


@triton.jit
def decode_iq1_s(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_iq1_s: half d, qs[32], uint16 qh[8] -> d * (2 * scale + 1) * (grid + delta).

    A group's grid index is its byte of qs and three bits of qh, which holds four groups' bits, then three of their
    scale and the sign of their delta.
    """
    qh = load_u16(ptr, block, 34 + (group >> 2) * 2, ALIGN)
    high = (qh >> ((group & 3) * 3)) & 7
    entry = _look_up(tables, load_u8(ptr, block, 2 + group, ALIGN) | (high << 8), 2048)
    scale = load_f16(ptr, block, 0, ALIGN) * (((qh >> 11) & 14) + 1).to(tl.float32)
    return _iq1_elements(entry, qh >= 0x8000, scale)


@triton.jit
def decode_iq1_m(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_iq1_m: qs[32], qh[16], uint16 scales[4] -> d * (2 * scale + 1) * (grid + delta).

    A group's grid index is its byte of qs and three bits of its nibble of qh, whose fourth is the sign of delta. Each
    of the scales is four scales of three bits, for 16 elements each, below a quarter of half d, the lowest first.
    """
    nibble = load_u8(ptr, block, 32 + (group >> 1), ALIGN) >> ((group & 1) * 4)
    entry = _look_up(tables, load_u8(ptr, block, group, ALIGN) | ((nibble & 7) << 8), 2048)
    low, high = tl.split(load_2_words(ptr, block, 48, ALIGN))
    d = ((low >> 12) & 0xF) | ((low >> 24) & 0xF0) | ((high >> 4) & 0xF00) | ((high >> 16) & 0xF000)
    step = (tl.where(group < 16, low, high) >> ((group & 8) * 2 + ((group >> 1) & 3) * 3)) & 7
    return _iq1_elements(entry, (nibble & 8) != 0, f16_of(d) * (step * 2 + 1).to(tl.float32))


@triton.jit
def decode_iq2_xxs(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_iq2_xxs: half d, uint16 qs[32] -> d * (scale + 1/2) / 4 * grid * sign.

    Eight bytes of qs serve 32 elements: four grid indices, then a word with four times seven signs and a 4-bit scale.
    """
    part = 2 + (group >> 2) * 8
    word = load_u32(ptr, block, part + 4, ALIGN)
    entry = _look_up(tables, load_u8(ptr, block, part + (group & 3), ALIGN), 256)
    scale = load_f16(ptr, block, 0, ALIGN) * (((word >> 28) & 15).to(tl.float32) * 0.25 + 0.125)
    return _iq2_elements(entry, _seven_signs(word >> ((group & 3) * 7)), scale)


@triton.jit
def decode_iq2_xs(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_iq2_xs: half d, uint16 qs[32], scales[8] -> d * (scale + 1/2) / 4 * grid * sign.

    A group's number of qs is a grid index of nine bits below seven signs; a nibble of scales serves 16 elements.
    """
    qs = load_u16(ptr, block, 2 + group * 2, ALIGN)
    step = (load_u8(ptr, block, 66 + (group >> 2), ALIGN) >> ((group & 2) * 2)) & 15
    scale = load_f16(ptr, block, 0, ALIGN) * (step.to(tl.float32) * 0.25 + 0.125)
    return _iq2_elements(_look_up(tables, qs, 512), _seven_signs(qs >> 9), scale)


@triton.jit
def decode_iq2_s(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_iq2_s: half d, qs[32], signs[32], qh[8], scales[8] -> d * (scale + 1/2) / 4 * grid * sign.

    A group's grid index is its byte of qs and two bits of qh; a nibble of scales serves 16 elements.
    """
    high = (load_u8(ptr, block, 66 + (group >> 2), ALIGN) >> ((group & 3) * 2)) & 3
    entry = _look_up(tables, load_u8(ptr, block, 2 + group, ALIGN) | (high << 8), 1024)
    step = (load_u8(ptr, block, 74 + (group >> 2), ALIGN) >> ((group & 2) * 2)) & 15
    scale = load_f16(ptr, block, 0, ALIGN) * (step.to(tl.float32) * 0.25 + 0.125)
    return _iq2_elements(entry, load_u8(ptr, block, 34 + group, ALIGN), scale)


@triton.jit
def decode_iq3_xxs(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_iq3_xxs: half d, qs[64], uint32 words[8] -> d * (scale + 1/2) / 2 * grid * sign.

    A byte of qs is the grid index of four elements; a word holds four times seven signs and the 4-bit scale of 32.
    """
    qs = load_u16(ptr, block, 2 + group * 2, ALIGN)
    word = load_u32(ptr, block, 66 + (group >> 2) * 4, ALIGN)
    grid = split_bytes(tl.join(_look_up(tables, qs, 256), _look_up(tables, qs >> 8, 256)), 0xFF)
    scale = load_f16(ptr, block, 0, ALIGN) * (((word >> 28) & 15).to(tl.float32) * 0.5 + 0.25)
    return _negate(scale[:, None] * grid.to(tl.float32), _seven_signs(word >> ((group & 3) * 7)))


@triton.jit
def decode_iq3_s(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_iq3_s: half d, qs[64], qh[8], signs[32], scales[4] -> d * (2 * scale + 1) * grid * sign.

    A byte of qs and a bit of qh are the grid index of four elements; a nibble of scales serves 32.
    """
    qs = load_u16(ptr, block, 2 + group * 2, ALIGN)
    high = load_u8(ptr, block, 66 + (group >> 2), ALIGN) >> ((group & 3) * 2)
    first = _look_up(tables, (qs & 0xFF) | ((high & 1) << 8), 512)
    second = _look_up(tables, (qs >> 8) | ((high & 2) << 7), 512)
    step = (load_u8(ptr, block, 106 + (group >> 3), ALIGN) >> (group & 4)) & 15
    scale = load_f16(ptr, block, 0, ALIGN) * (step * 2 + 1).to(tl.float32)
    grid = ((first & 0xFFFF) | (second << 16))[:, None] >> (tl.arange(0, 8) * 4)[None, :]
    return _negate(scale[:, None] * (grid & 15).to(tl.float32), load_u8(ptr, block, 74 + group, ALIGN))


@triton.jit
def decode_iq4_nl(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_iq4_nl: half d, qs[16] -> d * values[q]; the low nibbles are the first 16 elements."""
    words = load_2_words(ptr, block, 2 + (group & 1) * 8, ALIGN)
    return _iq4_elements(tables, words, group >> 1, load_f16(ptr, block, 0, ALIGN))


@triton.jit
def decode_iq4_xs(ptr, block, group, tables, ALIGN: tl.constexpr):
    """block_iq4_xs: half d, uint16 scales_h, scales_l[4], qs[128] -> d * (scale - 32) * values[q].

    The scale of 32 elements is a nibble of scales_l below two bits of scales_h; their 16 bytes are as in IQ4_NL.
    """
    part = group >> 2
    low = load_u8(ptr, block, 4 + (part >> 1), ALIGN) >> ((part & 1) * 4)
    high = load_u16(ptr, block, 2, ALIGN) >> (part * 2)
    scale = load_f16(ptr, block, 0, ALIGN) * (((low & 15) | ((high & 3) << 4)) - 32).to(tl.float32)
    words = load_2_words(ptr, block, 8 + part * 16 + (group & 1) * 8, ALIGN)
    return _iq4_elements(tables, words, (group >> 1) & 1, scale)
