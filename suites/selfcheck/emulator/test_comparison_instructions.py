"""setp and set of every type, comparison and Boolean combination against PTX ISA 9.1, sections 9.3, 9.7.6 and 9.7.7."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from .exact import BF16, F16, F32, F64, Format, decode, flush, halves, mask, signed
from .one_instruction import Form, Vector, check, execute, floats, integers, paired

ORDER: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMBINE: dict[str, Callable[[bool, bool], bool]] = {
    "and": lambda x, y: x and y,
    "or": lambda x, y: x or y,
    "xor": lambda x, y: x != y,
}
FLOATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
FLOAT_COMPARISONS = [*ORDER, *(f"{name}u" for name in ORDER), "num", "nan"]


def compare_floats(form: Format, name: str, ftz: bool = False) -> Callable[[int, int], bool]:
    """Section 9.3.1.2: ordered forms are false with a NaN, unordered ones true; both zeros are equal."""
    far = Fraction(2) ** 2000

    def rule(a: int, b: int) -> bool:
        values = [decode(form, flush(form, bits) if ftz else bits) for bits in (a, b)]
        unordered = any(value.is_nan for value in values)
        if name in ("num", "nan"):
            return unordered == (name == "nan")
        if unordered:
            return name.endswith("u")
        numbers = [(-far if v.negative else far) if v.is_infinite else v.number for v in values]
        return ORDER[name.removesuffix("u")](*numbers)

    return rule


def compare_integers(kind: str, width: int, name: str) -> Callable[[int, int], bool]:
    order = ORDER[UNSIGNED.get(name, name)]
    return lambda a, b: order(*(signed(v, width) if kind == "s" else v for v in (a, b)))


def equal_and_close(width: int) -> list[Vector]:
    """Edges against each other, random pairs, and pairs that are equal or differ by one."""
    drawn = integers(width, count=60)
    close = [(a, a) for (a,) in drawn] + [(a, (a + 1) & mask(width)) for (a,) in drawn]
    return integers(width, width) + close


def comparable(form: Format) -> list[Vector]:
    return floats(form, 2, seed="compare") + [(a, a) for (a,) in floats(form)]


FORMS: dict[str, Form] = {}
for width in (16, 32, 64):
    registers, vectors = (f"b{width}",) * 2, equal_and_close(width)
    for kind, names in (("s", [*ORDER]), ("u", [*ORDER, *UNSIGNED]), ("b", ["eq", "ne"])):
        for name in names:
            rule = compare_integers(kind, width, name)
            FORMS[f"setp.{name}.{kind}{width}"] = Form(registers, "pred", lambda a, b, r=rule: int(r(a, b)), vectors)
            if width == 32:
                whole = lambda a, b, r=rule: mask(32) * r(a, b)  # noqa: E731
                FORMS[f"set.{name}.u32.{kind}32"] = Form(registers, "b32", whole, vectors)
                one = lambda a, b, r=rule: 0x3F800000 * r(a, b)  # noqa: E731
                FORMS[f"set.{name}.f32.{kind}32"] = Form(registers, "b32", one, vectors)
for suffix, form in FLOATS.items():
    registers, vectors = (f"b{form.width}",) * 2, comparable(form)
    for name in FLOAT_COMPARISONS:
        for ftz in ("", ".ftz") if suffix in ("f16", "f32") else ("",):
            rule = compare_floats(form, name, bool(ftz))
            FORMS[f"setp.{name}{ftz}.{suffix}"] = Form(registers, "pred", lambda a, b, r=rule: int(r(a, b)), vectors)
            if suffix == "f32":
                whole = lambda a, b, r=rule: mask(32) * r(a, b)  # noqa: E731
                FORMS[f"set.{name}{ftz}.u32.f32"] = Form(registers, "b32", whole, vectors)


@pytest.mark.parametrize("opcode", list(FORMS))
def test_comparison_is_the_manuals(opcode: str) -> None:
    """Equal, close, special and random operands compare as the manual says."""
    check(opcode, FORMS[opcode])


COMBINED = {
    f"setp.{name}.{combination}.{suffix}": (name, combination, suffix)
    for combination in COMBINE
    for name, suffix in (("lt", "s32"), ("eq", "b64"), ("hi", "u16"), ("leu", "f32"), ("gt", "f64"), ("ge", "s64"))
}


@pytest.mark.parametrize("opcode", COMBINED)
@pytest.mark.parametrize("third", ["%c", "!%c"])
def test_comparison_is_combined_with_a_predicate(opcode: str, third: str) -> None:
    """``setp.cmp.op p|q, a, b, {!}c`` gives op(a cmp b, c) in p and op(not (a cmp b), c) in q (9.7.6.2)."""
    name, combination, suffix = COMBINED[opcode]
    width = FLOATS[suffix].width if suffix in FLOATS else int(suffix[1:])
    pairs = comparable(FLOATS[suffix]) if suffix in FLOATS else equal_and_close(width)
    rule = compare_floats(FLOATS[suffix], name) if suffix in FLOATS else compare_integers(suffix[0], width, name)
    vectors = [(a, b, i % 3 % 2) for i, (a, b) in enumerate(pairs)]
    columns = list(zip(*vectors, strict=True))
    inputs = {n: (k, c) for n, k, c in zip("abc", (f"b{width}", f"b{width}", "pred"), columns, strict=True)}
    got = execute(f"{opcode} %p|%q, %a, %b, {third};", inputs, {"p": "pred", "q": "pred"})
    for (a, b, c), (p, q) in zip(vectors, got, strict=True):
        flag = bool(c) != third.startswith("!")
        both = (COMBINE[combination](rule(a, b), flag), COMBINE[combination](not rule(a, b), flag))
        assert (bool(p), bool(q)) == both, f"{opcode} {third}: {a:#x}, {b:#x}, {c}"


FORMS |= dict.fromkeys(COMBINED)
PACKED = {
    f"setp.{name}.{suffix}x2": (name, suffix)
    for suffix in ("f16", "bf16")
    for name in ("lt", "ne", "gtu", "nan", "num", "eq")
}
FORMS |= dict.fromkeys(PACKED)


@pytest.mark.parametrize("opcode", PACKED)
def test_packed_comparison_gives_one_predicate_a_half(opcode: str) -> None:
    """``setp.cmp.f16x2 p|q`` compares the low halves into p and the high halves into q (9.7.7.2)."""
    name, suffix = PACKED[opcode]
    rule = compare_floats(FLOATS[suffix], name)
    vectors = paired(comparable(FLOATS[suffix]), 16)
    columns = zip(*vectors, strict=True)
    inputs = {n: ("b32", column) for n, column in zip("ab", columns, strict=True)}
    got = execute(f"{opcode} %p|%q, %a, %b;", inputs, {"p": "pred", "q": "pred"})
    for (a, b), (p, q) in zip(vectors, got, strict=True):
        low, high = zip(halves(a), halves(b), strict=True)
        assert (bool(p), bool(q)) == (rule(*low), rule(*high)), f"{opcode}: {a:#x}, {b:#x}"


IMMEDIATES = {
    "setp.lt.s32 %d, %a, -3;": ("b32", lambda a: signed(a, 32) < -3),
    "setp.gt.u32 %d, %a, 4294967293;": ("b32", lambda a: a > 4294967293),
    "setp.lt.u16 %d, %a, 63;": ("b16", lambda a: a < 63),
    "setp.gt.s16 %d, %a, -1;": ("b16", lambda a: signed(a, 16) > -1),
    "setp.eq.b16 %d, %a, -1;": ("b16", lambda a: a == 0xFFFF),
    "setp.ne.b64 %d, %a, 8;": ("b64", lambda a: a != 8),
    "setp.lt.s64 %d, %a, -1;": ("b64", lambda a: signed(a, 64) < -1),
    "setp.lt.f32 %d, %a, 0f00800000;": ("b32", lambda a: compare_floats(F32, "lt")(a, 0x00800000)),
    "setp.neu.f32 %d, %a, 0fFF800000;": ("b32", lambda a: compare_floats(F32, "neu")(a, 0xFF800000)),
    "setp.eq.f32 %d, %a, 0f00000000;": ("b32", lambda a: compare_floats(F32, "eq")(a, 0)),
    "setp.gt.f64 %d, %a, 0dBFF0000000000000;": ("b64", lambda a: compare_floats(F64, "gt")(a, 0xBFF0000000000000)),
}


@pytest.mark.parametrize("line", IMMEDIATES)
def test_immediate_is_read_in_the_type_of_the_comparison(line: str) -> None:
    """A negative literal keeps its value in a signed comparison and wraps to the width elsewhere."""
    kind, rule = IMMEDIATES[line]
    vectors = integers(int(kind[1:])) + [(i & mask(int(kind[1:])),) for i in range(-5, 70)]
    if ".f" in line:
        vectors += floats(F32 if kind == "b32" else F64)
    check(line, Form((kind,), "pred", lambda a: int(rule(a)), vectors, text=line))


def test_ordered_expectation_fails_for_an_unordered_comparison() -> None:
    """The vectors hold NaNs that tell ordered from unordered forms."""
    wrong = compare_floats(F32, "lt")
    check("setp.ltu.f32", FORMS["setp.ltu.f32"])
    with pytest.raises(AssertionError, match="wrong"):
        check("setp.ltu.f32", FORMS["setp.ltu.f32"], lambda a, b: int(wrong(a, b)))
