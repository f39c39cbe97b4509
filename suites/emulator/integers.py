"""Integer, bit and byte instructions of PTX on NumPy arrays.

Operands keep their register's dtype (uint16 to uint64, int16 to int64); positions, lengths and shift amounts are
uint32. Sums and products wrap; no function changes its arguments. Sources: PTX ISA, "Integer Arithmetic Instructions",
"Logic and Shift Instructions" and, for prmt, "Data Movement and Conversion Instructions".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
U32 = npt.NDArray[np.uint32]

_DOUBLE = {"u2": "u4", "u4": "u8", "i2": "i4", "i4": "i8"}
_ONE = np.uint64(1)
_ALL_ONES = np.uint64(2**64 - 1)
_LOW_HALF = np.uint64(0xFFFFFFFF)


REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
"""The operations of atom, red, redux and cp.reduce on integers (PTX ISA, 9.7.13)."""


def _width(a: Array) -> int:
    return 8 * a.dtype.itemsize


def _unsigned(a: Array) -> Array:
    return a.view(f"u{a.dtype.itemsize}")


def mul_wide(a: Array, b: Array) -> Array:
    """mul.wide: the whole product in twice the width (16 or 32 bits in)."""
    return np.asarray(np.multiply(a, b, dtype=_DOUBLE[a.dtype.str[1:]]))


def mul_hi(a: Array, b: Array) -> Array:
    """mul.hi: the upper half of the product, for 16, 32 and 64 bits."""
    if a.dtype.itemsize < 8:
        return np.asarray((mul_wide(a, b) >> _width(a)).astype(a.dtype))
    x, y = np.asarray(_unsigned(a)), np.asarray(_unsigned(b))
    x_low, x_high, y_low, y_high = x & _LOW_HALF, x >> 32, y & _LOW_HALF, y >> 32
    cross = x_high * y_low + ((x_low * y_low) >> 32)
    middle = x_low * y_high + (cross & _LOW_HALF)
    high = x_high * y_high + (cross >> 32) + (middle >> 32)
    if a.dtype.kind == "i":  # a negative operand stands for itself minus 2**64
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return np.asarray(high).view(a.dtype)


def mul24(a: Array, b: Array, high: bool = False) -> Array:
    """mul24 of 32-bit registers: bits 31..0, or with `high` 47..16, of the product of their low 24 bits."""
    x, y = ((np.left_shift(v, 8) >> 8).astype(np.int64) for v in (a, b))
    product = x * y
    return np.asarray((product >> 16 if high else product).astype(a.dtype))


def divide(a: Array, b: Array) -> Array:
    """div: the quotient truncated towards zero.

    PTX leaves division by zero to the machine; here it gives all ones. The smallest integer over -1 gives itself.
    """
    x, y = (np.asarray(v) for v in np.broadcast_arrays(a, b))
    by_zero = y == 0
    if x.dtype.kind == "u":
        quotient = x // np.where(by_zero, y.dtype.type(1), y)
        return np.where(by_zero, y.dtype.type(np.iinfo(y.dtype).max), quotient)
    divisor = np.where(by_zero, _unsigned(y).dtype.type(1), _magnitude(y))
    magnitude = _magnitude(x) // divisor
    quotient = np.where((x < 0) != (y < 0), 0 - magnitude, magnitude).view(x.dtype)
    return np.where(by_zero, x.dtype.type(-1), quotient)


def _magnitude(a: Array) -> Array:
    bits = np.asarray(_unsigned(a))
    return np.where(a < 0, 0 - bits, bits)


def remainder(a: Array, b: Array) -> Array:
    """rem: a minus the truncated quotient times b; the dividend where b is 0."""
    return np.asarray(np.subtract(a, np.multiply(divide(a, b), b)))


def add_sat(a: Array, b: Array) -> Array:
    """add.sat.s32: the sum clamped to the range of int32."""
    return saturate(np.add(a, b, dtype=np.int64), np.int32)


def sub_sat(a: Array, b: Array) -> Array:
    """sub.sat.s32: the difference clamped to the range of int32."""
    return saturate(np.subtract(a, b, dtype=np.int64), np.int32)


def saturate(x: Array, dtype: npt.DTypeLike) -> Array:
    """cvt.sat between integers: x clamped to the range of `dtype`."""
    source, target = np.iinfo(x.dtype), np.iinfo(np.dtype(dtype))
    low, high = max(source.min, target.min), min(source.max, target.max)
    return np.asarray(np.clip(x, low, high).astype(dtype))


def sad(a: Array, b: Array, c: Array) -> Array:
    """sad: c plus the absolute difference of a and b."""
    return np.asarray(np.add(c, np.subtract(np.maximum(a, b), np.minimum(a, b))))


def _bytes_of(word: Array, signed: bool) -> list[npt.NDArray[np.int64]]:
    parts = [(np.right_shift(_unsigned(word), 8 * i) & 255).astype(np.int64) for i in range(4)]
    return [(part ^ 128) - 128 for part in parts] if signed else parts


def dp4a(a: Array, b: Array, c: Array, a_signed: bool, b_signed: bool) -> Array:
    """dp4a: c plus the dot product of the four bytes of a and b (32-bit words); the dtype is c's."""
    products = zip(_bytes_of(a, a_signed), _bytes_of(b, b_signed), strict=True)
    return np.asarray(sum((x * y for x, y in products), c.astype(np.int64)).astype(c.dtype))


def dp2a(a: Array, b: Array, c: Array, a_signed: bool, b_signed: bool, high: bool = False) -> Array:
    """dp2a: c plus the dot product of the two halves of a with the lower (or `high`) two bytes of b."""
    halves = [(np.right_shift(_unsigned(a), 16 * i) & 0xFFFF).astype(np.int64) for i in range(2)]
    if a_signed:
        halves = [(half ^ 0x8000) - 0x8000 for half in halves]
    chosen = _bytes_of(b, b_signed)[2:] if high else _bytes_of(b, b_signed)[:2]
    products = zip(halves, chosen, strict=True)
    return np.asarray(sum((x * y for x, y in products), c.astype(np.int64)).astype(c.dtype))


def shift_left(a: Array, b: U32) -> Array:
    """shl: an amount above the width counts as the width."""
    width = _width(a)
    shifted = np.left_shift(a, np.minimum(b, width - 1).astype(a.dtype))
    return np.asarray(np.where(b >= width, a.dtype.type(0), shifted))


def shift_right(a: Array, b: U32) -> Array:
    """shr: signed a is filled with its sign, unsigned with 0; an amount above the width counts as the width."""
    width = _width(a)
    shifted = np.right_shift(a, np.minimum(b, width - 1).astype(a.dtype))
    return np.asarray(shifted if a.dtype.kind == "i" else np.where(b >= width, a.dtype.type(0), shifted))


def funnel_shift(a: U32, b: U32, c: U32, left: bool, wrap: bool) -> U32:
    """shf.l and shf.r: a word of the 64-bit value whose upper word is b, shifted by c mod 32 or min(c, 32)."""
    value = (b.astype(np.uint64) << np.uint64(32)) | a
    amount = (c & 31 if wrap else np.minimum(c, 32)).astype(np.uint64)
    return np.asarray((((value << amount) >> np.uint64(32)) if left else value >> amount).astype(np.uint32))


def _field_mask(length: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return np.where(length >= 64, _ALL_ONES, (_ONE << np.minimum(length, 63)) - _ONE)


def bit_field_extract(a: Array, pos: U32, length: U32) -> Array:
    """bfe: bits pos .. pos + length - 1 of a (32 or 64 bits), extended with 0 or, if signed, with the field's top bit.

    Only the low 8 bits of pos and length count. Past the top of a, bits are 0, or copies of the sign bit of a.
    """
    width = _width(a)
    bits = _unsigned(a).astype(np.uint64)
    start, count = (pos & 255).astype(np.uint64), (length & 255).astype(np.uint64)
    present = np.minimum(count, width - np.minimum(start, width))
    field = np.where(start >= width, np.uint64(0), bits >> np.minimum(start, 63)) & _field_mask(present)
    if a.dtype.kind == "i":
        top = np.minimum(np.maximum(start + count, 1) - 1, width - 1)
        negative = (count > 0) & ((bits >> top) & 1 == 1)
        field = np.where(negative, field | ~_field_mask(present), field)
    return np.asarray(field.astype(f"u{a.dtype.itemsize}")).view(a.dtype)


def bit_field_insert(a: Array, b: Array, pos: U32, length: U32) -> Array:
    """bfi: b with its bits from pos on replaced by the low `length` bits of a; uint32 or uint64."""
    start, count = (pos & 255).astype(np.uint64), (length & 255).astype(np.uint64)
    inside, safe = start < 64, np.minimum(start, 63)
    mask = np.where(inside, _field_mask(count) << safe, np.uint64(0))
    return np.asarray(((b.astype(np.uint64) & ~mask) | ((a.astype(np.uint64) << safe) & mask)).astype(b.dtype))


def extend(a: Array, length: U32, wrap: bool) -> Array:
    """The ``length`` low bits of a 32-bit a; above 31 all of it, or modulo 32 if ``wrap`` (PTX ISA, szext)."""
    length = length & np.uint32(31) if wrap else np.minimum(length, np.uint32(32))
    return bit_field_extract(a, np.zeros_like(length), length)


def bit_field_mask(a: U32, b: U32, clamp: bool) -> U32:
    """bmsk: b ones from bit a upwards; both taken mod 32, or with `clamp` cut off at bit 32."""
    start, count = (a & 31).astype(np.uint64), (b & 31).astype(np.uint64)
    if clamp:
        start = np.minimum(a, 32).astype(np.uint64)
        count = np.minimum(b, 32).astype(np.uint64)
    return np.asarray((_field_mask(count) << start).astype(np.uint32))


# The generic selector that each value of the two control bits stands for.
_PERMUTE_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def permute_bytes(a: U32, b: U32, selector: U32, mode: str | None = None) -> U32:
    """prmt: four of the bytes 7..0 of b and a; bit 3 of a nibble of `selector` asks for copies of the byte's sign.

    mode: None for the generic form, or "f4e", "b4e", "rc8", "ecl", "ecr", "rc16".
    """
    if mode is not None:
        selector = np.asarray(np.array(_PERMUTE_MODES[mode], np.uint32)[selector & 3])
    value = (b.astype(np.uint64) << np.uint64(32)) | a
    result = np.zeros(np.broadcast_shapes(value.shape, selector.shape), np.uint32)
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = ((value >> ((nibble & 7) * 8).astype(np.uint64)) & 255).astype(np.uint32)
        if mode is None:
            byte = np.where(nibble & 8, (byte >> 7) * np.uint32(255), byte)
        result = np.asarray(result | (byte << np.uint32(8 * i)))
    return result


def lop3(a: U32, b: U32, c: U32, table: int) -> U32:
    """lop3: the logic function of three words whose truth table is `table` (a 0xF0, b 0xCC, c 0xAA)."""
    flip = table.bit_count() > 4  # then the complement has fewer terms
    terms = ~table & 255 if flip else table
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for i in range(8):
        if terms >> i & 1:
            result = np.asarray(result | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)))
    return np.asarray(~result if flip else result)


def _bit_length(bits: Array) -> U32:
    for distance in (1, 2, 4, 8, 16, 32):
        if distance < _width(bits):
            bits = bits | (bits >> distance)
    return np.asarray(np.bitwise_count(bits).astype(np.uint32))


def count_leading_zeros(a: Array) -> U32:
    """clz: 0 to 32, or 64, as uint32."""
    return np.asarray(np.uint32(_width(a)) - _bit_length(_unsigned(a)))


def find_leading_bit(a: Array, shift_amount: bool) -> U32:
    """bfind: position of the top bit that differs from the sign, 0xffffffff if none; uint32.

    With `shift_amount`, by how much a left shift brings that bit to the top.
    """
    length = _bit_length(_unsigned(np.where(a < 0, ~a, a)) if a.dtype.kind == "i" else a)
    found = np.uint32(_width(a)) - length if shift_amount else length - 1
    return np.where(length == 0, np.uint32(0xFFFFFFFF), found)


def population_count(a: Array) -> U32:
    """popc: the number of ones, as uint32."""
    return np.asarray(np.bitwise_count(_unsigned(a)).astype(np.uint32))


def bit_reverse(a: Array) -> Array:
    """brev: the bits of uint32 or uint64 in opposite order."""
    bits = a
    ones = (1 << _width(a)) - 1
    for distance in (1, 2, 4, 8, 16, 32):
        if distance < _width(a):
            mask = ones // ((1 << distance) + 1)  # `distance` ones, as many zeros, and so on
            bits = ((bits >> distance) & mask) | ((bits & mask) << distance)
    return np.asarray(bits)
