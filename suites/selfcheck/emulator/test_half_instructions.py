"""f16, bf16 and their packed pairs against PTX ISA 9.1, section 9.7.4, by exact rational arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest

from .exact import (
    BF16,
    F16,
    Format,
    Value,
    add,
    clamp_to_positive,
    clamp_to_unit,
    decode,
    encode,
    finite,
    flush,
    fuse,
    halves,
    is_nan,
    multiply,
    negate,
    pack,
    rounds_up_to_normal,
    two_to,
    ulp,
)
from .one_instruction import Form, Vector, check, execute, floats, paired, same, same_or_nan

Rule = Callable[..., int | None]
FORMATS = {"f16": F16, "bf16": BF16}
CLAMPS: dict[str, Callable[[Value], Value]] = {"": lambda v: v, ".sat": clamp_to_unit, ".relu": clamp_to_positive}
OPERATIONS: dict[str, tuple[int, Callable[..., Value]]] = {
    "add": (2, add),
    "sub": (2, lambda a, b: add(a, negate(b))),
    "mul": (2, multiply),
    "fma": (3, fuse),
}


def arithmetic(form: Format, operation: Callable[..., Value], clamp: str = "", ftz: bool = False) -> Rule:
    """Exact operation, one rounding to nearest even, then the clamp and the flush.

    Whether .ftz flushes a subnormal result that rounding makes normal is not documented: None then.
    """

    def rule(*operands: int) -> int | None:
        values = [decode(form, flush(form, bits) if ftz else bits) for bits in operands]
        value = CLAMPS[clamp](operation(*values))
        result = encode(form, value)
        if ftz and rounds_up_to_normal(form, value, result):
            return None
        return flush(form, result) if ftz else result

    return rule


def in_halves(rule: Rule) -> Rule:
    """Apply to both halves; an open result in one leaves the pair open."""

    def both(*operands: int) -> int | None:
        low, high = (rule(*column) for column in zip(*(halves(v) for v in operands), strict=True))
        return None if low is None or high is None else pack(low, high)

    return both


def operands_for(name: str, form: Format) -> list[Vector]:
    """Specials, neighbours in size, and for fma a product halfway between two numbers with a tiny addend."""
    count = OPERATIONS[name][0]
    vectors = floats(form, count, seed=name)
    if name != "fma":
        return vectors
    half = (form.mantissa_bits + 1) // 2
    a = encode(form, finite(1 + two_to(-half)))
    b = encode(form, finite(1 + two_to(half - form.mantissa_bits - 1)))
    signs = (0, form.sign_bit)
    return vectors + [(a | s, b, c | t) for c in (0, 1, 2, form.mantissa_bits) for s in signs for t in signs]


FORMS: dict[str, Form] = {}


def declare(opcode: str, suffix: str, rule: Rule, vectors: list[Vector], strict: bool = False) -> None:
    """The scalar form and the packed one."""
    form = FORMATS[suffix]
    count = len(vectors[0])
    one, two = (same, same) if strict else (same_or_nan(form), same_or_nan(form, 2))
    FORMS[f"{opcode}.{suffix}"] = Form(("b16",) * count, "b16", rule, vectors, one)
    FORMS[f"{opcode}.{suffix}x2"] = Form(("b32",) * count, "b32", in_halves(rule), paired(vectors, 16), two)


for suffix, form in FORMATS.items():
    for name, (_, operation) in OPERATIONS.items():
        vectors = operands_for(name, form)
        for rounding in (".rn",) if name == "fma" else ("", ".rn"):
            for ftz in ("", ".ftz") if suffix == "f16" else ("",):
                clamps = (["", ".sat"] if suffix == "f16" else [""]) + ([".relu"] if name == "fma" else [])
                for clamp in clamps:
                    rule = arithmetic(form, operation, clamp, bool(ftz))
                    declare(f"{name}{rounding}{ftz}{clamp}", suffix, rule, vectors)
    sign = form.sign_bit
    declare("neg", suffix, lambda a, s=sign: a ^ s, floats(form))
    declare("abs", suffix, lambda a, s=sign: a & ~s, floats(form))


def smaller_or_larger(form: Format, largest: bool, nan: bool, xorsign: bool, ftz: bool) -> Rule:
    """Sections 9.7.4.7 and 8: a number beats a NaN unless .NaN is written; +0 is above -0."""

    def order(bits: int) -> tuple[bool, Fraction | float]:
        value = decode(form, bits)
        size = math.inf if value.is_infinite else value.size
        return (not value.negative, -size if value.negative else size)

    def rule(a: int, b: int) -> int:
        if ftz:
            a, b = flush(form, a), flush(form, b)
        sign = (a ^ b) & form.sign_bit
        if xorsign:
            a, b = a & ~form.sign_bit, b & ~form.sign_bit
        nans = is_nan(form, a) + is_nan(form, b)
        if nans == 2 or (nans and nan):
            return form.canonical_nan
        if nans:
            a = b = b if is_nan(form, a) else a
        result = (max if largest else min)(a, b, key=order)
        return result & ~form.sign_bit | sign if xorsign else result

    return rule


for suffix, form in FORMATS.items():
    for name in ("min", "max"):
        for ftz in ("", ".ftz") if suffix == "f16" else ("",):
            for nan in ("", ".NaN"):
                for xorsign in ("", ".xorsign.abs"):
                    rule = smaller_or_larger(form, name == "max", bool(nan), bool(xorsign), bool(ftz))
                    declare(f"{name}{ftz}{nan}{xorsign}", suffix, rule, floats(form, 2, seed="order"), strict=bool(nan))


@pytest.mark.parametrize("opcode", list(FORMS))
def test_result_is_the_exact_result_rounded_once(opcode: str) -> None:
    """Specials, ties, subnormals and random operands give the correctly rounded result in every half."""
    check(opcode, FORMS[opcode])


# opcode -> (function, format, flushes, relative bound, absolute bound); sections 9.7.4.9 (tanh) and 9.7.4.10 (ex2).
# A relative bound cannot hold for a result below the normal numbers: one step is allowed there.
APPROXIMATE: dict[str, tuple[Callable[[float], float], Format, bool, float, float]] = {
    "ex2.approx.f16": (math.exp2, F16, False, 2**-9.9, 0),
    "ex2.approx.ftz.bf16": (math.exp2, BF16, True, 2**-7, 0),
    "tanh.approx.f16": (math.tanh, F16, False, 0, 2**-10.987),
    "tanh.approx.bf16": (math.tanh, BF16, False, 0, 2**-8),
}
FORMS |= {f"{opcode}{pair}": None for opcode in APPROXIMATE for pair in ("", "x2")}


def judge(opcode: str, bits: int, got: int) -> bool:
    """Whether one element's result is allowed."""
    function, form, ftz, relative, absolute = APPROXIMATE[opcode]
    value, result = decode(form, flush(form, bits) if ftz else bits), decode(form, got)
    if value.is_nan:
        return result.is_nan
    if result.is_nan:
        return False
    if value.is_infinite:
        bounded = {True: finite(0), False: value} if function is math.exp2 else {True: finite(-1), False: finite(1)}
        return result == bounded[value.negative]
    if value.is_zero:
        return result == (finite(1) if function is math.exp2 else value)
    argument = float(value.number)
    if argument >= 1024 and function is math.exp2:
        return result.is_infinite
    true = Fraction(function(argument))
    allowed = Fraction(relative) * abs(true) + Fraction(absolute)
    if abs(true) < form.smallest_normal:
        allowed += ulp(form, abs(true))
    largest = decode(form, form.largest).number
    if result.is_infinite:
        return not result.negative and true > largest - allowed
    if ftz and result.is_zero and abs(true) < form.smallest_normal + allowed:
        return True
    if ftz and 0 < result.size < form.smallest_normal:
        return False
    return abs(result.number - min(true, largest)) <= allowed


@pytest.mark.parametrize("opcode", APPROXIMATE)
@pytest.mark.parametrize("pair", ["", "x2"])
def test_approximation_is_within_the_documented_error(opcode: str, pair: str) -> None:
    """Special inputs give the manual's table and the rest stays within its stated error, in each half."""
    form = APPROXIMATE[opcode][1]
    spread = [(encode(form, finite(Fraction(i, 16) - 26)),) for i in range(700)]
    # Inputs whose power of two is at the lower end of bf16, its subnormals included.
    spread += [(encode(form, finite(Fraction(-i, 2))),) for i in range(245, 275)]
    vectors = floats(form) + spread
    if pair:
        vectors = paired(vectors, 16)
    kind = "b32" if pair else "b16"
    results = execute(f"{opcode}{pair} %d, %a;", {"a": (kind, [v[0] for v in vectors])}, {"d": kind})
    wrong = []
    for (bits,), (got,) in zip(vectors, results, strict=True):
        elements = zip(halves(bits), halves(got), strict=True) if pair else [(bits, got)]
        wrong += [f"{one:#x} -> {other:#x}" for one, other in elements if not judge(opcode, one, other)]
    assert not wrong, f"{opcode}{pair}: {len(wrong)} wrong: " + "; ".join(wrong[:5])


def test_expectation_rounded_twice_fails() -> None:
    """The vectors tell one rounding from two: an fma rounded to f16 before the sum is reported as wrong."""

    def twice(a: int, b: int, c: int) -> int:
        product = encode(F16, multiply(decode(F16, a), decode(F16, b)))
        return encode(F16, add(decode(F16, product), decode(F16, c)))

    check("fma.rn.f16", FORMS["fma.rn.f16"])
    with pytest.raises(AssertionError, match="wrong"):
        check("fma.rn.f16", FORMS["fma.rn.f16"], twice)
