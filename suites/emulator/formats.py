"""Number formats of PTX registers, and every conversion between them, on NumPy arrays.

How a register is held: f16, f32 and f64 in the NumPy type of that width; bf16 as uint16 bits; e4m3, e5m2, e2m3, e3m2
and ue8m0 as uint8 codes; e2m1 as a uint8 whose low nibble is the code; tf32 as float32 with 13 zero bits at the end.
No function changes its arguments. Source of the rules, unless said otherwise: PTX ISA, "Data Movement and Conversion
Instructions: cvt", and "Alternate Floating-Point Data Formats" for the encodings.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_conformance.suites.emulator.exact import elementwise, round_exact, sum_to_odd

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class FloatFormat:
    """One binary format: where its codes start and end, and the NumPy type of a register that holds it."""

    bits: int
    mantissa_bits: int
    bias: int
    max_code: int  # the largest finite magnitude
    infinity_code: int | None
    nan_code: int  # what a conversion of NaN gives
    dtype: type[np.generic]
    shift: int = 0  # zero bits below the code in a register

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return (self.max_code >> self.mantissa_bits) - self.bias


FORMATS = {
    "f32": FloatFormat(32, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, np.float32),
    "f16": FloatFormat(16, 10, 15, 0x7BFF, 0x7C00, 0x7FFF, np.float16),
    "bf16": FloatFormat(16, 7, 127, 0x7F7F, 0x7F80, 0x7FFF, np.uint16),
    "tf32": FloatFormat(19, 10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF, np.float32, shift=13),
    "e5m2": FloatFormat(8, 2, 15, 0x7B, 0x7C, 0x7F, np.uint8),
    "e4m3": FloatFormat(8, 3, 7, 0x7E, None, 0x7F, np.uint8),
    "e3m2": FloatFormat(6, 2, 3, 0x1F, None, 0x1F, np.uint8),
    "e2m3": FloatFormat(6, 3, 1, 0x1F, None, 0x1F, np.uint8),
    "e2m1": FloatFormat(4, 1, 1, 0x7, None, 0x7, np.uint8),
}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ROUNDINGS = ("rn", "rna", "rz", "rm", "rp")
NAN_F32 = np.uint32(0x7FFFFFFF).view(np.float32)
NAN_F16 = np.uint16(0x7FFF).view(np.float16)
NAN_BF16 = np.uint16(0x7FFF)


def _value(code: int, fmt: FloatFormat) -> float:
    sign = -1.0 if code >> (fmt.bits - 1) & 1 else 1.0
    magnitude = code & ((1 << (fmt.bits - 1)) - 1)
    if magnitude > fmt.max_code:
        return sign * math.inf if magnitude == fmt.infinity_code else math.nan
    exponent = magnitude >> fmt.mantissa_bits
    fraction = magnitude & ((1 << fmt.mantissa_bits) - 1)
    implicit = 1 << fmt.mantissa_bits if exponent else 0
    return sign * math.ldexp(implicit + fraction, max(exponent, 1) - fmt.bias - fmt.mantissa_bits)


def _table(name: str) -> npt.NDArray[np.float64]:
    fmt = FORMATS[name]
    table = np.array([_value(code & ((1 << fmt.bits) - 1), fmt) for code in range(256)])
    table.setflags(write=False)
    return table


# float64 value of each of the 256 bytes; bits above a 4- or 6-bit code are ignored.
E4M3 = _table("e4m3")
E5M2 = _table("e5m2")
E2M3 = _table("e2m3")
E3M2 = _table("e3m2")
E2M1 = _table("e2m1")
UE8M0 = np.array([math.ldexp(1.0, code - 127) for code in range(255)] + [math.nan])
UE8M0.setflags(write=False)
TABLES = {"e4m3": E4M3, "e5m2": E5M2, "e2m3": E2M3, "e3m2": E3M2, "e2m1": E2M1, "ue8m0": UE8M0}


def canonical_nan(x: Array) -> Array:
    """Replace every NaN by the canonical one of the format; x itself is returned where there is none.

    float32 0x7fffffff, float16 and uint16 (bf16) 0x7fff: the manual leaves the NaN of most instructions open, and this
    is what GPUs give. float64 is returned as it is, because PTX keeps its payload. PTX ISA, "Floating Point
    Instructions" and "Half Precision Floating Point Instructions".
    """
    if x.dtype == np.float32:
        flat = x.ravel()
        square = np.dot(flat, flat)  # NaN if, and only if, an element is: squares never cancel
        return np.where(np.isnan(x), NAN_F32, x) if square != square else x
    if x.dtype == np.float16:
        nan = np.isnan(x)
        return np.where(nan, NAN_F16, x) if nan.any() else x
    if x.dtype == np.uint16:
        nan = (x & 0x7FFF) > 0x7F80
        return np.where(nan, NAN_BF16, x) if nan.any() else x
    return x


def widen(codes: Array, name: str) -> npt.NDArray[np.float64]:
    """The exact float64 values of registers of format `name`; a NaN stays a NaN."""
    if name in TABLES:
        return np.asarray(TABLES[name][codes])
    if name == "bf16":
        return np.asarray(f32_from_bf16(codes).astype(np.float64))
    if name in ("f16", "f32", "tf32", "f64"):
        return np.asarray(codes.astype(np.float64))
    raise ValueError(f"format {name!r} is unknown; use one of {sorted([*FORMATS, 'f64', 'ue8m0'])}")


def narrow(x: Array, name: str, rounding: str = "rn", saturate: bool = False) -> Array:
    """Float32 or float64 x in format `name`, rounded once.

    rounding: "rn" (ties to even), "rna" (ties away from zero), "rz", "rm", "rp". Overflow gives an infinity, or the
    largest finite number where the direction of rounding asks for it, where `saturate` is set (PTX .satfinite, which
    also clamps infinities) and in formats without infinity. NaN gives the canonical NaN, and +MAX_NORM in e2m1, e2m3
    and e3m2. ue8m0 knows only "rz" and "rp", drops the sign, and lifts what is too small to 2^-127.
    """
    x = np.asarray(x, np.float64)
    if rounding not in _ROUNDINGS:
        raise ValueError(f"rounding {rounding!r} is unknown; use one of {_ROUNDINGS}")
    if name == "ue8m0":
        return _narrow_ue8m0(x, rounding, saturate)
    if name == "f64":
        if saturate:
            raise ValueError("saturate=True has no meaning for f64; PTX has no .satfinite conversion to f64")
        return x.copy()
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is unknown; use one of {sorted([*FORMATS, 'f64', 'ue8m0'])}")
    if name in ("f32", "f16") and rounding == "rn" and not saturate:
        return canonical_nan(np.asarray(x.astype(FORMATS[name].dtype)))
    fmt = FORMATS[name]
    codes = _encode(x, fmt, rounding, saturate)
    width = np.dtype(fmt.dtype).itemsize
    return np.asarray((codes << fmt.shift).astype(_UNSIGNED[width]).view(fmt.dtype))


def _encode(x: npt.NDArray[np.float64], fmt: FloatFormat, rounding: str, saturate: bool) -> npt.NDArray[np.int64]:
    """Codes of x: its magnitude in units of the last place, rounded to an integer, on top of the exponent."""
    negative = np.signbit(x)
    magnitude = np.asarray(np.fmin(np.abs(x), math.ldexp(1.0, fmt.max_exponent + 1)))  # fmin also replaces NaN
    exponent = np.maximum((magnitude.view(np.int64) >> 52) - 1023, fmt.min_exponent)
    one_ulp_inverse = np.asarray((fmt.mantissa_bits + 1023 - exponent) << 52).view(np.float64)
    scaled = magnitude * one_ulp_inverse
    down = np.floor(scaled)
    if rounding == "rn":
        whole = np.rint(scaled)
    elif rounding == "rna":
        whole = down + (scaled - down >= 0.5)
    elif rounding == "rz":
        whole = down
    else:
        whole = np.where(negative == (rounding == "rm"), np.ceil(scaled), down)
    codes = ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + whole.astype(np.int64)
    over = codes > fmt.max_code
    if over.any():
        codes = np.where(over, _overflow(x, fmt, rounding, saturate), codes)
    codes = codes | (negative.astype(np.int64) << (fmt.bits - 1))
    return np.where(np.isnan(x), fmt.nan_code, codes)


def _overflow(x: npt.NDArray[np.float64], fmt: FloatFormat, rounding: str, saturate: bool) -> Array:
    if saturate or fmt.infinity_code is None:
        return np.asarray(fmt.max_code)
    if rounding in ("rn", "rna"):
        return np.asarray(fmt.infinity_code)
    outward = {"rz": np.False_, "rm": np.signbit(x), "rp": ~np.signbit(x)}[rounding]
    return np.where(np.isinf(x) | outward, fmt.infinity_code, fmt.max_code)


def _narrow_ue8m0(x: npt.NDArray[np.float64], rounding: str, saturate: bool) -> npt.NDArray[np.uint8]:
    if rounding not in ("rz", "rp"):
        raise ValueError(f'rounding {rounding!r} does not exist for ue8m0; use "rz" or "rp"')
    fraction, exponent = np.frexp(np.abs(x))  # the fraction is in [0.5, 1)
    code = exponent + 126 + ((rounding == "rp") & (fraction > 0.5))
    code = np.where(x == 0, 0, np.maximum(code, 0))
    code = np.where(np.isinf(x) | (code > 254), 254 if saturate else 255, code)
    return np.where(np.isnan(x), 255, code).astype(np.uint8)


def f32_from_bf16(codes: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Float32 values of bf16 bits (uint16); exact."""
    return np.asarray(np.left_shift(codes, 16, dtype=np.uint32)).view(np.float32)


def bf16_from_f32(x: npt.NDArray[np.float32], rounding: str = "rn") -> npt.NDArray[np.uint16]:
    """bf16 bits (uint16) of float32 x, rounded once; "rn" and "rz" are fast."""
    if rounding not in ("rn", "rz"):
        return narrow(x, "bf16", rounding)
    word = x.view(np.uint32)
    high = word >> 16
    if rounding == "rn":
        high = (word + ((high & 1) + np.uint32(0x7FFF))) >> 16
    codes = high.astype(np.uint16)
    flat = x.ravel()
    square = np.dot(flat, flat)
    return np.asarray(np.where(np.isnan(x), NAN_BF16, codes) if square != square else codes)


def tf32_from_f32(x: npt.NDArray[np.float32], rounding: str = "rna") -> npt.NDArray[np.float32]:
    """tf32 (float32 whose 13 low bits are zero) of float32 x; rounding "rna", "rn" or "rz". NaN gives 0x7fffe000."""
    word = x.view(np.uint32)
    if rounding == "rna":
        word = word + np.uint32(0x1000)
    elif rounding == "rn":
        word = word + (((word >> 13) & 1) + np.uint32(0xFFF))
    elif rounding != "rz":
        raise ValueError(f'rounding {rounding!r} does not exist for tf32; use "rna", "rn" or "rz"')
    return np.asarray(np.where(np.isnan(x), np.uint32(0x7FFFE000), word & np.uint32(0xFFFFE000))).view(np.float32)


@functools.cache
def _pair_table(name: str) -> npt.NDArray[np.uint32]:
    fmt = FORMATS[name]
    half = narrow(TABLES[name], "f16").view(np.uint16).astype(np.uint32)
    step = 4 if fmt.bits == 4 else 8
    pair = np.arange(1 << (2 * step))
    return np.asarray(half[pair & ((1 << step) - 1)] | (half[pair >> step] << 16))


def f16x2_from_pair(codes: Array, name: str) -> npt.NDArray[np.uint32]:
    """Packed f16x2 (uint32) of two packed codes: uint16 for e4m3, e5m2, e2m3 and e3m2, uint8 for e2m1; exact.

    The upper code becomes the upper half, as in cvt.rn.f16x2.e4m3x2.
    """
    return np.asarray(_pair_table(name)[codes])


_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def round_to_integral(x: Array, rounding: str) -> Array:
    """Float x rounded to an integral value of the same dtype; rounding "rni", "rzi", "rmi" or "rpi"."""
    if rounding not in _INTEGRAL:
        raise ValueError(f"rounding {rounding!r} is unknown; use one of {sorted(_INTEGRAL)}")
    return canonical_nan(np.asarray(_INTEGRAL[rounding](x)))


def float_to_int(x: Array, dtype: npt.DTypeLike, rounding: str = "rzi") -> Array:
    """Float x as integers of `dtype`, clamped to its range; rounding "rni", "rzi", "rmi" or "rpi".

    NaN gives 0, unless the source is float64 or the destination has 64 bits: then only the top bit is set. So the dtype
    of x must be the source's own (bf16 as float32).
    """
    if rounding not in _INTEGRAL:
        raise ValueError(f"rounding {rounding!r} is unknown; use one of {sorted(_INTEGRAL)}")
    target = np.dtype(dtype)
    info = np.iinfo(target)
    whole = _INTEGRAL[rounding](x.astype(np.float64))
    high, low, nan = whole >= float(info.max), whole <= float(info.min), np.isnan(whole)
    inside = np.where(high | low | nan, 0.0, whole).astype(target)
    top_bit = x.dtype == np.float64 or target.itemsize == 8
    of_nan = np.array(1 << (info.bits - 1) if top_bit else 0, np.uint64).astype(target)
    clamped = np.where(high, target.type(info.max), np.where(low, target.type(info.min), inside))
    return np.where(nan, of_nan, clamped).astype(target, copy=False)


def int_to_float(i: Array, name: str, rounding: str = "rn") -> Array:
    """Integers i (any width) in format f16, bf16, f32 or f64, rounded once; rounding "rn", "rz", "rm" or "rp"."""
    if i.dtype.itemsize < 8 or (name == "f64" and rounding == "rn"):
        return narrow(i.astype(np.float64), name, rounding)
    if name == "f64":
        return elementwise(lambda n: round_exact(Fraction(int(n)), rounding), i)
    high = (i >> 11).astype(np.float64) * 2048.0
    low = (i & 0x7FF).astype(np.float64)
    return narrow(sum_to_odd(high, low), name, rounding)
