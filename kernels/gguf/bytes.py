# mypy: ignore-errors
"""Reading a block's fields out of global memory in the widest words that its alignment allows.

A decode function makes eight consecutive elements a lane: a *group*. Tensors are therefore [T] (one value a group) or
[T, 8], and a lane owns its row: fields are loaded as [T] words, joined and split in registers, and never pass through
shared memory.

ALIGN is the power of two, 1 to 16, that divides the address of every block. The pointer's elements are words of
min(ALIGN, 4) bytes and ``block`` counts in them; ``at`` is a byte offset inside the block, a number or an int32 [T].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_u8(ptr, block, at, ALIGN: tl.constexpr):
    """The byte at any offset, as int32 0..255 [T]."""
    if ALIGN == 1:
        value = tl.load(ptr + (block + at)).to(tl.int32) & 0xFF
    elif ALIGN == 2:
        value = (tl.load(ptr + (block + (at >> 1))).to(tl.int32) >> ((at & 1) * 8)) & 0xFF
    else:
        value = (tl.load(ptr + (block + (at >> 2))) >> ((at & 3) * 8)) & 0xFF
    return value


@triton.jit
def load_u16(ptr, block, at, ALIGN: tl.constexpr):
    """The little-endian 16-bit number at an even offset, as int32 0..65535 [T]."""
    if ALIGN == 1:
        value = load_u8(ptr, block, at, ALIGN) | (load_u8(ptr, block, at + 1, ALIGN) << 8)
    elif ALIGN == 2:
        value = tl.load(ptr + (block + (at >> 1))).to(tl.int32) & 0xFFFF
    else:
        value = (tl.load(ptr + (block + (at >> 2))) >> ((at & 3) * 8)) & 0xFFFF
    return value


@triton.jit
def _word_at(ptrs, OFFSET: tl.constexpr, ALIGN: tl.constexpr):
    """The little-endian 32-bit number OFFSET bytes from what [T] pointers point to; OFFSET is a multiple of 4."""
    if ALIGN >= 4:
        value = tl.load(ptrs + OFFSET // 4)
    elif ALIGN == 2:
        low = tl.load(ptrs + OFFSET // 2).to(tl.int32) & 0xFFFF
        value = low | tl.load(ptrs + (OFFSET // 2 + 1)).to(tl.int32) << 16
    else:
        value = tl.load(ptrs + OFFSET).to(tl.int32) & 0xFF
        for byte in tl.static_range(1, 4):
            value |= (tl.load(ptrs + (OFFSET + byte)).to(tl.int32) & 0xFF) << byte * 8
    return value


@triton.jit
def _pointers(ptr, block, at, ALIGN: tl.constexpr):
    """Pointers to the word of min(ALIGN, 4) bytes at a byte offset. What is added to them later costs nothing."""
    WORD_SHIFT: tl.constexpr = 2 if ALIGN >= 4 else ALIGN // 2
    return ptr + (block + (at >> WORD_SHIFT))


@triton.jit
def load_u32(ptr, block, at, ALIGN: tl.constexpr):
    """The little-endian 32-bit number at an offset that is a multiple of min(ALIGN, 4), as int32 [T]."""
    return _word_at(_pointers(ptr, block, at, ALIGN), 0, ALIGN)


@triton.jit
def load_2_words(ptr, block, at, ALIGN: tl.constexpr):
    """Two consecutive 32-bit numbers, int32 [T, 2]; ``at`` must be a multiple of min(ALIGN, 8).

    One load where the address is known to be a multiple of 8. Elsewhere a [T, 2] load would be spread over two lanes
    a row, so each number is loaded by itself.
    """
    ptrs = _pointers(ptr, block, at, ALIGN)
    if ALIGN >= 8:
        words = tl.load(ptrs[:, None] + tl.arange(0, 2)[None, :])
    else:
        words = tl.join(_word_at(ptrs, 0, ALIGN), _word_at(ptrs, 4, ALIGN))
    return words


@triton.jit
def load_4_words(ptr, block, FIRST: tl.constexpr, ALIGN: tl.constexpr):
    """Four consecutive words, each int32 [T]; ``FIRST`` must be a multiple of min(ALIGN, 16).

    One 16-byte load where the address is known to be a multiple of 16.
    """
    if ALIGN >= 16:
        words = tl.load(ptr + (block + FIRST // 4)[:, None] + tl.arange(0, 4)[None, :])
        even, odd = tl.split(words.reshape(words.shape[0], 2, 2))
        word_0, word_2 = tl.split(even)
        word_1, word_3 = tl.split(odd)
    else:
        ptrs = _pointers(ptr, block, FIRST, ALIGN)
        word_0 = _word_at(ptrs, 0, ALIGN)
        word_1 = _word_at(ptrs, 4, ALIGN)
        word_2 = _word_at(ptrs, 8, ALIGN)
        word_3 = _word_at(ptrs, 12, ALIGN)
    return word_0, word_1, word_2, word_3


@triton.jit
def split_bytes(words, MASK: tl.constexpr):
    """int32 words [T, 2] -> the eight bytes in memory order, each ANDed with MASK, int32 [T, 8]."""
    shifts = tl.arange(0, 4) * 8
    return ((words[:, :, None] >> shifts[None, None, :]) & MASK).reshape(words.shape[0], 8)


@triton.jit
def split_signed_bytes(words):
    """int32 words [T, 2] -> the eight bytes in memory order, as signed numbers, int32 [T, 8]."""
    shifts = 24 - tl.arange(0, 4) * 8
    return ((words[:, :, None] << shifts[None, None, :]) >> 24).reshape(words.shape[0], 8)


@triton.jit
def numbers_of_bytes(words, MINUS: tl.constexpr):
    """int32 words [T, 2] -> their eight bytes in memory order, as unsigned numbers less MINUS, exact float32 [T, 8].

    A byte placed low in the mantissa of a power of two is that power plus the number, so one float subtraction is
    both the conversion and the offset. The power is chosen by where the byte lies: no byte is shifted by itself.
    """
    at = tl.arange(0, 2) * 8
    power = (150 - at) << 23
    halves = words[:, :, None] >> (tl.arange(0, 2) * 16)[None, None, :]
    sums = (halves[:, :, :, None] & (0xFF << at)[None, None, None, :]) | power[None, None, None, :]
    offset = power.to(tl.float32, bitcast=True) + MINUS
    return (sums.to(tl.float32, bitcast=True) - offset[None, None, None, :]).reshape(words.shape[0], 8)


@triton.jit
def spread_bits(bits):
    """The eight low bits of int32 [T], lowest first, each as a byte 0 or 1: int32 words [T, 2]."""
    # The product moves bit b of a nibble to bits b, b + 7, b + 14 and b + 21, of which one starts a byte.
    nibbles = (bits[:, None] >> (tl.arange(0, 2) * 4)[None, :]) & 15
    return nibbles * 0x00204081 & 0x01010101


@triton.jit
def split_bits(bits):
    """The eight low bits of int32 [T], lowest first, int32 0 or 1 [T, 8]."""
    return (bits[:, None] >> tl.arange(0, 8)[None, :]) & 1


@triton.jit
def f16_of(bits):
    """The float16 whose bits are the 16 low bits of an int32, as float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_f16(ptr, block, at, ALIGN: tl.constexpr):
    """The float16 at an even offset, as float32 [T]."""
    return f16_of(load_u16(ptr, block, at, ALIGN))
