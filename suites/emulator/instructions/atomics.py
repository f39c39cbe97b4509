"""Atomic operations (PTX ISA, 9.7.13.5 atom, 9.7.13.7 red), lane after lane in their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mla_conformance.suites.emulator import floats, integers
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import PACKED, Array, Mask, dtype_of, is_float

_KNOWN = {
    "global",
    "shared",
    "shared:cta",
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "cta",
    "gpu",
    "sys",
    "noftz",
    "v2",
    "v4",
    "v8",
}
_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


@instruction("atom", "red")
def atomic(builder: Builder, ins: Instruction) -> Step:
    """``atom{.sem}{.scope}.space.op{.vec}.type d, [a], b{, c}``; ``red`` without a result.

    A vector is as many atomic operations, one an element.
    """
    operation = next((part for part in ins.parts if part in _OPERATIONS), "")
    if not operation or any(part not in _KNOWN and part != operation for part in ins.parts[1:-1]):
        raise builder.unsupported()
    type_ = ins.parts[-1]
    operands = ins.operands if ins.parts[0] == "atom" else ("_", *ins.operands)
    count = next((int(part[1]) for part in ins.parts if part in ("v2", "v4", "v8")), 1)
    if count > 1 and (operation not in ("add", "min", "max") or not is_float(type_)):
        raise builder.unsupported()
    names = ("_",) * count if operands[0] == "_" else builder.vector(operands[0])
    targets = [builder.destination(name, type_).reshape(builder.machine.lanes, -1) for name in names]
    address = builder.address(operands[1])
    one = 2 if type_ in PACKED else 1
    width = one * count
    vectors = [_vector(builder, text, type_) for text in operands[2:]]
    if len(targets) != count or any(len(vector) != count for vector in vectors):
        raise builder.unsupported()
    update = _update(builder, operation, type_)
    dtype, machine = dtype_of(type_), builder.machine
    size = dtype.itemsize * width

    def apply(rows: Array, index: Array, lanes: Array) -> None:
        # Read now: registers are views whose contents change between two launches of the step.
        sources = [np.concatenate(vector, 1) for vector in vectors]
        for row, lane in zip(index, lanes, strict=True):
            old = rows[row].copy()
            rows[row] = update(old, *(source[lane] for source in sources))
            for place, target in enumerate(targets):
                target[lane] = old[place * one : (place + 1) * one]

    def in_shared(mask: Mask) -> None:
        pattern = machine.shared.pattern(ins, address.base, address.offset, size, mask)
        machine.shared.atomic(pattern)
        apply(machine.shared.rows(dtype.str[1:], width), pattern.rows, pattern.lanes)

    def in_global(mask: Mask) -> None:
        lanes = machine.active(mask)
        for region, chosen, offsets in machine.memory.parts(ins, address.of(lanes), size, lanes):
            if region.base % size:
                raise builder.unsupported("a tensor whose storage is not aligned to its elements")
            apply(region.rows(dtype.str[1:], width), offsets // size, lanes[chosen])

    return in_shared if any(part.startswith("shared") for part in ins.parts) else in_global


def _vector(builder: Builder, text: str, type_: str) -> list[Array]:
    """Of a register or a vector of them each one, as [lanes, 1 or 2]."""
    return [builder.lanes(name, type_).reshape(builder.machine.lanes, -1) for name in builder.vector(text)]


def _update(builder: Builder, operation: str, type_: str) -> Callable[..., Any]:
    kind = PACKED.get(type_, type_)
    if operation == "exch":
        return lambda old, b: b
    if operation == "cas":
        return lambda old, b, c: np.where(old == b, c, old)
    if operation == "inc":
        return lambda old, b: np.where(old >= b, 0, old + 1)
    if operation == "dec":
        return lambda old, b: np.where((old == 0) | (old > b), b, old - 1)
    if is_float(kind):
        if operation == "add":
            return lambda old, b: floats.add(old, b, kind)
        if operation in ("min", "max"):
            of_two = floats.minimum if operation == "min" else floats.maximum
            return lambda old, b: of_two(old, b, kind)
        raise builder.unsupported()
    return integers.REDUCTIONS[operation]
