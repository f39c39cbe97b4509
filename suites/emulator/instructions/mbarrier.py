"""mbarrier operations (PTX ISA, 9.7.13.15); their state is in ``mbarriers.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mla_conformance.suites.emulator.accesses import Pattern
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.machine import SHARED_WINDOW
from mla_conformance.suites.emulator.mbarriers import SIZE
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, Mask

_KNOWN = {"shared", "shared:cta", "release", "acquire", "relaxed", "cta", "cluster", "parity", "expect_tx"}
Places = Callable[[Mask], Pattern]


@instruction("mbarrier")
def mbarrier(builder: Builder, ins: Instruction) -> Step:
    """init, inval, arrive{.expect_tx}, expect_tx, complete_tx, test_wait and try_wait, with parity or state."""
    operation = ins.parts[1]
    make = {
        "init": _init,
        "inval": _inval,
        "arrive": _arrive,
        "expect_tx": _expect,
        "complete_tx": _complete,
        "test_wait": _wait,
        "try_wait": _wait,
    }.get(operation)
    unknown = [part for part in ins.parts[2:-1] if part not in _KNOWN]
    if make is None or unknown:
        raise builder.unsupported(*(f".{part}" for part in unknown[:1]))
    return make(builder, ins)


def _places(builder: Builder, ins: Instruction, text: str) -> Places:
    """Where the objects of a mask's lanes are."""
    address, shared = builder.address(text), builder.machine.shared
    generic = not any(part.startswith("shared") for part in ins.parts)
    window = np.uint64(SHARED_WINDOW)

    def places(mask: Mask) -> Pattern:
        base = address.base - window if generic else address.base
        return shared.pattern(ins, base, address.offset, SIZE, mask)

    return places


def _groups(builder: Builder, pattern: Pattern) -> Iterator[tuple[int, Array]]:
    """The offsets in a CTA's shared memory that a pattern names, each with the lanes that name it."""
    offsets = pattern.rows * SIZE % builder.machine.shared.stride
    for offset in np.unique(offsets):
        yield int(offset), pattern.lanes[offsets == offset]


def _init(builder: Builder, ins: Instruction) -> Step:
    places, counts = _places(builder, ins, ins.operands[0]), builder.lanes(ins.operands[1], "s32")
    machine = builder.machine

    def step(mask: Mask) -> None:
        pattern = places(mask)
        machine.shared.write(pattern, np.zeros((len(pattern.lanes), SIZE), "u1"))
        for offset, lanes in _groups(builder, pattern):
            machine.mbarriers.initialise(ins, offset, lanes, counts[lanes])

    return step


def _inval(builder: Builder, ins: Instruction) -> Step:
    places, machine = _places(builder, ins, ins.operands[0]), builder.machine

    def step(mask: Mask) -> None:
        pattern = places(mask)
        for offset, lanes in _groups(builder, pattern):
            machine.mbarriers.invalidate(ins, offset, lanes)
        machine.shared.write(pattern, np.zeros((len(pattern.lanes), SIZE), "u1"))

    return step


def _arrive(builder: Builder, ins: Instruction) -> Step:
    expects = "expect_tx" in ins.parts
    if builder.machine.shared.check and not expects:
        raise builder.unsupported(
            "an arrival that orders threads, as in warp-specialised code: the race records follow barriers of a CTA "
            "only; check=False runs it without them"
        )
    places = _places(builder, ins, ins.operands[1])
    state = None if ins.operands[0] == "_" else builder.destination(ins.operands[0], "b64")
    last = builder.lanes(ins.operands[2], "s32") if len(ins.operands) > 2 else np.ones(builder.machine.lanes, "i4")
    if expects and len(ins.operands) != 3:
        raise builder.unsupported()
    machine = builder.machine

    def step(mask: Mask) -> None:
        pattern = places(mask)
        machine.shared.atomic(pattern)
        for offset, lanes in _groups(builder, pattern):
            if state is not None:
                state[lanes] = machine.mbarriers.at(offset).phase[machine.cta_of_lane[lanes]]
            ones, values = np.ones(len(lanes), "i8"), last[lanes].astype("i8")
            machine.mbarriers.arrive(ins, offset, lanes, *((ones, values) if expects else (values, 0 * ones)))

    return step


def _expect(builder: Builder, ins: Instruction) -> Step:
    return _transaction(builder, ins, 1)


def _complete(builder: Builder, ins: Instruction) -> Step:
    return _transaction(builder, ins, -1)


def _transaction(builder: Builder, ins: Instruction, sign: int) -> Step:
    places, counts = _places(builder, ins, ins.operands[0]), builder.lanes(ins.operands[1], "s32")
    machine = builder.machine

    def step(mask: Mask) -> None:
        pattern = places(mask)
        machine.shared.atomic(pattern)
        for offset, lanes in _groups(builder, pattern):
            change = sign * counts[lanes].astype("i8")
            machine.mbarriers.arrive(ins, offset, lanes, np.zeros(len(lanes), "i8"), change)

    return step


def _wait(builder: Builder, ins: Instruction) -> Step:
    answer = builder.destination(ins.operands[0], "pred")
    places = _places(builder, ins, ins.operands[1])
    parity = "parity" in ins.parts
    wanted = builder.lanes(ins.operands[2], "u32" if parity else "b64")
    polls = ins.parts[1] == "test_wait"
    if ins.guard is not None:
        raise builder.unsupported("a guarded wait")
    machine = builder.machine

    def step(mask: Mask) -> None:
        pattern = places(mask)
        machine.shared.atomic(pattern)
        values = (wanted & 1 if parity else wanted).astype("i8")
        for offset, lanes in _groups(builder, pattern):
            machine.mbarriers.test(ins, offset, lanes, values, answer, parity=parity, polls=polls)

    return step
