"""Logic and shifts (PTX ISA, 9.7.8), comparison and selection (9.7.6, 9.7.7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mla_conformance.suites.emulator import floats, formats, integers
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.instructions.registry import allow, elementwise, instruction, sources_of, ufunc
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import PACKED, Array, Mask, is_float


@instruction("and", "or", "xor", "not")
def bitwise(builder: Builder, ins: Instruction) -> Step:
    """Of bits or predicates."""
    allow(builder)
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}[ins.parts[0]]
    return ufunc(builder, ins.parts[-1], function, *sources_of(builder, ins.parts[-1]))


@instruction("cnot")
def logical_not(builder: Builder, ins: Instruction) -> Step:
    """1 where the operand is 0."""
    allow(builder)
    return elementwise(builder, ins.parts[-1], lambda a: a == 0, *sources_of(builder, ins.parts[-1]))


@instruction("lop3")
def lookup_logic(builder: Builder, ins: Instruction) -> Step:
    """Any function of three bits, as a table of eight; ``lop3.or|and d|p`` also tells whether the result is not 0."""
    allow(builder, "or", "and")
    table = int(ins.operands[4], 0)
    a, b, c = (builder.source(text, "u32") for text in ins.operands[1:4])
    if len(ins.operands) == 5:
        return elementwise(builder, "u32", lambda a, b, c: integers.lop3(a, b, c, table), a, b, c)
    names = ins.operands[0].split("|")
    target = builder.destination(names[0], "u32")
    nonzero = builder.destination(names[1], "pred") if len(names) > 1 else np.zeros(builder.machine.lanes, bool)
    other = builder.source(ins.operands[5].lstrip("!"), "pred")
    negated = ins.operands[5].startswith("!")
    combine = np.logical_or if "or" in ins.parts else np.logical_and

    def step(mask: Mask) -> None:
        found = integers.lop3(a, b, c, table)
        combined = combine(found != 0, ~other if negated else other)
        np.copyto(target, found, where=mask)
        np.copyto(nonzero, combined, where=mask)

    return step


@instruction("shl", "shr")
def shift(builder: Builder, ins: Instruction) -> Step:
    """Amounts above the width give 0, or the sign for ``shr.s``."""
    allow(builder)
    type_ = ins.parts[-1].replace("b", "u")
    function = integers.shift_left if ins.parts[0] == "shl" else integers.shift_right
    source, amount = builder.source(ins.operands[1], type_), builder.source(ins.operands[2], "u32")
    if amount.ndim == 0 and amount < 8 * source.dtype.itemsize:
        # A constant amount below the width is what NumPy's own shifts do.
        plain = np.left_shift if ins.parts[0] == "shl" else np.right_shift
        return ufunc(builder, type_, plain, source, amount.astype(source.dtype))
    return elementwise(builder, type_, function, source, amount)


@instruction("shf")
def funnel_shift(builder: Builder, ins: Instruction) -> Step:
    """``shf.l`` and ``shf.r``, ``.wrap`` or ``.clamp``."""
    allow(builder, "l", "r", "wrap", "clamp")
    left, wrap = "l" in ins.parts, "wrap" in ins.parts
    sources = sources_of(builder, "u32")
    return elementwise(builder, "u32", lambda a, b, c: integers.funnel_shift(a, b, c, left, wrap), *sources)


_ORDERED: dict[str, Callable[[Array, Array], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def comparison(operator: str, type_: str) -> Callable[[Array, Array], Any] | None:
    """The comparison of two arrays that ``setp`` names ``operator``, or None if there is no such one."""
    if not is_float(type_):
        return _ORDERED.get(operator)
    if operator in ("num", "nan"):
        wanted = operator == "nan"
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == wanted
    if operator == "ne":
        return lambda a, b: (a < b) | (a > b)
    if operator in _ORDERED:
        return _ORDERED[operator] if operator in ("eq", "lt", "le", "gt", "ge") else None
    inner = _ORDERED.get(operator.removesuffix("u"))
    if inner is None or not operator.endswith("u"):
        return None
    return lambda a, b: inner(a, b) | np.isnan(a) | np.isnan(b)


def _operands(builder: Builder, ins: Instruction) -> list[Array]:
    return [builder.source(text, ins.parts[-1]) for text in ins.operands[1:3]]


def _comparable(ins: Instruction, compare: Callable[[Array, Array], Any]) -> Callable[[Array, Array], Any]:
    """Bring operands to what NumPy compares: bf16 widened, ``.ftz`` applied."""
    if PACKED.get(ins.parts[-1], ins.parts[-1]) == "bf16":
        return lambda a, b: compare(formats.f32_from_bf16(a), formats.f32_from_bf16(b))
    if "ftz" in ins.parts:
        return lambda a, b: compare(floats.flush(a), floats.flush(b))
    return compare


@instruction("setp")
def set_predicate(builder: Builder, ins: Instruction) -> Step:
    """``setp.op{.bool}{.ftz}.type p{|q}, a, b{, {!}c}``."""
    type_ = ins.parts[-1]
    compare = comparison(ins.parts[1], type_)
    boolean = next((part for part in ins.parts[2:-1] if part in ("and", "or", "xor")), None)
    unknown = [part for part in ins.parts[2:-1] if part not in ("and", "or", "xor", "ftz")]
    targets = ins.operands[0].split("|")
    if compare is None or unknown or (type_ in PACKED and len(targets) != 2):
        raise builder.unsupported()
    a, b = _operands(builder, ins)
    judge = _comparable(ins, compare)
    written = [builder.destination(target, "pred") for target in targets]
    combine: Callable[[Array, Array], Any] | None = None
    other = np.array(True)
    if boolean is not None:
        combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[boolean]
        other = builder.source(ins.operands[3].lstrip("!"), "pred")
    negated = boolean is not None and ins.operands[3].startswith("!")
    packed = type_ in PACKED

    def step(mask: Mask) -> None:
        found = judge(a, b)
        # A packed comparison gives its two results to p and q; others give q the opposite.
        results = [found[0::2], found[1::2]] if packed else [found, ~found]
        for target, result in zip(written, results, strict=False):
            if combine is not None:
                result = combine(result, ~other if negated else other)
            np.copyto(target, result, where=mask)

    if len(written) == 1 and combine is None and not packed:
        target = written[0]
        return lambda mask: np.copyto(target, judge(a, b), where=mask)
    return step


@instruction("set")
def set_value(builder: Builder, ins: Instruction) -> Step:
    """``set.op.dtype.stype``: all ones, or 1.0, where the comparison holds."""
    result, type_ = ins.parts[-2:]
    compare = comparison(ins.parts[1], type_)
    if compare is None or [part for part in ins.parts[2:-2] if part != "ftz"] or type_ in PACKED:
        raise builder.unsupported()
    judge = _comparable(ins, compare)
    ones = {"f32": 1.0, "u32": 0xFFFFFFFF, "s32": -1, "f16": 1.0, "bf16": 0x3F80, "u16": 0xFFFF, "s16": -1}.get(result)
    if ones is None:
        raise builder.unsupported()
    return elementwise(builder, result, lambda a, b: np.where(judge(a, b), ones, 0), *_operands(builder, ins))


@instruction("selp")
def select(builder: Builder, ins: Instruction) -> Step:
    """``a`` where the predicate holds, else ``b``."""
    allow(builder)
    a, b = _operands(builder, ins)
    predicate = builder.source(ins.operands[3], "pred")
    return elementwise(builder, ins.parts[-1], lambda a, b, p: np.where(p, a, b), a, b, predicate)


@instruction("slct")
def select_by_sign(builder: Builder, ins: Instruction) -> Step:
    """``a`` where ``c`` is at least 0, else ``b``; NaN selects ``b``."""
    type_, judged = ins.parts[-2:]
    a, b = (builder.source(text, type_) for text in ins.operands[1:3])
    c = builder.source(ins.operands[3], judged)
    flush = "ftz" in ins.parts
    return elementwise(builder, type_, lambda a, b, c: np.where((floats.flush(c) if flush else c) >= 0, a, b), a, b, c)
