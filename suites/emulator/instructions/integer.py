"""Integer arithmetic (PTX ISA, 9.7.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mla_conformance.suites.emulator import integers
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.instructions.registry import (
    INTEGERS,
    allow,
    elementwise,
    instruction,
    sources_of,
    ufunc,
)
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, Mask, dtype_of

_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


@instruction("add", "sub", types=INTEGERS)
def add_or_subtract(builder: Builder, ins: Instruction) -> Step:
    """``add{.sat}{.cc}``, ``sub{.sat}{.cc}``."""
    allow(builder, "sat", "cc")
    type_ = ins.parts[-1]
    if "cc" in ins.parts:
        return _carrying(builder, ins, *sources_of(builder, type_))
    if "sat" in ins.parts:
        function = integers.add_sat if ins.parts[0] == "add" else integers.sub_sat
        return elementwise(builder, type_, function, *sources_of(builder, type_))
    return ufunc(builder, type_, np.add if ins.parts[0] == "add" else np.subtract, *sources_of(builder, type_))


@instruction("mul", types=INTEGERS)
def multiply(builder: Builder, ins: Instruction) -> Step:
    """``mul.lo``, ``mul.hi``, ``mul.wide``."""
    allow(builder, "lo", "hi", "wide")
    type_ = ins.parts[-1]
    sources = sources_of(builder, type_)
    if "wide" in ins.parts:
        wider = _WIDER.get(type_)
        if wider is None:
            raise builder.unsupported()
        return elementwise(builder, wider, integers.mul_wide, *sources)
    if "hi" in ins.parts:
        return elementwise(builder, type_, integers.mul_hi, *sources)
    return ufunc(builder, type_, np.multiply, *sources)


@instruction("mad", types=INTEGERS)
def multiply_add(builder: Builder, ins: Instruction) -> Step:
    """``mad.lo``, ``mad.hi{.sat}``, ``mad.wide``, ``.cc``."""
    allow(builder, "lo", "hi", "wide", "cc", "sat")
    type_ = ins.parts[-1]
    if "cc" in ins.parts:
        return _multiply_carrying(builder, ins)
    wide = _WIDER.get(type_, "") if "wide" in ins.parts else type_
    if not wide:
        raise builder.unsupported()
    products: dict[str, Callable[[Array, Array], Any]] = {
        "wide": integers.mul_wide,
        "hi": integers.mul_hi,
        "lo": np.multiply,
    }
    product = products[ins.parts[1]]
    a, b = (builder.source(text, type_) for text in ins.operands[1:3])
    c = builder.source(ins.operands[3], wide)
    total = integers.add_sat if "sat" in ins.parts else np.add
    return elementwise(builder, wide, lambda a, b, c: total(product(a, b), c), a, b, c)


@instruction("addc", "subc", types=INTEGERS)
def add_with_carry(builder: Builder, ins: Instruction) -> Step:
    """``addc{.cc}``, ``subc{.cc}``: extended precision (9.7.2)."""
    allow(builder, "cc")
    return _carrying(builder, ins, *sources_of(builder, ins.parts[-1]))


@instruction("madc", types=INTEGERS)
def multiply_add_with_carry(builder: Builder, ins: Instruction) -> Step:
    """``madc.lo|hi{.cc}``."""
    allow(builder, "lo", "hi", "cc")
    return _multiply_carrying(builder, ins)


def _multiply_carrying(builder: Builder, ins: Instruction) -> Step:
    a, b, c = sources_of(builder, ins.parts[-1])
    product = np.multiply if "lo" in ins.parts else integers.mul_hi
    return _carrying(builder, ins, a, c, b, product)


def _carrying(
    builder: Builder, ins: Instruction, a: Array, b: Array, factor: Array | None = None, product: Any = np.multiply
) -> Step:
    """``a + b`` or ``a - b`` (``a * factor + b``), with the carry flag in (mnemonic in c) and out (``.cc``).

    The flag is the carry of an addition, and of a subtraction the borrow.
    """
    type_ = ins.parts[-1]
    unsigned = np.dtype(f"u{dtype_of(type_).itemsize}")
    target = builder.destination(ins.operands[0], type_)
    subtract, takes = ins.parts[0].startswith("sub"), ins.parts[0].endswith("c")
    gives, flag = "cc" in ins.parts, builder.machine.carry

    def step(mask: Mask) -> None:
        left = (a if factor is None else product(a, factor)).view(unsigned)
        right, incoming = b.view(unsigned), flag.astype(unsigned) if takes else np.zeros((), unsigned)
        if subtract:
            total = left - right - incoming
            over = (left < right) | ((left == right) & (incoming == 1))
        else:
            total = left + right + incoming
            over = (total < left) | ((total == left) & (incoming == 1))
        np.copyto(target, total.view(dtype_of(type_)), where=mask)
        if gives:
            np.copyto(flag, over, where=mask)

    return step


@instruction("mul24", "mad24", types=INTEGERS)
def multiply24(builder: Builder, ins: Instruction) -> Step:
    """``mul24`` and ``mad24``, ``.lo`` or ``.hi``."""
    allow(builder, "lo", "hi")
    type_, high = ins.parts[-1], "hi" in ins.parts
    sources = sources_of(builder, type_)
    if ins.parts[0] == "mul24":
        return elementwise(builder, type_, lambda a, b: integers.mul24(a, b, high), *sources)
    return elementwise(builder, type_, lambda a, b, c: np.add(integers.mul24(a, b, high), c), *sources)


@instruction("div", "rem", types=INTEGERS)
def divide(builder: Builder, ins: Instruction) -> Step:
    """Truncating division and its remainder."""
    allow(builder)
    function = integers.divide if ins.parts[0] == "div" else integers.remainder
    return elementwise(builder, ins.parts[-1], function, *sources_of(builder, ins.parts[-1]))


@instruction("neg", "abs", types=INTEGERS)
def sign(builder: Builder, ins: Instruction) -> Step:
    """Wrapping negation and absolute value."""
    allow(builder)
    function = np.negative if ins.parts[0] == "neg" else np.absolute
    return ufunc(builder, ins.parts[-1], function, *sources_of(builder, ins.parts[-1]))


@instruction("min", "max", types=INTEGERS)
def extremum(builder: Builder, ins: Instruction) -> Step:
    """Two operands; ``.relu`` clamps at zero from below (signed)."""
    allow(builder, "relu")
    type_ = ins.parts[-1]
    function = np.minimum if ins.parts[0] == "min" else np.maximum
    if "relu" in ins.parts:
        zero = np.zeros((), dtype_of(type_))
        return elementwise(builder, type_, lambda a, b: np.maximum(function(a, b), zero), *sources_of(builder, type_))
    return ufunc(builder, type_, function, *sources_of(builder, type_))


@instruction("sad", types=INTEGERS)
def sum_of_differences(builder: Builder, ins: Instruction) -> Step:
    """``c + |a - b|``."""
    allow(builder)
    return elementwise(builder, ins.parts[-1], integers.sad, *sources_of(builder, ins.parts[-1]))


@instruction("popc", "clz")
def count_bits(builder: Builder, ins: Instruction) -> Step:
    """The result is u32 whatever the operand's width."""
    allow(builder)
    function = integers.population_count if ins.parts[0] == "popc" else integers.count_leading_zeros
    return elementwise(builder, "u32", function, builder.source(ins.operands[1], ins.parts[-1].replace("b", "u")))


@instruction("bfind")
def find_leading_bit(builder: Builder, ins: Instruction) -> Step:
    """``bfind{.shiftamt}``."""
    allow(builder, "shiftamt")
    amount = "shiftamt" in ins.parts
    source = builder.source(ins.operands[1], ins.parts[-1])
    return elementwise(builder, "u32", lambda a: integers.find_leading_bit(a, amount), source)


@instruction("brev")
def bit_reverse(builder: Builder, ins: Instruction) -> Step:
    """Bits in reverse order."""
    allow(builder)
    type_ = ins.parts[-1]
    return elementwise(builder, type_, integers.bit_reverse, *sources_of(builder, type_))


@instruction("bfe")
def bit_field_extract(builder: Builder, ins: Instruction) -> Step:
    """Position and length are taken modulo 256."""
    allow(builder)
    type_ = ins.parts[-1]
    position, length = (builder.source(text, "u32") for text in ins.operands[2:4])
    source = builder.source(ins.operands[1], type_)
    return elementwise(builder, type_, integers.bit_field_extract, source, position, length)


@instruction("bfi")
def bit_field_insert(builder: Builder, ins: Instruction) -> Step:
    """``a`` goes into ``b``."""
    allow(builder)
    type_ = ins.parts[-1]
    a, b = (builder.source(text, type_) for text in ins.operands[1:3])
    position, length = (builder.source(text, "u32") for text in ins.operands[3:5])
    return elementwise(builder, type_, integers.bit_field_insert, a, b, position, length)


@instruction("szext")
def extend(builder: Builder, ins: Instruction) -> Step:
    """``szext.clamp|wrap``: the low bits of ``a``, as many as ``b`` says, extended by zero or sign."""
    allow(builder, "clamp", "wrap")
    type_, wrap = ins.parts[-1], "wrap" in ins.parts
    source, length = builder.source(ins.operands[1], type_), builder.source(ins.operands[2], "u32")
    return elementwise(builder, type_, lambda a, b: integers.extend(a, b, wrap), source, length)


@instruction("bmsk")
def bit_field_mask(builder: Builder, ins: Instruction) -> Step:
    """``bmsk.clamp`` and ``bmsk.wrap``."""
    allow(builder, "clamp", "wrap")
    clamp = "clamp" in ins.parts
    sources = sources_of(builder, "u32")
    return elementwise(builder, "u32", lambda a, b: integers.bit_field_mask(a, b, clamp), *sources)


@instruction("dp4a", "dp2a")
def dot_product(builder: Builder, ins: Instruction) -> Step:
    """Dot product of bytes (with bytes or halves), added to ``c``; the result is s32 unless both are unsigned."""
    a_type, b_type = ins.parts[-2:]
    a_signed, b_signed = a_type == "s32", b_type == "s32"
    result = "s32" if a_signed or b_signed else "u32"
    a, b = (builder.source(text, "u32") for text in ins.operands[1:3])
    c = builder.source(ins.operands[3], result)
    if ins.parts[0] == "dp4a":
        return elementwise(builder, result, lambda a, b, c: integers.dp4a(a, b, c, a_signed, b_signed), a, b, c)
    high = "hi" in ins.parts
    return elementwise(builder, result, lambda a, b, c: integers.dp2a(a, b, c, a_signed, b_signed, high), a, b, c)
