"""Integer arithmetic of the emulator against PTX ISA 9.1, section 9.7.1, on Python integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .exact import halves, mask, pack, signed
from .one_instruction import Form, check, integers, paired

WIDTHS = (16, 32, 64)
Rule = Callable[..., int]


def typed(kind: str, width: int, operation: Rule, result_width: int | None = None) -> Rule:
    """Read operands of one integer type, apply the operation on exact integers, keep the low bits."""

    def rule(*operands: int) -> int:
        values = [signed(v, width) if kind == "s" else v & mask(width) for v in operands]
        return operation(*values) & mask(result_width or width)

    return rule


def clamp(value: int, width: int) -> int:
    return max(-(1 << (width - 1)), min((1 << (width - 1)) - 1, value))


def truncated_quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def truncated_remainder(a: int, b: int) -> int:
    return a - b * truncated_quotient(a, b)


def in_halves(operation: Callable[..., int], kind: str) -> Rule:
    """Apply to the low and the high 16 bits of each operand."""
    rule = typed(kind, 16, operation)
    return lambda *operands: pack(*(rule(*column) for column in zip(*(halves(v) for v in operands), strict=True)))


def binary(kind: str, width: int, operation: Rule) -> Form:
    register = f"b{width}"
    return Form((register, register), register, typed(kind, width, operation), integers(width, width))


def ternary(kind: str, width: int, operation: Rule, wide: bool = False) -> Form:
    register, result = f"b{width}", f"b{width * 2 if wide else width}"
    third = width * 2 if wide else width

    def rule(a: int, b: int, c: int) -> int:
        a, b, c = (signed(v, w) if kind == "s" else v for v, w in ((a, width), (b, width), (c, third)))
        return operation(a, b, c) & mask(third)

    return Form((register, register, result), result, rule, integers(width, width, third))


def unary(kind: str, width: int, operation: Rule, result: str = "") -> Form:
    result = result or f"b{width}"
    return Form((f"b{width}",), result, typed(kind, width, operation, int(result[1:])), integers(width))


def division(kind: str, width: int, operation: Rule) -> Form:
    """The manual leaves division by zero open, and so is the least number by minus one; neither is tried."""
    least, minus_one = 1 << (width - 1), mask(width)
    vectors = [v for v in integers(width, width) if v[1] and not (kind == "s" and v == (least, minus_one))]
    return Form((f"b{width}", f"b{width}"), f"b{width}", typed(kind, width, operation), vectors)


def leading_zeros(width: int) -> Rule:
    return lambda a: width - a.bit_length()


def most_significant(kind: str, width: int, shift: bool) -> Rule:
    def rule(a: int) -> int:
        a = a ^ mask(width) if kind == "s" and a >> (width - 1) else a
        if a == 0:
            return 0xFFFFFFFF
        return width - a.bit_length() if shift else a.bit_length() - 1

    return rule


def extract(kind: str, width: int) -> Rule:
    """Section 9.7.1.19, bit by bit: position and length are bytes, and a field past the top is sign filled."""

    def rule(a: int, b: int, c: int) -> int:
        position, length = b & 0xFF, c & 0xFF
        fill = 0 if kind == "u" or length == 0 else (a >> min(position + length - 1, width - 1)) & 1
        result = 0
        for i in range(width):
            bit = (a >> (position + i)) & 1 if i < length and position + i < width else fill
            result |= bit << i
        return result

    return rule


def insert(width: int) -> Rule:
    """Section 9.7.1.20, bit by bit."""

    def rule(a: int, b: int, c: int, e: int) -> int:
        position, length = c & 0xFF, e & 0xFF
        for i in range(length):
            if position + i < width:
                b = b & ~(1 << (position + i)) | ((a >> i) & 1) << (position + i)
        return b

    return rule


def field_vectors(width: int, values: int) -> list[tuple[int, ...]]:
    """Every pair of an edge position and an edge length, and random ones.

    Positions and lengths are bytes. Larger ones are cut to the low byte in the 32-bit forms only: the manual says it of
    the 64-bit forms too, but code that ptxas makes for an H200 does not, so they are left out there.
    """
    places = [0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 128, 255]
    if width == 32:
        places += [256, 0x1FF, 0xFFFFFF03]
    data = integers(*[width] * values, count=240, seed="fields")
    pairs = [(p, length) for p in places for length in places]
    drawn = [(v[0] % 80, v[1] % 80) for v in integers(32, 32, seed="places")]
    vectors = [(*data[-1 - i % 240], *pair) for i, pair in enumerate(pairs + drawn)]
    return vectors + [(mask(width), *[0] * (values - 1), *pair) for pair in pairs]


def extend(kind: str, wrap: bool) -> Rule:
    """Section 9.7.1.21: extend from bit N - 1; N clamped to 32 or taken modulo 32."""

    def rule(a: int, b: int) -> int:
        n = b % 32 if wrap else min(b, 32)
        if n == 0:
            return 0
        return signed(a, n) & mask(32) if kind == "s" else a & mask(n)

    return rule


def bit_mask(wrap: bool) -> Rule:
    """Section 9.7.1.22: b ones from position a on; both clamped or both modulo 32."""

    def rule(a: int, b: int) -> int:
        a, b = (a % 32, b % 32) if wrap else (min(a, 32), min(b, 32))
        return (mask(b) << a) & mask(32)

    return rule


def dot(a_kind: str, b_kind: str, width: int, b_from: int = 0) -> Rule:
    """Sections 9.7.1.23 and 24: four (or two) products of fields of a with bytes of b, added to c."""

    def rule(a: int, b: int, c: int) -> int:
        total = signed(c, 32) if "s" in (a_kind, b_kind) else c
        for i in range(32 // width):
            one = (a >> (width * i)) & mask(width)
            other = (b >> (8 * i + b_from)) & 0xFF
            total += (signed(one, width) if a_kind == "s" else one) * (signed(other, 8) if b_kind == "s" else other)
        return total & mask(32)

    return rule


FORMS: dict[str, Form] = {}
for width in WIDTHS:
    for kind in "su":
        t = f"{kind}{width}"
        FORMS |= {
            f"add.{t}": binary(kind, width, lambda a, b: a + b),
            f"sub.{t}": binary(kind, width, lambda a, b: a - b),
            f"mul.lo.{t}": binary(kind, width, lambda a, b: a * b),
            f"mul.hi.{t}": binary(kind, width, lambda a, b, w=width: a * b >> w),
            f"min.{t}": binary(kind, width, min),
            f"max.{t}": binary(kind, width, max),
            f"div.{t}": division(kind, width, truncated_quotient),
            f"rem.{t}": division(kind, width, truncated_remainder),
            f"mad.lo.{t}": ternary(kind, width, lambda a, b, c: a * b + c),
            f"mad.hi.{t}": ternary(kind, width, lambda a, b, c, w=width: (a * b >> w) + c),
            f"sad.{t}": ternary(kind, width, lambda a, b, c: abs(a - b) + c),
        }
        if width < 64:
            register, double = f"b{width}", f"b{2 * width}"
            product = typed(kind, width, lambda a, b: a * b, 2 * width)
            FORMS[f"mul.wide.{t}"] = Form((register, register), double, product, integers(width, width))
            FORMS[f"mad.wide.{t}"] = ternary(kind, width, lambda a, b, c: a * b + c, wide=True)
    FORMS[f"abs.s{width}"] = unary("s", width, abs)
    FORMS[f"neg.s{width}"] = unary("s", width, lambda a: -a)
for width in (32, 64):
    FORMS[f"popc.b{width}"] = unary("u", width, int.bit_count, "b32")
    FORMS[f"clz.b{width}"] = unary("u", width, leading_zeros(width), "b32")
    FORMS[f"brev.b{width}"] = unary("u", width, lambda a, w=width: int(f"{a:0{w}b}"[::-1], 2))
    register = f"b{width}"
    bfi_vectors = field_vectors(width, 2)
    FORMS[f"bfi.b{width}"] = Form((register, register, "b32", "b32"), register, insert(width), bfi_vectors)
    for kind in "su":
        t = f"{kind}{width}"
        FORMS[f"bfind.{t}"] = unary("u", width, most_significant(kind, width, False), "b32")
        FORMS[f"bfind.shiftamt.{t}"] = unary("u", width, most_significant(kind, width, True), "b32")
        bfe_vectors = field_vectors(width, 1)
        FORMS[f"bfe.{t}"] = Form((register, "b32", "b32"), register, extract(kind, width), bfe_vectors)
for kind in "su":
    low24 = {"s": lambda a: signed(a, 24), "u": lambda a: a & mask(24)}[kind]
    for half, shift in (("lo", 0), ("hi", 16)):
        product24 = lambda a, b, f=low24, s=shift: f(a) * f(b) >> s  # noqa: E731
        FORMS[f"mul24.{half}.{kind}32"] = binary("u", 32, product24)
        FORMS[f"mad24.{half}.{kind}32"] = ternary("u", 32, lambda a, b, c, p=product24: p(a, b) + c)
    for mode in ("clamp", "wrap"):
        extension = extend(kind, mode == "wrap")
        FORMS[f"szext.{mode}.{kind}32"] = Form(("b32", "b32"), "b32", extension, integers(32, 32))
    for other in "su":
        FORMS[f"dp4a.{kind}32.{other}32"] = ternary("u", 32, dot(kind, other, 8))
        FORMS[f"dp2a.lo.{kind}32.{other}32"] = ternary("u", 32, dot(kind, other, 16))
        FORMS[f"dp2a.hi.{kind}32.{other}32"] = ternary("u", 32, dot(kind, other, 16, 16))
    for name, operation in (("add", lambda a, b: a + b), ("min", min), ("max", max)):
        packed = paired(integers(16, 16), 16)
        FORMS[f"{name}.{kind}16x2"] = Form(("b32", "b32"), "b32", in_halves(operation, kind), packed)
for mode in ("clamp", "wrap"):
    FORMS[f"bmsk.{mode}.b32"] = Form(("b32", "b32"), "b32", bit_mask(mode == "wrap"), integers(32, 32))
FORMS |= {
    "add.sat.s32": binary("s", 32, lambda a, b: clamp(a + b, 32)),
    "sub.sat.s32": binary("s", 32, lambda a, b: clamp(a - b, 32)),
    "mad.hi.sat.s32": ternary("s", 32, lambda a, b, c: clamp((a * b >> 32) + c, 32)),
    "min.relu.s32": binary("s", 32, lambda a, b: max(0, min(a, b))),
    "max.relu.s32": binary("s", 32, lambda a, b: max(0, a, b)),
}
for name, operation in (("min", min), ("max", max)):
    clamped = in_halves(lambda a, b, f=operation: max(0, f(a, b)), "s")
    FORMS[f"{name}.relu.s16x2"] = Form(("b32", "b32"), "b32", clamped, paired(integers(16, 16), 16))


@pytest.mark.parametrize("opcode", list(FORMS))
def test_result_is_the_exact_integer_result(opcode: str) -> None:
    """Edge and random operands give the manual's result bit for bit."""
    check(opcode, FORMS[opcode])


IMMEDIATES = {
    "mad.lo.s32 %d, %a, -14, 0x7f;": lambda a: a * -14 + 0x7F,
    "sub.s32 %d, 0, %a;": lambda a: -a,
    "add.s32 %d, %a, 0xffffffff;": lambda a: a - 1,
    "and.b32 %d, %a, -32;": lambda a: a & 0xFFFFFFE0,
    "add.s32 %d, %a, 0b101;": lambda a: a + 5,
    "add.s32 %d, %a, 017;": lambda a: a + 15,
    "add.u32 %d, %a, 7U;": lambda a: a + 7,
    "mul.lo.s32 %d, %a, 0x8000;": lambda a: a << 15,
    "bfe.u32 %d, %a, 4, 5;": lambda a: a >> 4 & 31,
    "bfe.s32 %d, %a, 23, 1;": lambda a: -(a >> 23 & 1),
    "bfi.b32 %d, %a, 255, 8, 16;": lambda a: (a & 0xFFFF) << 8 | 255,
    # Selectors 3, 3, 4, 0 from the most significant byte down.
    "prmt.b32 %d, %a, 0x12, 0x3340U;": lambda a: (a >> 24) * 0x01010000 | 0x1200 | a & 0xFF,
    "shr.s32 %d, %a, 31;": lambda a: -(a >> 31),
}


@pytest.mark.parametrize("line", IMMEDIATES)
def test_immediate_operand_has_the_written_value(line: str) -> None:
    """Decimal, negative, hexadecimal, octal, binary and unsigned literals (section 4.5.1)."""
    rule = IMMEDIATES[line]
    check(line, Form(("b32",), "b32", lambda a: rule(a) & mask(32), integers(32), text=line))


NARROW_IMMEDIATES = {
    "and.b16 %d, %a, -32;": ("b16", lambda a: a & 0xFFE0),
    "add.s16 %d, %a, -1;": ("b16", lambda a: a - 1 & 0xFFFF),
    "mul.wide.u16 %d, %a, 256;": ("b32", lambda a: a * 256),
    "mul.wide.s16 %d, %a, -3;": ("b32", lambda a: signed(a, 16) * -3 & mask(32)),
    "mad.wide.s16 %d, %a, 16, -7;": ("b32", lambda a: signed(a, 16) * 16 - 7 & mask(32)),
}


@pytest.mark.parametrize("line", NARROW_IMMEDIATES)
def test_immediate_operand_takes_the_width_of_the_type(line: str) -> None:
    """A negative literal beside 16-bit operands."""
    result, rule = NARROW_IMMEDIATES[line]
    check(line, Form(("b16",), result, rule, integers(16), text=line))


@pytest.mark.parametrize("opcode", ["mul.hi.s32", "bfe.u64"])
def test_wrong_expectation_fails(opcode: str) -> None:
    """The comparison above is able to fail: a result wrong in one bit of one vector is reported."""
    form = FORMS[opcode]
    odd = form.vectors[len(form.vectors) // 2]
    alone = Form(form.operands, form.result, form.rule, [odd])
    check(opcode, alone)
    with pytest.raises(AssertionError, match="1 of 1 wrong"):
        check(opcode, alone, lambda *v: form.rule(*v) ^ 1)
