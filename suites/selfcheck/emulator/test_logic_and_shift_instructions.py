"""Logic, shifts, byte permutes, selections and moves against PTX ISA 9.1, sections 9.7.6, 9.7.8 and 9.7.9."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from .exact import F32, decode, flush, halves, mask, signed
from .one_instruction import Form, Vector, check, execute, floats, integer_edges, integers

Rule = Callable[..., int]
BITWISE: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
TRUTH: list[Vector] = [(a, b) for a in (0, 1) for b in (0, 1)]
FORMS: dict[str, Form] = {}

for name, operation in BITWISE.items():
    FORMS[f"{name}.pred"] = Form(("pred", "pred"), "pred", operation, TRUTH)
    for width in (16, 32, 64):
        FORMS[f"{name}.b{width}"] = Form((f"b{width}",) * 2, f"b{width}", operation, integers(width, width))
FORMS["not.pred"] = Form(("pred",), "pred", lambda a: 1 - a, [(0,), (1,)])
for width in (16, 32, 64):
    FORMS[f"not.b{width}"] = Form((f"b{width}",), f"b{width}", lambda a, w=width: a ^ mask(w), integers(width))
    FORMS[f"cnot.b{width}"] = Form((f"b{width}",), f"b{width}", lambda a: int(a == 0), integers(width))

AMOUNTS = [0, 1, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 255, 256, 0x80000000, 0xFFFFFFFF]


def shift_vectors(width: int) -> list[Vector]:
    """Every edge integer by every amount, amounts at and past the width and past 255 included."""
    values = [*integer_edges(width), *(v[0] for v in integers(width, seed="shifted", count=40))]
    return [(value, amount) for value in values for amount in AMOUNTS]


def shift(kind: str, width: int, left: bool) -> Rule:
    """Sections 9.7.8.8 and 9: amounts are unsigned and clamp to the width; .s fills with the sign."""

    def rule(a: int, b: int) -> int:
        amount = min(b, width)
        value = signed(a, width) if kind == "s" else a
        return (value << amount if left else value >> amount) & mask(width)

    return rule


for width in (16, 32, 64):
    operands = (f"b{width}", "b32")
    FORMS[f"shl.b{width}"] = Form(operands, f"b{width}", shift("b", width, True), shift_vectors(width))
    for kind in "bus":
        FORMS[f"shr.{kind}{width}"] = Form(operands, f"b{width}", shift(kind, width, False), shift_vectors(width))


def funnel(left: bool, wrap: bool) -> Rule:
    """Section 9.7.8.7: the 64-bit value b:a shifted, its high (left) or low (right) word kept."""

    def rule(a: int, b: int, c: int) -> int:
        amount = c % 32 if wrap else min(c, 32)
        both = b << 32 | a
        return (both << amount >> 32 if left else both >> amount) & mask(32)

    return rule


FUNNEL = [(*pair, amount) for pair in integers(32, 32)[-30:] for amount in AMOUNTS]
for side in "lr":
    for mode in ("clamp", "wrap"):
        FORMS[f"shf.{side}.{mode}.b32"] = Form(("b32",) * 3, "b32", funnel(side == "l", mode == "wrap"), FUNNEL)


def look_up(table: int) -> Rule:
    """Section 9.7.8.6: bit (a, b, c) of the table, bit by bit."""

    def rule(a: int, b: int, c: int) -> int:
        result = 0
        for i in range(32):
            index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)
            result |= (table >> index & 1) << i
        return result

    return rule


TABLES = (0x00, 0xFF, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0xD8, 0x1B, 0xF0, 0xCC, 0xAA, 0x40, 0x02)
LOOK_UPS = {f"lop3.b32 (table {table:#04x})": table for table in TABLES}
for name, table in LOOK_UPS.items():
    text = f"lop3.b32 %d, %a, %b, %c, {table:#x};"
    FORMS[name] = Form(("b32",) * 3, "b32", look_up(table), integers(32, 32, 32)[-80:], text=text)

# Section 9.7.9.7: source byte of the result's bytes 3, 2, 1, 0 for a selector of 0, 1, 2, 3.
PERMUTES = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


def chosen(a: int, b: int, order: Sequence[int]) -> int:
    """Bytes of b:a, most significant first; a selection above 7 replicates the sign of the byte."""
    result = 0
    for selection in order:
        byte = (b << 32 | a) >> (8 * (selection & 7)) & 0xFF
        if selection & 8:
            byte = 0xFF * (byte >> 7)
        result = result << 8 | byte
    return result


def permute(mode: str) -> Rule:
    if not mode:
        return lambda a, b, c: chosen(a, b, [c >> 12 & 15, c >> 8 & 15, c >> 4 & 15, c & 15])
    return lambda a, b, c: chosen(a, b, [int(digit) for digit in PERMUTES[mode][c & 3]])


SELECTORS = [(*v[:2], v[2]) for v in integers(32, 32, 32, seed="prmt", count=300)[200:]]
SELECTORS += [(0x80917F6E, 0x8A017BFC, 0x1111 * i) for i in range(16)] + [(0x03020100, 0x07060504, 0x3340)]
FORMS["prmt.b32"] = Form(("b32",) * 3, "b32", permute(""), SELECTORS)
for mode in PERMUTES:
    vectors = [(*v[:2], i) for i, v in enumerate(SELECTORS[:80])]
    FORMS[f"prmt.b32.{mode}"] = Form(("b32",) * 3, "b32", permute(mode), vectors)

for width, kinds in (
    (16, ("b16", "u16", "s16")),
    (32, ("b32", "u32", "s32", "f32")),
    (64, ("b64", "u64", "s64", "f64")),
):
    register = f"b{width}"
    pairs = integers(width, width, count=40)
    chosen_by = [(a, b, i % 2) for i, (a, b) in enumerate(pairs)]
    by_integer = [(a, b, c) for (a, b), c in zip(pairs, [v[0] for v in integers(32, count=len(pairs))], strict=False)]
    by_float = [(a, b, c) for (a, b), (c,) in zip(pairs, floats(F32, count=len(pairs)), strict=False)]

    def at_least_zero(c: int, ftz: bool) -> bool:
        """Section 9.7.6.4: minus zero counts as zero, and NaN takes the second operand."""
        value = decode(F32, flush(F32, c) if ftz else c)
        return not value.is_nan and (value.is_zero or not value.negative)

    for kind in kinds:
        FORMS[f"selp.{kind}"] = Form((register, register, "pred"), register, lambda a, b, c: a if c else b, chosen_by)
        FORMS[f"slct.{kind}.s32"] = Form(
            (register, register, "b32"), register, lambda a, b, c: b if c >> 31 else a, by_integer
        )
        for ftz in ("", ".ftz"):
            FORMS[f"slct{ftz}.{kind}.f32"] = Form(
                (register, register, "b32"),
                register,
                lambda a, b, c, f=at_least_zero, z=bool(ftz): a if f(c, z) else b,
                by_float,
            )
        FORMS[f"mov.{kind}"] = Form((register,), register, lambda a: a, integers(width))
FORMS["mov.pred"] = Form(("pred",), "pred", lambda a: a, [(0,), (1,)])


@pytest.mark.parametrize("opcode", list(FORMS))
def test_result_is_the_manuals(opcode: str) -> None:
    """Edge and random operands give the manual's result bit for bit."""
    check(opcode, FORMS[opcode])


def test_look_up_with_predicate_combines_nonzero_result_with_it() -> None:
    """``lop3.or.b32 d|p`` sets p to (d != 0) or q, ``lop3.and`` to (d != 0) and q."""
    vectors = [(a, b, c, i % 2) for i, (a, b, c) in enumerate([*integers(32, 32, 32)[-60:], (0, 0, 0), (0, 0, 0)])]
    columns = list(zip(*vectors, strict=True))
    inputs = {n: (k, c) for n, k, c in zip("abcq", ("b32", "b32", "b32", "pred"), columns, strict=True)}
    for name, combine in (("or", lambda x, q: x or q), ("and", lambda x, q: x and q)):
        got = execute(f"lop3.{name}.b32 %d|%p, %a, %b, %c, 0x80, %q;", inputs, {"d": "b32", "p": "pred"})
        for (a, b, c, q), (d, p) in zip(vectors, got, strict=True):
            assert d == a & b & c
            assert p == int(combine(d != 0, bool(q)))


# line -> the registers it needs, inputs, outputs, and the outputs as a function of the inputs.
MOVES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], Callable[..., tuple[int, ...]]]] = {
    "mov.b32 {%d, %e}, %a;": ("", ("b32",), ("b16", "b16"), lambda a: halves(a)),
    "mov.b32 {%d, _}, %a;": ("", ("b32",), ("b16",), lambda a: (halves(a)[0],)),
    "mov.b32 {_, %d}, %a;": ("", ("b32",), ("b16",), lambda a: (halves(a)[1],)),
    "mov.b32 %d, {%a, %b};": ("", ("b16", "b16"), ("b32",), lambda a, b: (a | b << 16,)),
    "mov.b64 {%d, %e}, %a;": ("", ("b64",), ("b32", "b32"), lambda a: halves(a, 32)),
    "mov.b64 {_, %d}, %a;": ("", ("b64",), ("b32",), lambda a: (halves(a, 32)[1],)),
    "mov.b64 {%d, _}, %a;": ("", ("b64",), ("b32",), lambda a: (halves(a, 32)[0],)),
    "mov.b64 %d, {%a, %b};": ("", ("b32", "b32"), ("b64",), lambda a, b: (a | b << 32,)),
    "mov.b64 {%d, %e, %f, %g}, %a;": (
        "",
        ("b64",),
        ("b16", "b16", "b16", "b16"),
        lambda a: tuple(a >> (16 * i) & 0xFFFF for i in range(4)),
    ),
    "mov.b64 {_, %d, _, %e}, %a;": ("", ("b64",), ("b16", "b16"), lambda a: (a >> 16 & 0xFFFF, a >> 48)),
    "mov.b64 %d, {%a, %b, %c, %a};": (
        "",
        ("b16", "b16", "b16"),
        ("b64",),
        lambda a, b, c: (a | b << 16 | c << 32 | a << 48,),
    ),
    "mov.b32 {%x0, %x1, %x2, %x3}, %a; mov.b32 %d, {%x3, %x2, %x1, %x0};": (
        ".reg .b8 %x<4>;",
        ("b32",),
        ("b32",),
        lambda a: (int.from_bytes(a.to_bytes(4, "little"), "big"),),
    ),
    "mov.b16 {%x0, %x1}, %a; mov.b16 %d, {%x1, %x0};": (
        ".reg .b8 %x<2>;",
        ("b16",),
        ("b16",),
        lambda a: (a >> 8 | (a & 0xFF) << 8,),
    ),
    "mov.b32 %d, 0xDEADBEEF;": ("", ("b32",), ("b32",), lambda a: (0xDEADBEEF,)),
    "mov.b64 %d, -2;": ("", ("b32",), ("b64",), lambda a: (mask(64) - 1,)),
    "mov.b16 %d, -2;": ("", ("b32",), ("b16",), lambda a: (0xFFFE,)),
    "mov.u16 %d, 0x0;": ("", ("b32",), ("b16",), lambda a: (0,)),
    "mov.pred %p, -1; selp.b32 %d, %a, 0, %p;": (".reg .pred %p;", ("b32",), ("b32",), lambda a: (a,)),
    "mov.pred %p, 0; selp.b32 %d, %a, 7, %p;": (".reg .pred %p;", ("b32",), ("b32",), lambda a: (7,)),
    "setp.lt.s32 %p, %a, 0; selp.b32 %d, 16, 0, %p;": (
        ".reg .pred %p;",
        ("b32",),
        ("b32",),
        lambda a: (16 * (a >> 31),),
    ),
    "setp.lt.s32 %p, %a, 0; selp.f32 %d, 0fFF800000, %a, %p;": (
        ".reg .pred %p;",
        ("b32",),
        ("b32",),
        lambda a: (0xFF800000 if a >> 31 else a,),
    ),
    "mov.f32 %d, 0f7FC12345;": ("", ("b32",), ("b32",), lambda a: (0x7FC12345,)),
}
FORMS |= dict.fromkeys(MOVES)


@pytest.mark.parametrize("line", MOVES)
def test_move_packs_and_unpacks(line: str) -> None:
    """Vector moves split and join registers, least significant element first; ``_`` drops an element (9.7.9.4)."""
    registers, kinds, results, rule = MOVES[line]
    vectors = integers(*(int(kind[1:]) for kind in kinds))
    columns = zip(*vectors, strict=True)
    inputs = {name: (kind, column) for name, kind, column in zip("abc", kinds, columns, strict=False)}
    outputs = dict(zip("defg", results, strict=False))
    got = execute(line, inputs, outputs, registers=registers)
    for vector, result in zip(vectors, got, strict=True):
        assert result == rule(*vector), f"{line} on {[hex(v) for v in vector]}"


def test_scope_of_braces_keeps_its_own_registers() -> None:
    """Inline assembly declares registers in braces: they do not disturb outer or later ones of the same name."""
    lines = [
        "mov.b32 %t, %a;",
        "{ .reg .b32 %t; .reg .b16 lo, hi; mov.b32 %t, 5; mov.b32 {lo, hi}, %a; mov.b32 %d, {hi, lo}; }",
        "{ .reg .b16 lo; mov.b32 {lo, _}, %t; cvt.u32.u16 %e, lo; }",
        "mov.b32 %f, %t;",
    ]
    vectors = [v[0] for v in integers(32)]
    got = execute(lines, {"a": ("b32", vectors)}, {"d": "b32", "e": "b32", "f": "b32"}, registers=".reg .b32 %t;")
    assert got == [(a >> 16 | (a & 0xFFFF) << 16, a & 0xFFFF, a) for a in vectors]


GUARDS = {
    "@%p mov.b32 %d, %a;": lambda a, p: a if p else 7,
    "@!%p mov.b32 %d, %a;": lambda a, p: 7 if p else a,
    "@%p add.s32 %d, %d, 1;": lambda a, p: 8 if p else 7,
    "@!%p setp.ne.b32 %q, %a, %a; selp.b32 %d, 1, 0, %q;": lambda a, p: 1 if p else 0,
}


@pytest.mark.parametrize("line", GUARDS)
def test_guard_writes_only_where_it_holds(line: str) -> None:
    """A lane whose guard is false keeps its destination (section 9.3)."""
    values = [random_value for (random_value,) in integers(32)]
    flags = [i * 7 // 3 % 2 for i in range(len(values))]
    lines = ["mov.b32 %d, 7;", "setp.eq.b32 %q, %a, %a;", line]
    got = execute(lines, {"a": ("b32", values), "p": ("pred", flags)}, {"d": "b32"}, registers=".reg .pred %q;")
    assert [d for (d,) in got] == [GUARDS[line](a, p) & mask(32) for a, p in zip(values, flags, strict=True)]


def test_destination_may_be_a_source() -> None:
    """An instruction reads all its operands before it writes."""
    vectors = integers(32, 32)
    columns = dict(zip("ab", zip(*vectors, strict=True), strict=True))
    lines = ["mov.b32 %d, %a;", "sub.s32 %d, %b, %d;", "mad.lo.s32 %d, %d, %d, %d;"]
    got = execute(lines, {name: ("b32", column) for name, column in columns.items()}, {"d": "b32"})
    assert [d for (d,) in got] == [((b - a) ** 2 + (b - a)) & mask(32) for a, b in vectors]
