"""cvt in every pair and rounding mode that Triton can emit, against PTX ISA 9.1, section 9.7.9.21."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest

from .exact import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    TF32,
    UE8M0,
    Format,
    clamp_to_positive,
    clamp_to_unit,
    decode,
    encode,
    encode_ue8m0,
    finite,
    flush,
    halves,
    mask,
    round_to_integer,
    signed,
    two_to,
)
from .one_instruction import Form, Vector, check, floats, integers, same_or_nan

FLOATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
MODES = ("rn", "rz", "rm", "rp")
Rule = Callable[..., int | None]
FORMS: dict[str, Form] = {}


def register(width: int) -> str:
    """Registers of 8 bits do not exist in Triton's PTX: a byte lives in a 16-bit register."""
    return f"b{max(width, 16)}"


def as_integer(kind: str, width: int, bits: int) -> int:
    return signed(bits, width) if kind == "s" else bits & mask(width)


def extended(kind: str, width: int, value: int) -> int:
    """An integer result in its destination register: sign or zero extended where the register is wider."""
    return as_integer(kind, width, value) & mask(max(width, 16))


def limits(kind: str, width: int) -> tuple[int, int]:
    return (-(1 << (width - 1)), mask(width - 1)) if kind == "s" else (0, mask(width))


INTEGER_TYPES = [(kind, width) for width in (8, 16, 32, 64) for kind in "su"]


def integer_types_beside(form: Format) -> list[tuple[str, int]]:
    """Ptxas takes no conversion between bf16 and 8 bits, though the manual lists it; Triton goes through 16."""
    return [(kind, width) for kind, width in INTEGER_TYPES if width > 8 or form is not BF16]


def declare_integer_to_integer() -> None:
    for to_kind, to_width in INTEGER_TYPES:
        for from_kind, from_width in INTEGER_TYPES:
            name = f"{to_kind}{to_width}.{from_kind}{from_width}"
            vectors = integers(max(from_width, 16), count=60)
            plain = lambda a, t=(to_kind, to_width), f=(from_kind, from_width): extended(*t, as_integer(*f, a))  # noqa: E731
            operands, result = (register(from_width),), register(to_width)
            FORMS[f"cvt.{name}"] = Form(operands, result, plain, vectors)
            low, high = limits(to_kind, to_width)
            least, most = limits(from_kind, from_width)
            if least < low or most > high:  # elsewhere .sat is illegal
                FORMS[f"cvt.sat.{name}"] = Form(
                    operands,
                    result,
                    lambda a, t=(to_kind, to_width), f=(from_kind, from_width): extended(
                        *t, max(limits(*t)[0], min(limits(*t)[1], as_integer(*f, a)))
                    ),
                    vectors,
                )


def integer_vectors(kind: str, width: int, form: Format) -> list[Vector]:
    """Edges, random integers, and ties of the destination's mantissa with their neighbours."""
    vectors = integers(max(width, 16), count=60)
    step = form.mantissa_bits + 1
    ties = [
        (1 << size) + (odd << (size - step + 1)) + (1 << (size - step)) for size in range(step, width) for odd in (0, 1)
    ]
    return vectors + [((tie + off) & mask(max(width, 16)),) for tie in ties for off in (-1, 0, 1)]


def declare_integer_to_float() -> None:
    for suffix, form in FLOATS.items():
        for kind, width in integer_types_beside(form):
            vectors = integer_vectors(kind, width, form)
            for mode in MODES:
                rule = lambda a, k=kind, w=width, f=form, m=mode: encode(f, finite(as_integer(k, w, a)), m)  # noqa: E731
                FORMS[f"cvt.{mode}.{suffix}.{kind}{width}"] = Form((register(width),), f"b{form.width}", rule, vectors)


def float_to_integer(form: Format, kind: str, width: int, mode: str, ftz: bool) -> Rule:
    """Round, clamp to the destination's range; NaN gives 0, or the top bit where either side has 64 bits."""
    low, high = limits(kind, width)

    def rule(a: int) -> int:
        value = decode(form, flush(form, a) if ftz else a)
        if value.is_nan:
            return extended(kind, width, 1 << (width - 1)) if form is F64 or width == 64 else 0
        if value.is_infinite:
            return extended(kind, width, low if value.negative else high)
        return extended(kind, width, max(low, min(high, round_to_integer(value.number, mode))))

    return rule


def float_vectors(form: Format, width: int = 0) -> list[Vector]:
    """Specials, random floats, halves and integers around the edges of an integer type."""
    draw = random.Random(f"{form}{width}")
    near = [Fraction(i, 4) for i in range(-14, 15)] + [Fraction(draw.randrange(1 << 12), 2) for _ in range(20)]
    for edge in (1 << width, 1 << max(width - 1, 0)) if width else ():
        near += [s * (edge + off) for off in (-2, -1, Fraction(-1, 2), 0, Fraction(1, 2), 1) for s in (1, -1)]
    return floats(form, count=60) + [(encode(form, finite(Fraction(x))),) for x in near]


def declare_float_to_integer() -> None:
    for suffix, form in FLOATS.items():
        for kind, width in integer_types_beside(form):
            for mode in MODES:
                for ftz in ("", ".ftz") if form is F32 and kind == "s" else ("",):
                    rule = float_to_integer(form, kind, width, mode, bool(ftz))
                    name = f"cvt.{mode}i{ftz}.{kind}{width}.{suffix}"
                    FORMS[name] = Form((f"b{form.width}",), register(width), rule, float_vectors(form, width))


def narrowing_vectors(wide: Format, narrow: Format) -> list[Vector]:
    """Every kind of value of the source, and the destination's numbers, its ties and their neighbours."""
    draw = random.Random(f"{wide}{narrow}")
    width = narrow.width - narrow.unused
    patterns = range(1 << width) if width <= 8 else [draw.getrandbits(width) for _ in range(60)]
    values = [decode(narrow, pattern << narrow.unused) for pattern in patterns]
    sizes = [v.number for v in values if v.is_finite]
    ordered = sorted(set(sizes)) if width <= 8 else sizes
    steps = [two_to(-narrow.mantissa_bits - 1) * abs(x) for x in ordered]
    between = [(x + y) / 2 for x, y in pairwise(ordered)] if width <= 8 else []
    between += [x + step for x, step in zip(ordered, steps, strict=True)] if width > 8 else []
    smallest = decode(narrow, 1 << narrow.unused).number
    top = decode(narrow, narrow.largest).number
    between += [
        smallest / 2,
        smallest * Fraction(3, 2),
        -smallest / 2,
        smallest / 4,
        top * (1 + two_to(-narrow.mantissa_bits - 2)),
    ]
    exact = [encode(wide, finite(x)) for x in [*ordered, *between]]
    around = [(bits + off) & mask(wide.width) for bits in exact[len(ordered) :] for off in (-1, 0, 1)]
    return floats(wide, count=60) + [(bits,) for bits in exact[: len(ordered)] + around]


def narrow_one(
    wide: Format,
    narrow: Format,
    mode: str,
    *,
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
    satfinite: bool = False,
) -> Callable[[int], int]:
    """One conversion: flush, clamp, round once; formats without NaN turn it into their largest number."""

    def rule(a: int) -> int:
        value = decode(wide, flush(wide, a) if ftz and wide is F32 else a)
        if sat:
            value = clamp_to_unit(value)
        if relu:
            value = clamp_to_positive(value)
        if value.is_nan and narrow.canonical_nan is None:
            return narrow.largest
        if narrow is UE8M0:
            return encode_ue8m0(value, mode)
        bits = encode(narrow, value, mode, satfinite=satfinite)
        return flush(narrow, bits) if ftz and narrow is F32 else bits

    return rule


def declare_float_to_float() -> None:
    pairs = [
        ("f16", "f32"),
        ("bf16", "f32"),
        ("f16", "f64"),
        ("bf16", "f64"),
        ("f32", "f64"),
        ("f16", "bf16"),
        ("bf16", "f16"),
    ]
    for to, source in pairs:
        wide, narrow = FLOATS[source], FLOATS[to]
        vectors, operands = narrowing_vectors(wide, narrow), (f"b{wide.width}",)
        accept = same_or_nan(narrow)
        for mode in MODES:
            rule = narrow_one(wide, narrow, mode)
            FORMS[f"cvt.{mode}.{to}.{source}"] = Form(operands, f"b{narrow.width}", rule, vectors, accept)
        if "f32" in (to, source) and "bf16" not in (to, source):
            rule = narrow_one(wide, narrow, "rn", ftz=True)
            FORMS[f"cvt.rn.ftz.{to}.{source}"] = Form(operands, f"b{narrow.width}", rule, vectors, accept)
            rule = narrow_one(wide, narrow, "rn", sat=True)
            FORMS[f"cvt.rn.sat.{to}.{source}"] = Form(operands, f"b{narrow.width}", rule, vectors, accept)
    for to, source in [("f32", "f16"), ("f32", "bf16"), ("f64", "f16"), ("f64", "bf16"), ("f64", "f32")]:
        narrow, wide = FLOATS[source], FLOATS[to]
        rule = narrow_one(narrow, wide, "rn")
        FORMS[f"cvt.{to}.{source}"] = Form(
            (f"b{narrow.width}",), f"b{wide.width}", rule, floats(narrow), same_or_nan(wide)
        )
    FORMS["cvt.ftz.f32.f16"] = FORMS["cvt.f32.f16"]
    FORMS["cvt.ftz.f64.f32"] = Form(
        ("b32",), "b64", narrow_one(F32, F64, "rn", ftz=True), floats(F32), same_or_nan(F64)
    )
    FORMS["cvt.sat.f32.f32"] = Form(("b32",), "b32", narrow_one(F32, F32, "rn", sat=True), floats(F32))
    FORMS["cvt.sat.f32.f16"] = Form(("b16",), "b32", narrow_one(F16, F32, "rn", sat=True), floats(F16))
    for suffix, form in (("f16", F16), ("f32", F32), ("f64", F64)):
        for mode in MODES:
            for ftz in ("", ".ftz") if form is F32 else ("",):
                rule = integral(form, mode, bool(ftz))
                name = f"cvt.{mode}i{ftz}.{suffix}.{suffix}"
                FORMS[name] = Form((f"b{form.width}",), f"b{form.width}", rule, float_vectors(form), same_or_nan(form))


def integral(form: Format, mode: str, ftz: bool) -> Rule:
    """The nearest integral value as a float; the sign of a zero result is the operand's."""

    def rule(a: int) -> int:
        value = decode(form, flush(form, a) if ftz else a)
        if value.is_nan or value.is_infinite:
            return encode(form, value)
        return encode(form, finite(round_to_integer(value.number, mode), value.negative))

    return rule


def declare_half_and_tensor_float_32() -> None:
    for to in ("f16", "bf16"):
        narrow = FLOATS[to]
        one = narrowing_vectors(F32, narrow)
        two = list(zip([v[0] for v in one], [v[0] for v in one[7:] + one[:7]], strict=True))
        for mode in ("rn", "rz"):
            for relu in ("", ".relu"):
                for satfinite in ("", ".satfinite"):
                    rule = narrow_one(F32, narrow, mode, relu=bool(relu), satfinite=bool(satfinite))
                    head = f"cvt.{mode}{relu}{satfinite}.{to}"
                    if relu or satfinite:
                        FORMS[f"{head}.f32"] = Form(("b32",), "b16", rule, one, same_or_nan(narrow))
                    packed = lambda a, b, r=rule: r(a) << 16 | r(b)  # noqa: E731
                    FORMS[f"{head}x2.f32"] = Form(("b32", "b32"), "b32", packed, two, same_or_nan(narrow, 2))
    for mode in ("rna", "rn", "rz"):
        for relu in ("", ".relu") if mode != "rna" else ("",):
            for satfinite in ("", ".satfinite"):
                head = f"cvt.{mode}{satfinite}{relu}"
                rule = narrow_one(F32, TF32, mode, relu=bool(relu), satfinite=bool(satfinite))
                # A NaN with a payload that tf32 cannot hold becomes an infinity on an H200; the manual has no rule.
                vectors = [
                    v for v in narrowing_vectors(F32, TF32) if v[0] & mask(31) not in range(0x7F800001, 0x7F802000)
                ]
                FORMS[f"{head}.tf32.f32"] = Form(("b32",), "b32", rule, vectors, same_or_nan(TF32))


def packed_pair(rule: Callable[[int], int], width: int) -> Rule:
    """Two elements of a 32-bit operand into two of ``width`` bits."""
    return lambda a: rule(halves(a)[0]) | rule(halves(a)[1]) << width


def declare_eight_bits() -> None:
    for suffix, narrow in (("e4m3x2", E4M3), ("e5m2x2", E5M2), ("e2m3x2", E2M3), ("e3m2x2", E3M2)):
        for relu in ("", ".relu"):
            head = f"cvt.rn.satfinite{relu}.{suffix}"
            for source, wide in (("f32", F32), ("f16x2", F16), ("bf16x2", BF16)):
                rule = narrow_one(wide, narrow, "rn", relu=bool(relu), satfinite=True)
                one = [v[0] for v in narrowing_vectors(wide, narrow)]
                other = one[11:] + one[:11]
                if wide is F32:
                    two = list(zip(one, other, strict=True))
                    FORMS[f"{head}.f32"] = Form(("b32", "b32"), "b16", lambda a, b, r=rule: r(a) << 8 | r(b), two)
                else:
                    pairs = [(low | high << 16,) for low, high in zip(one, other, strict=True)]
                    FORMS[f"{head}.{source}"] = Form(("b32",), "b16", packed_pair(rule, 8), pairs)
            every = range(1 << narrow.width)
            bytes_ = [
                (low | high << 8,)
                for low, high in zip(every, [*every[77 % len(every) :], *every[: 77 % len(every)]], strict=True)
            ]
            for to, wide in (("f16x2", F16), ("bf16x2", BF16)):
                widen = narrow_one(narrow, wide, "rn", relu=bool(relu))
                widened = lambda a, w=widen: w(a & 0xFF) | w(a >> 8) << 16  # noqa: E731
                FORMS[f"cvt.rn{relu}.{to}.{suffix}"] = Form(("b16",), "b32", widened, bytes_, same_or_nan(wide, 2))
    for mode in ("rz", "rp"):
        for satfinite in ("", ".satfinite"):
            for source, wide in (("f32", F32), ("bf16x2", BF16)):
                rule = narrow_one(wide, UE8M0, mode)
                one = [v[0] for v in floats(wide)] + [
                    ((i * 5) % 255 << 7 | i % 3) << (wide.width - 16) for i in range(255)
                ]
                if not satfinite:  # what overflow gives is not documented
                    most = two_to(127)
                    values = [(bits, decode(wide, bits)) for bits in one]
                    one = [bits for bits, v in values if v.is_nan or (v.is_finite and v.size <= most)]
                other = one[11:] + one[:11]
                name = f"cvt.{mode}{satfinite}.ue8m0x2.{source}"
                if wide is F32:
                    two = list(zip(one, other, strict=True))
                    FORMS[name] = Form(("b32", "b32"), "b16", lambda a, b, r=rule: r(a) << 8 | r(b), two)
                else:
                    pairs = [(low | high << 16,) for low, high in zip(one, other, strict=True)]
                    FORMS[name] = Form(("b32",), "b16", packed_pair(rule, 8), pairs)
    scale = narrow_one(UE8M0, BF16, "rn")
    scales = [(i | (i * 7 + 3) % 256 << 8,) for i in range(256)]
    FORMS["cvt.rn.bf16x2.ue8m0x2"] = Form(
        ("b16",), "b32", lambda a: scale(a & 0xFF) | scale(a >> 8) << 16, scales, same_or_nan(BF16, 2)
    )


def declare_four_bits() -> None:
    """e2m1x2 is one byte: a .b8 register that must be packed with mov."""
    scope = "{{ .reg .b8 byte; {line} }}"
    for relu in ("", ".relu"):
        for source, wide in (("f32", F32), ("f16x2", F16), ("bf16x2", BF16)):
            rule = narrow_one(wide, E2M1, "rn", relu=bool(relu), satfinite=True)
            one = [v[0] for v in narrowing_vectors(wide, E2M1)]
            other = one[11:] + one[:11]
            name = f"cvt.rn.satfinite{relu}.e2m1x2.{source}"
            registers = "%a, %b" if wide is F32 else "%a"
            text = scope.format(line=f"{name} byte, {registers}; mov.b32 %d, {{byte, byte, byte, byte}};")
            if wide is F32:
                vectors: list[Vector] = list(zip(one, other, strict=True))
                packed: Rule = lambda a, b, r=rule: (r(a) << 4 | r(b)) * 0x01010101  # noqa: E731
            else:
                vectors = [(low | high << 16,) for low, high in zip(one, other, strict=True)]
                packed = lambda a, r=rule: (r(a >> 16) << 4 | r(a & 0xFFFF)) * 0x01010101  # noqa: E731
            FORMS[name] = Form(("b32",) * len(vectors[0]), "b32", packed, vectors, text=text)
        widen = narrow_one(E2M1, F16, "rn", relu=bool(relu))
        name = f"cvt.rn{relu}.f16x2.e2m1x2"
        text = scope.format(line=f"mov.b16 {{byte, _}}, %a; {name} %d, byte;")
        widened = lambda a, w=widen: w(a & 15) | w(a >> 4 & 15) << 16  # noqa: E731
        FORMS[name] = Form(("b16",), "b32", widened, [(i * 0x101,) for i in range(256)], text=text)


declare_integer_to_integer()
declare_integer_to_float()
declare_float_to_integer()
declare_float_to_float()
declare_half_and_tensor_float_32()
declare_eight_bits()
declare_four_bits()


@pytest.mark.parametrize("opcode", list(FORMS))
def test_converted_value_is_the_exact_value_rounded_once(opcode: str) -> None:
    """Specials, ties, both ends of the destination's range and random values convert as the manual says."""
    check(opcode, FORMS[opcode])


def unrounded_bf16(a: int) -> int | None:
    """Exact where bf16 holds the value; the manual names no default rounding for the rest."""
    value = decode(F16, a)
    bits = encode(BF16, value)
    return bits if value.is_nan or decode(BF16, bits) == value else None


FORMS["cvt.bf16.f16"] = Form(
    ("b16",), "b16", unrounded_bf16, floats(F16) + [(i << 3,) for i in range(0, 8192, 13)], same_or_nan(BF16)
)


def test_unrounded_conversion_keeps_exact_values() -> None:
    """``cvt.bf16.f16`` without rounding, which Triton writes for fp8 operands, is exact on values that bf16 holds."""
    check("cvt.bf16.f16", FORMS["cvt.bf16.f16"])


# A register wider than the type: the source gives its low bits, the destination is sign or zero extended (9.4.1).
WIDE = {
    "cvt.s32.s8": ("b32", "b32", lambda a: signed(a, 8) & mask(32)),
    "cvt.s64.s8": ("b64", "b64", lambda a: signed(a, 8) & mask(64)),
    "cvt.u32.u8": ("b32", "b32", lambda a: a & 0xFF),
    "cvt.u16.u8": ("b32", "b16", lambda a: a & 0xFF),
    "cvt.s16.s8": ("b32", "b16", lambda a: signed(a, 8) & mask(16)),
    "cvt.s8.s32": ("b32", "b32", lambda a: signed(a, 8) & mask(32)),
    "cvt.s8.s64": ("b64", "b64", lambda a: signed(a, 8) & mask(64)),
    "cvt.u8.u32": ("b32", "b64", lambda a: a & 0xFF),
    "cvt.s16.s32": ("b32", "b32", lambda a: signed(a, 16) & mask(32)),
    "cvt.u32.u16": ("b64", "b64", lambda a: a & 0xFFFF),
    "cvt.rn.f32.s8": ("b32", "b32", lambda a: encode(F32, finite(signed(a, 8)))),
    "cvt.rn.f16.u8": ("b32", "b16", lambda a: encode(F16, finite(a & 0xFF))),
    "cvt.rn.f32.u16": ("b64", "b32", lambda a: encode(F32, finite(a & 0xFFFF))),
}


@pytest.mark.parametrize("opcode", WIDE)
def test_wider_register_gives_its_low_bits_and_takes_an_extended_result(opcode: str) -> None:
    """An 8- or 16-bit value in a wider register converts as section 9.4.1 says."""
    source, result, rule = WIDE[opcode]
    check(opcode, Form((source,), result, rule, integers(int(source[1:]))))


@pytest.mark.parametrize(("form", "letter", "word"), [(F16, "e", "H"), (F32, "f", "I"), (F64, "d", "Q")])
def test_exact_arithmetic_agrees_with_the_machine(form: Format, letter: str, word: str) -> None:
    """The oracle of these tests reads and rounds IEEE formats as Python's struct module does."""
    for (pattern,) in floats(form, count=400):
        (number,) = struct.unpack(letter, struct.pack(word, pattern))
        value = decode(form, pattern)
        assert value.is_nan == math.isnan(number)
        assert value.is_infinite == math.isinf(number)
        if value.is_finite:
            assert value.number == Fraction(number)
            assert encode(form, value) == pattern
    limit = decode(form, form.largest).number
    for (pattern,) in floats(F64, count=400):
        (double,) = struct.unpack("d", struct.pack("Q", pattern))
        if math.isfinite(double) and abs(double) <= limit:
            (packed,) = struct.unpack(word, struct.pack(letter, double))
            assert encode(form, finite(Fraction(double), math.copysign(1, double) < 0)) == packed


def test_expectation_rounded_towards_zero_fails() -> None:
    """The vectors tell rounding modes apart: truncation is reported as wrong for a round-to-nearest form."""
    check("cvt.rn.bf16.f32", FORMS["cvt.rn.bf16.f32"])
    with pytest.raises(AssertionError, match="wrong"):
        check("cvt.rn.bf16.f32", FORMS["cvt.rn.bf16.f32"], narrow_one(F32, BF16, "rz"))
