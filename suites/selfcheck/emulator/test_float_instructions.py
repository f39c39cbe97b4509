"""f32 and f64 arithmetic of the emulator against PTX ISA 9.1, section 9.7.3, by exact rational arithmetic.

Instructions that IEEE 754 defines are compared bit for bit (any NaN stands for NaN unless the manual says 'canonical').
Approximations are held to the error bound that the manual states for them; the section is named beside each bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest

from .exact import (
    F32,
    F64,
    Format,
    Value,
    add,
    clamp_to_unit,
    decode,
    divide,
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
    square_root,
    two_to,
    ulp,
)
from .one_instruction import Form, Vector, check, execute, floats, paired, same, same_or_nan

Operation = Callable[..., Value]
Rule = Callable[..., int | None]
MODES = ("rn", "rz", "rm", "rp")


def arithmetic(form: Format, operation: Operation, mode: str = "rn", ftz: bool = False, sat: bool = False) -> Rule:
    """Exact operation on the operands' values, one rounding, then saturation and flushing as asked.

    Whether .ftz flushes a subnormal result that rounding makes normal is not documented: None then.
    """

    def rule(*operands: int) -> int | None:
        values = [decode(form, flush(form, bits) if ftz else bits) for bits in operands]
        value = operation(*values, mode)
        result = encode(form, clamp_to_unit(value) if sat else value, mode)
        if ftz and rounds_up_to_normal(form, value, result):
            return None
        return flush(form, result) if ftz else result

    return rule


def in_pair(rule: Rule) -> Rule:
    """Apply to both halves; an open result in one leaves the pair open."""

    def both(*operands: int) -> int | None:
        low, high = (rule(*column) for column in zip(*(halves(v, 32) for v in operands), strict=True))
        return None if low is None or high is None else pack(low, high, 32)

    return both


def subtract(a: Value, b: Value, mode: str) -> Value:
    """A - b; the sign of a NaN does not matter."""
    return add(a, negate(b), mode)


OPERATIONS: dict[str, tuple[int, Operation]] = {
    "add": (2, add),
    "sub": (2, subtract),
    "mul": (2, lambda a, b, mode: multiply(a, b)),
    "fma": (3, fuse),
    "div": (2, lambda a, b, mode: divide(a, b)),
    "rcp": (1, lambda a, mode: divide(finite(1), a)),
    "sqrt": (1, lambda a, mode: square_root(a)),
}


def tie_breakers(form: Format) -> list[Vector]:
    """Fma operands whose product is halfway between two numbers, with an addend far below the last place."""
    half = (form.mantissa_bits + 1) // 2
    a = encode(form, finite(1 + two_to(-half)))
    b = encode(form, finite(1 + two_to(half - form.mantissa_bits - 1)))
    small = [0, 1, form.mantissa_bits, encode(form, finite(form.smallest_normal)), encode(form, finite(two_to(-14)))]
    products = [(a, b), (a | form.sign_bit, b)]
    return [(*product, c | sign) for product in products for c in small for sign in (0, form.sign_bit)]


def operands_for(name: str, form: Format) -> list[Vector]:
    count = OPERATIONS[name][0]
    vectors = floats(form, count, seed=name)
    return vectors + tie_breakers(form) if name == "fma" else vectors


FORMS: dict[str, object] = {}


def declare(opcode: str, form: Format, name: str, mode: str, ftz: bool = False, sat: bool = False) -> None:
    register = f"b{form.width}"
    count, operation = OPERATIONS[name]
    rule = arithmetic(form, operation, mode, ftz, sat)
    FORMS[opcode] = Form((register,) * count, register, rule, operands_for(name, form), same_or_nan(form))


for name, (count, _) in OPERATIONS.items():
    unrounded = [""] if name in ("add", "sub", "mul") else []
    for mode in [*unrounded, *MODES]:
        written = f".{mode}" if mode else ""
        for ftz in ("", ".ftz"):
            for sat in ("", ".sat") if name in ("add", "sub", "mul", "fma") else ("",):
                declare(f"{name}{written}{ftz}{sat}.f32", F32, name, mode or "rn", bool(ftz), bool(sat))
        declare(f"{name}{written}.f64", F64, name, mode or "rn")
        if name in ("add", "sub", "mul", "fma"):
            for ftz in ("", ".ftz"):
                pair_rule = in_pair(arithmetic(F32, OPERATIONS[name][1], mode or "rn", bool(ftz)))
                pairs = paired(operands_for(name, F32), 32)
                pair = Form(("b64",) * count, "b64", pair_rule, pairs, same_or_nan(F32, 2))
                FORMS[f"{name}{written}{ftz}.f32x2"] = pair
for mode in MODES:
    declare(f"mad.{mode}.f32", F32, "fma", mode)
    declare(f"mad.{mode}.f64", F64, "fma", mode)


def smaller_or_larger(
    form: Format, largest: bool, nan: bool = False, xorsign: bool = False, absolute: bool = False, ftz: bool = False
) -> Callable[..., int]:
    """Sections 9.7.3.11 and 12: a number beats a NaN unless .NaN is written; +0 is above -0."""

    def order(bits: int) -> tuple[bool, Fraction | float, int]:
        value = decode(form, bits)
        size = math.inf if value.is_infinite else value.size
        return (not value.negative, -size if value.negative else size, 0)

    def two(a: int, b: int) -> int:
        if is_nan(form, a) or is_nan(form, b):
            if nan or (is_nan(form, a) and is_nan(form, b)):
                return form.canonical_nan
            return b if is_nan(form, a) else a
        return (max if largest else min)(a, b, key=order)

    def rule(*operands: int) -> int:
        if ftz:
            operands = tuple(flush(form, bits) for bits in operands)
        sign = (operands[0] ^ operands[1]) & form.sign_bit
        if absolute:
            operands = tuple(bits & ~form.sign_bit for bits in operands)
        result = operands[0]
        for other in operands[1:]:
            result = two(result, other)
        return result & ~form.sign_bit | sign if xorsign and not is_nan(form, result) else result

    return rule


for name in ("min", "max"):
    for ftz in ("", ".ftz"):
        for nan in ("", ".NaN"):
            # Only .NaN promises the canonical pattern.
            accept = same if nan else same_or_nan(F32)
            flags = {"largest": name == "max", "nan": bool(nan), "ftz": bool(ftz)}
            rule = smaller_or_larger(F32, **flags)
            crossed = smaller_or_larger(F32, **flags, xorsign=True, absolute=True)
            magnitude = smaller_or_larger(F32, **flags, absolute=True)
            two, three = floats(F32, 2, seed="order"), floats(F32, 3, seed="order")
            FORMS[f"{name}{ftz}{nan}.f32"] = Form(("b32",) * 2, "b32", rule, two, accept)
            FORMS[f"{name}{ftz}{nan}.xorsign.abs.f32"] = Form(("b32",) * 2, "b32", crossed, two, accept)
            FORMS[f"{name}{ftz}{nan}.f32 (three operands)"] = Form(("b32",) * 3, "b32", rule, three, accept)
            FORMS[f"{name}{ftz}{nan}.abs.f32 (three operands)"] = Form(("b32",) * 3, "b32", magnitude, three, accept)
    rule = smaller_or_larger(F64, largest=name == "max")
    FORMS[f"{name}.f64"] = Form(("b64",) * 2, "b64", rule, floats(F64, 2), same_or_nan(F64))
for form, width in ((F32, 32), (F64, 64)):
    register, accept, one, two = f"b{width}", same_or_nan(form), floats(form), floats(form, 2)
    sign = form.sign_bit
    for ftz in ("", ".ftz") if width == 32 else ("",):
        flushed = (lambda a: flush(F32, a)) if ftz else (lambda a: a)
        FORMS[f"neg{ftz}.f{width}"] = Form((register,), register, lambda a, s=sign, f=flushed: f(a) ^ s, one, accept)
        FORMS[f"abs{ftz}.f{width}"] = Form((register,), register, lambda a, s=sign, f=flushed: f(a) & ~s, one, accept)
    # Section 9.7.3.2: the sign of a with the size of b.
    FORMS[f"copysign.f{width}"] = Form((register,) * 2, register, lambda a, b, s=sign: b & ~s | a & s, two)


def is_of_class(form: Format, name: str, bits: int) -> bool:
    """Section 9.7.3.1: zero counts as a normal number."""
    value = decode(form, bits)
    ordinary = not value.is_nan and not value.is_infinite
    subnormal = ordinary and not value.is_zero and value.size < form.smallest_normal
    return {
        "finite": ordinary,
        "infinite": value.is_infinite,
        "number": not value.is_nan,
        "notanumber": value.is_nan,
        "normal": ordinary and not subnormal,
        "subnormal": subnormal,
    }[name]


for form in (F32, F64):
    for name in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        rule = lambda a, f=form, n=name: int(is_of_class(f, n, a))  # noqa: E731
        FORMS[f"testp.{name}.f{form.width}"] = Form((f"b{form.width}",), "pred", rule, floats(form))


@dataclass(frozen=True)
class Approximation:
    """An approximate instruction: the true function on Python floats, exact special results, and the allowed error.

    ``allowed`` maps (input, true result, correctly rounded result) to the largest absolute error, or to None where the
    manual promises nothing. Python's double has an error 2**29 times smaller than any bound here.
    """

    function: Callable[..., float]
    specials: Callable[..., int | None]
    allowed: Callable[..., Fraction | None]
    vectors: list[Vector]
    ftz: bool = False


def ulps(count: int) -> Callable[..., Fraction]:
    return lambda inputs, true, rounded: count * ulp(F32, rounded)


def relative(bound: float) -> Callable[..., Fraction]:
    return lambda inputs, true, rounded: Fraction(bound) * abs(true)


def periodic(inputs: tuple[Fraction, ...], true: Fraction, rounded: Fraction) -> Fraction | None:
    """Sections 9.7.3.18 and 19: 2**-20.5 within two turns of pi, 2**-14.7 within a hundred, nothing beyond."""
    size = abs(inputs[0])
    return Fraction(2**-20.5) if size <= 2 * math.pi else Fraction(2**-14.7) if size <= 100 * math.pi else None


def logarithmic(inputs: tuple[Fraction, ...], true: Fraction, rounded: Fraction) -> Fraction:
    """Section 9.7.3.20: absolute 2**-22 for an input in (0.5, 2), relative 2**-22 elsewhere."""
    return two_to(-22) if Fraction(1, 2) < inputs[0] < 2 else two_to(-22) * abs(true)


NAN_BITS, ONE, INFINITE, MINUS = 0x7FFFFFFF, 0x3F800000, F32.infinity, F32.sign_bit


def table(**results: int) -> Callable[[Value], int | None]:
    """The manual's corner-case tables; keys: minus_infinity, negative, minus_zero, zero, infinity."""

    def special(value: Value) -> int | None:
        if value.is_nan:
            return NAN_BITS
        if value.is_infinite:
            return results["minus_infinity" if value.negative else "infinity"]
        if value.is_zero:
            return results["minus_zero" if value.negative else "zero"]
        return results.get("negative") if value.negative else None

    return special


def quotient_special(a: Value, b: Value) -> int | None:
    value = divide(a, b)
    return None if value.is_finite and value.size and not b.is_infinite else encode(F32, value)


def approximate_quotient_special(a: Value, b: Value) -> int | None:
    """Section 9.7.3.8: for 2**126 < |b| < 2**128 an infinite a gives NaN and any other a signed zero."""
    if b.is_finite and b.size > two_to(126) and not a.is_nan:
        return NAN_BITS if a.is_infinite else (MINUS if a.negative != b.negative else 0)
    return quotient_special(a, b)


def quotient_allowed(inputs: tuple[Fraction, ...], true: Fraction, rounded: Fraction) -> Fraction | None:
    """Section 9.7.3.8: 2 ulp for |b| in [2**-126, 2**126]; nothing is promised below."""
    return 2 * ulp(F32, rounded) if abs(inputs[1]) >= two_to(-126) else None


def near(low: float, high: float, count: int = 300) -> list[Vector]:
    """Inputs spread evenly over an interval, after the usual floats."""
    spread = [low + (high - low) * (i + 0.377) / count for i in range(count)]
    return floats(F32) + [(encode(F32, finite(Fraction(x))),) for x in spread]


APPROXIMATE: dict[str, Approximation] = {}
for ftz in ("", ".ftz"):
    flushes = bool(ftz)
    pairs = floats(F32, 2, seed="quotients")
    for opcode, entry in {
        "ex2.approx": (
            lambda x: math.exp2(min(x, 1000)),
            table(minus_infinity=0, minus_zero=ONE, zero=ONE, infinity=INFINITE),
            ulps(2),
            near(-152, 130),
        ),
        "lg2.approx": (
            math.log2,
            table(
                minus_infinity=NAN_BITS,
                negative=NAN_BITS,
                minus_zero=INFINITE | MINUS,
                zero=INFINITE | MINUS,
                infinity=INFINITE,
            ),
            logarithmic,
            near(0.4, 2.5),
        ),
        "sin.approx": (
            math.sin,
            table(minus_infinity=NAN_BITS, minus_zero=MINUS, zero=0, infinity=NAN_BITS),
            periodic,
            near(-320, 320),
        ),
        "cos.approx": (
            math.cos,
            table(minus_infinity=NAN_BITS, minus_zero=ONE, zero=ONE, infinity=NAN_BITS),
            periodic,
            near(-8, 8),
        ),
        # Section 9.7.3.16.
        "rsqrt.approx": (
            lambda x: 1 / math.sqrt(x),
            table(
                minus_infinity=NAN_BITS,
                negative=NAN_BITS,
                minus_zero=INFINITE | MINUS,
                zero=INFINITE,
                infinity=0,
            ),
            relative(2**-22.9),
            near(0.5, 4.5),
        ),
        # Section 9.7.3.15.
        "sqrt.approx": (
            math.sqrt,
            table(minus_infinity=NAN_BITS, negative=NAN_BITS, minus_zero=MINUS, zero=0, infinity=INFINITE),
            relative(2**-23),
            near(0.5, 4.5),
        ),
        # Section 9.7.3.13.
        "rcp.approx": (
            lambda x: 1 / x,
            table(minus_infinity=MINUS, minus_zero=INFINITE | MINUS, zero=INFINITE, infinity=0),
            ulps(1),
            near(0.5, 4.5),
        ),
        # Section 9.7.3.8.
        "div.full": (lambda a, b: a / b, quotient_special, ulps(2), pairs),
        "div.approx": (lambda a, b: a / b, approximate_quotient_special, quotient_allowed, pairs),
    }.items():
        APPROXIMATE[f"{opcode}{ftz}.f32"] = Approximation(*entry, ftz=flushes)
# Section 9.7.3.22: relative 2**-11; subnormal inputs pass through.
APPROXIMATE["tanh.approx.f32"] = Approximation(
    math.tanh,
    table(minus_infinity=ONE | MINUS, minus_zero=MINUS, zero=0, infinity=ONE),
    relative(2**-11),
    near(-6, 6),
)
FORMS |= APPROXIMATE


@pytest.mark.parametrize("opcode", [name for name in FORMS if name not in APPROXIMATE])
def test_result_is_the_exact_result_rounded_once(opcode: str) -> None:
    """Specials, ties, subnormals and random operands give the correctly rounded result bit for bit."""
    line = opcode.removesuffix(" (three operands)")
    check(line, FORMS[opcode])


def judge(case: Approximation, inputs: Vector, got: int) -> str:
    """Why a result is wrong, or nothing."""
    operands = [decode(F32, flush(F32, bits) if case.ftz else bits) for bits in inputs]
    special = case.specials(*operands)
    result = decode(F32, got)
    if special is not None:
        right = result.is_nan if special == NAN_BITS else got == special
        return "" if right else f"not {special:#x}"
    numbers = tuple(value.number for value in operands)
    true = Fraction(case.function(*(float(number) for number in numbers)))
    rounded = decode(F32, encode(F32, finite(true)))
    limit = decode(F32, F32.largest).number
    capped = rounded.size if rounded.is_finite else limit
    allowed = case.allowed(numbers, true, capped)
    if allowed is None:
        return ""
    if result.is_nan:
        return "NaN"
    if case.ftz and result.is_zero and abs(true) < F32.smallest_normal + allowed:
        return ""
    if case.ftz and 0 < result.size < F32.smallest_normal:
        return "not flushed"
    if result.is_infinite:
        right = result.negative == (true < 0) and abs(true) > limit - allowed
    else:
        targets = [true] if rounded.is_infinite else [true, rounded.number]
        right = min(abs(result.number - target) for target in targets) <= allowed
    return "" if right else f"true result {float(true)!r}, {got:#x} is further than {float(allowed)!r} from it"


@pytest.mark.parametrize("opcode", APPROXIMATE)
def test_approximation_is_within_the_documented_error(opcode: str) -> None:
    """The special cases are those of the manual's table and every other result is within its stated error."""
    case = APPROXIMATE[opcode]
    names = "ab"[: len(case.vectors[0])]
    columns = zip(*case.vectors, strict=True)
    inputs = {name: ("b32", column) for name, column in zip(names, columns, strict=True)}
    line = f"{opcode} %d, {', '.join('%' + name for name in names)};"
    results = execute(line, inputs, {"d": "b32"})
    pairs = [(vector, got, judge(case, vector, got)) for vector, (got,) in zip(case.vectors, results, strict=True)]
    wrong = [f"{', '.join(map(hex, vector))} -> {got:#x}: {reason}" for vector, got, reason in pairs if reason]
    assert not wrong, f"{opcode}: {len(wrong)} of {len(results)} wrong: " + "; ".join(wrong[:5])


IMMEDIATES = {
    "add.f32 %d, %a, 0f3F000000;": lambda a: arithmetic(F32, add)(a, 0x3F000000),
    "mul.f32 %d, %a, 0fBF800000;": lambda a: arithmetic(F32, OPERATIONS["mul"][1])(a, 0xBF800000),
    "fma.rn.f32 %d, %a, 0f40000000, 0fFF800000;": lambda a: arithmetic(F32, fuse)(a, 0x40000000, 0xFF800000),
    "mov.b32 %d, 0f7FC00001;": lambda a: 0x7FC00001,
    "add.f32 %d, %a, 0d3FE0000000000000;": lambda a: arithmetic(F32, add)(a, 0x3F000000),
    "add.f32 %d, %a, 0.5;": lambda a: arithmetic(F32, add)(a, 0x3F000000),
}


@pytest.mark.parametrize("line", IMMEDIATES)
def test_float_literal_has_the_written_bits(line: str) -> None:
    """0f and 0d literals are bit patterns (section 4.5.2); a decimal literal is a double, converted to the type."""
    check(line, Form(("b32",), "b32", IMMEDIATES[line], floats(F32), same_or_nan(F32), text=line))


def test_expectation_without_fusion_fails_for_fma() -> None:
    """The vectors tell one rounding from two: a product rounded before the sum is reported as wrong."""

    def twice(a: int, b: int, c: int) -> int:
        product = arithmetic(F32, OPERATIONS["mul"][1])(a, b)
        return arithmetic(F32, add)(product, c)

    check("fma.rn.f32", FORMS["fma.rn.f32"])
    with pytest.raises(AssertionError, match="wrong"):
        check("fma.rn.f32", FORMS["fma.rn.f32"], twice)
