"""Binary number formats by exact rational arithmetic: decode, compute without error, round once, encode.

The expected values of the instruction tests come from here. It uses Python integers and ``fractions.Fraction`` alone,
and shares nothing with the emulator that it judges. Sources: IEEE 754-2019 for binary16/32/64; PTX ISA 9.1, section
5.2.3, for bf16, tf32, e4m3, e5m2, e2m3, e3m2, e2m1 and ue8m0, and section 9.7 for rounding, saturation and NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from math import isqrt
from typing import NamedTuple


@dataclass(frozen=True)
class Format:
    """A binary floating-point format of ``width`` bits: sign (if any), exponent, mantissa.

    ``top`` says what the highest exponent means: 'ieee' (infinity and NaN), 'nan' (numbers, except that all ones is
    NaN) or 'numbers' (numbers only). ``unused`` counts low bits of the container without meaning (tf32 in 32 bits).
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    top: str = "ieee"
    signed: bool = True
    unused: int = 0
    canonical_nan: int | None = None

    @property
    def width(self) -> int:
        return self.signed + self.exponent_bits + self.mantissa_bits + self.unused

    @property
    def sign_bit(self) -> int:
        return 1 << (self.width - 1) if self.signed else 0

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << (self.mantissa_bits + self.unused)

    @property
    def largest(self) -> int:
        """Bits of the largest finite number."""
        full = ((1 << (self.exponent_bits + self.mantissa_bits)) - 1) << self.unused
        if self.top == "ieee":
            return self.infinity - (1 << self.unused)
        return full - (1 << self.unused) if self.top == "nan" else full

    @property
    def smallest_normal(self) -> Fraction:
        return two_to(1 - self.bias)


F64 = Format(11, 52, 1023, canonical_nan=0x7FF8000000000000)
F32 = Format(8, 23, 127, canonical_nan=0x7FFFFFFF)
F16 = Format(5, 10, 15, canonical_nan=0x7FFF)
BF16 = Format(8, 7, 127, canonical_nan=0x7FFF)
TF32 = Format(8, 10, 127, unused=13, canonical_nan=0x7FFFFFFF)
E5M2 = Format(5, 2, 15, canonical_nan=0x7F)
E4M3 = Format(4, 3, 7, top="nan", canonical_nan=0x7F)
E3M2 = Format(3, 2, 3, top="numbers")
E2M3 = Format(2, 3, 1, top="numbers")
E2M1 = Format(2, 1, 1, top="numbers")
UE8M0 = Format(8, 0, 127, top="nan", signed=False, canonical_nan=0xFF)


class Value(NamedTuple):
    """An exact extended real with a signed zero: ``kind`` is 'finite', 'infinite' or 'nan'; ``size`` is finite's."""

    negative: bool
    size: Fraction
    kind: str = "finite"

    @property
    def is_nan(self) -> bool:
        return self.kind == "nan"

    @property
    def is_infinite(self) -> bool:
        return self.kind == "infinite"

    @property
    def is_finite(self) -> bool:
        return self.kind == "finite"

    @property
    def is_zero(self) -> bool:
        return self.kind == "finite" and not self.size

    @property
    def number(self) -> Fraction:
        """The signed rational; only for finite values."""
        assert self.is_finite
        return -self.size if self.negative else self.size


ZERO = Fraction(0)
NAN = Value(False, ZERO, "nan")


def infinity(negative: bool) -> Value:
    return Value(negative, ZERO, "infinite")


def finite(number: Fraction | int, zero_negative: bool = False) -> Value:
    """The value of a rational; ``zero_negative`` gives the sign where it is zero."""
    size = abs(number)
    negative = number.numerator < 0 if number else zero_negative
    return Value(negative, size if isinstance(size, Fraction) else Fraction(size))


@cache
def two_to(exponent: int) -> Fraction:
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


@lru_cache(maxsize=65536)
def decode(form: Format, bits: int) -> Value:
    """The exact value of a bit pattern; bits above the width are ignored."""
    negative = bool(bits & form.sign_bit)
    mantissa = (bits >> form.unused) & ((1 << form.mantissa_bits) - 1)
    exponent = (bits >> (form.unused + form.mantissa_bits)) & ((1 << form.exponent_bits) - 1)
    if exponent == (1 << form.exponent_bits) - 1:
        if form.top == "ieee":
            return NAN if mantissa else infinity(negative)
        if form.top == "nan" and mantissa == (1 << form.mantissa_bits) - 1:
            return NAN
    if not form.signed:
        return finite(two_to(exponent - form.bias))
    if exponent == 0:
        return Value(negative, mantissa * two_to(1 - form.bias - form.mantissa_bits))
    return Value(negative, ((1 << form.mantissa_bits) | mantissa) * two_to(exponent - form.bias - form.mantissa_bits))


def is_nan(form: Format, bits: int) -> bool:
    return decode(form, bits).is_nan


def exponent_of(size: Fraction) -> int:
    """The e for which 2**e <= size < 2**(e + 1)."""
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    at_least = size.numerator << max(-guess, 0) >= size.denominator << max(guess, 0)
    return guess if at_least else guess - 1


def round_quotient(numerator: int, denominator: int, mode: str) -> int:
    """Round a quotient to an integer: rn (ties to even), rna (ties away), rz, rm (down) or rp (up)."""
    down, rest = divmod(numerator, denominator)
    if rest == 0 or mode == "rm":
        return down
    if mode == "rp":
        return down + 1
    if mode == "rz":
        return down + (numerator < 0)
    twice = 2 * rest
    if twice != denominator:
        return down + (twice > denominator)
    return down + (down & 1) if mode == "rn" else down + (numerator > 0)


def round_to_integer(number: Fraction, mode: str) -> int:
    return round_quotient(number.numerator, number.denominator, mode)


def encode(form: Format, value: Value, mode: str = "rn", *, satfinite: bool = False, nan: int | None = None) -> int:
    """Round once and encode. Overflow gives infinity or the largest number, as the mode asks; ``satfinite`` the latter.

    ``nan`` overrides the pattern given for NaN. A format without infinity saturates always.
    """
    if value.is_nan:
        pattern = form.canonical_nan if nan is None else nan
        assert pattern is not None
        return pattern
    sign = form.sign_bit if value.negative else 0
    saturates = satfinite or form.top != "ieee"
    if value.is_infinite:
        return sign | (form.largest if saturates else form.infinity)
    if value.is_zero:
        return sign
    size = value.size
    exponent = max(exponent_of(size), 1 - form.bias)
    quantum = exponent - form.mantissa_bits
    numerator, denominator = size.numerator << max(-quantum, 0), size.denominator << max(quantum, 0)
    steps = abs(round_quotient(-numerator if value.negative else numerator, denominator, mode))
    field = ((exponent + form.bias - 1) << form.mantissa_bits) + steps
    bits = field << form.unused
    if bits > form.largest:
        away = mode in ("rn", "rna") or (mode == "rp" and not value.negative) or (mode == "rm" and value.negative)
        bits = form.infinity if away and not saturates else form.largest
    return sign | bits


def encode_ue8m0(value: Value, mode: str) -> int:
    """A power of two without sign (PTX ISA 9.7.9.21): rz or rp; beyond either end the nearest end; NaN 0xff."""
    if value.is_nan:
        return 0xFF
    if value.is_infinite:
        return 0xFE
    size = value.size
    if size < two_to(-127):
        return 0
    exponent = exponent_of(size)
    if mode == "rp" and size != two_to(exponent):
        exponent += 1
    return min(exponent + 127, 0xFE)


def flush(form: Format, bits: int) -> int:
    """Sign-preserving zero for a subnormal pattern: what .ftz does to inputs and results."""
    return bits if bits & form.infinity else bits & form.sign_bit


def rounds_up_to_normal(form: Format, value: Value, result: int) -> bool:
    """Whether an exact subnormal value was rounded to the smallest normal number."""
    tiny = value.is_finite and 0 < value.size < form.smallest_normal
    return tiny and decode(form, result).size == form.smallest_normal


def add(a: Value, b: Value, mode: str = "rn") -> Value:
    """Exact sum; a zero from opposite signs is negative only when rounding down (IEEE 754, 6.3)."""
    if a.is_nan or b.is_nan:
        return NAN
    if a.is_infinite or b.is_infinite:
        if a.is_infinite and b.is_infinite and a.negative != b.negative:
            return NAN
        return a if a.is_infinite else b
    negative_zero = a.negative if a.negative == b.negative else mode == "rm"
    return finite(a.number + b.number, negative_zero)


def negate(a: Value) -> Value:
    return Value(not a.negative, a.size, a.kind)


def multiply(a: Value, b: Value) -> Value:
    if a.is_nan or b.is_nan:
        return NAN
    negative = a.negative != b.negative
    if a.is_infinite or b.is_infinite:
        return NAN if a.is_zero or b.is_zero else infinity(negative)
    return finite(a.number * b.number, negative)


def fuse(a: Value, b: Value, c: Value, mode: str = "rn") -> Value:
    """Exact a * b + c."""
    return add(multiply(a, b), c, mode)


def divide(a: Value, b: Value) -> Value:
    if a.is_nan or b.is_nan or (a.is_infinite and b.is_infinite) or (a.is_zero and b.is_zero):
        return NAN
    negative = a.negative != b.negative
    if a.is_infinite or b.is_zero:
        return infinity(negative)
    if b.is_infinite:
        return finite(0, negative)
    return finite(a.number / b.number, negative)


def square_root(a: Value) -> Value:
    """A rational on the same side of every 100-bit number as the root, and equal to it where the root is rational."""
    if a.is_nan or (a.negative and not a.is_zero):
        return NAN
    if a.is_zero or a.is_infinite:
        return a
    number = a.number
    shift = 128 + max(0, number.denominator.bit_length() - number.numerator.bit_length()) // 2
    scaled, rest = divmod(number.numerator << (2 * shift), number.denominator)
    root = isqrt(scaled)
    exact = rest == 0 and root * root == scaled
    return finite(Fraction(2 * root + (not exact), 2 << shift))


def clamp_to_unit(value: Value) -> Value:
    """What .sat does to a float: into [0, 1], NaN to +0."""
    if value.is_nan or value.negative or value.is_zero:
        return finite(0)
    return finite(1) if value.is_infinite or value.number > 1 else value


def clamp_to_positive(value: Value) -> Value:
    """What .relu does: negative values to +0; NaN stays."""
    return finite(0) if value.negative and not value.is_nan else value


def ulp(form: Format, size: Fraction) -> Fraction:
    """The distance between neighbouring numbers of the format at this size."""
    exponent = max(exponent_of(size), 1 - form.bias) if size else 1 - form.bias
    return two_to(exponent - form.mantissa_bits)


def signed(bits: int, width: int) -> int:
    """The two's complement value of the low ``width`` bits."""
    bits &= (1 << width) - 1
    return bits - (1 << width) if bits >> (width - 1) else bits


def mask(width: int) -> int:
    return (1 << width) - 1


def halves(bits: int, width: int = 16) -> tuple[int, int]:
    """The low and the high half of a packed pair."""
    return bits & mask(width), (bits >> width) & mask(width)


def pack(low: int, high: int, width: int = 16) -> int:
    return low | (high << width)
