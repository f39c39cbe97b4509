"""Calls of the two functions that Triton takes from outside: ``__assertfail`` and ``vprintf`` (PTX ISA, 9.7.12.5).

The parameters of a call are registers of its scope (``ptx.py``), which ``st.param`` writes and ``ld.param`` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np

from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.findings import Kind
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.machine import LOCAL_WINDOW, Machine
from mla_conformance.suites.emulator.ptx import Instruction, split_operands
from mla_conformance.suites.emulator.types import Array, Mask

_LONGEST = 4096
_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(hh|h|ll|l|z)?([diouxXcfeEgGaAps%])")


@instruction("call")
def call(builder: Builder, ins: Instruction) -> Step:
    """``call{.uni} {(result),} function, (parameters)`` of a known function."""
    operands = list(ins.operands)
    results = split_operands(operands.pop(0)[1:-1]) if operands[0].startswith("(") else ()
    functions: dict[str, Callable[[Builder, Instruction, list[str], list[str]], Step]] = {
        "__assertfail": _assert_fail,
        "vprintf": _print,
    }
    function = functions.get(operands[0])
    if function is None or len(operands) != 2:
        raise builder.unsupported()
    return function(builder, ins, list(results), list(split_operands(operands[1][1:-1])))


def _assert_fail(builder: Builder, ins: Instruction, results: list[str], parameters: list[str]) -> Step:
    if len(parameters) != 5:
        raise builder.unsupported()
    message, file, function = (builder.lanes(parameters[i], "b64") for i in (0, 1, 3))
    line, machine = builder.lanes(parameters[2], "u32"), builder.machine

    def step(mask: Mask) -> None:
        lanes = machine.active(mask)
        lane = int(lanes[0])
        words = [_text(machine, int(pointer[lane])) for pointer in (message, file, function)]
        place = f"{words[1].rsplit('/', 1)[-1]}:{int(line[lane])}, {words[2]}"
        detail = f"assertion failed: {words[0]!r} ({place}), first in {machine.thread(lane)}"
        machine.findings.add(Kind.TRAP, ins, len(lanes), detail)

    return step


def _text(machine: Machine, address: int) -> str:
    """A string of bytes ending in zero, in global memory."""
    region = machine.memory.region_at(address)
    if region is None:
        return "?"
    raw = region.data[address - region.base :][:_LONGEST].tobytes()
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


def _print(builder: Builder, ins: Instruction, results: list[str], parameters: list[str]) -> Step:
    if len(parameters) != 2 or len(results) != 1:
        raise builder.unsupported()
    form, values = (builder.lanes(text, "b64") for text in parameters)
    count, machine = builder.destination(results[0], "b32"), builder.machine

    def step(mask: Mask) -> None:
        for lane in machine.active(mask):
            text = _text(machine, int(form[lane]))
            formatted = partial(_formatted, machine, _arguments(machine, int(lane), int(values[lane])))
            print(_CONVERSION.sub(formatted, text), end="")
            count[lane] = len(_CONVERSION.findall(text))

    return step


def _arguments(machine: Machine, lane: int, address: int) -> Callable[[str], Array]:
    """A reader of a buffer in local memory, in which each value is aligned to its own size."""
    per_lane = len(machine.local) // machine.lanes
    data = machine.local[lane * per_lane : (lane + 1) * per_lane]
    place = address - LOCAL_WINDOW if address else 0

    def take(dtype: str) -> Array:
        nonlocal place
        width = np.dtype(dtype).itemsize
        place = -(-place // width) * width
        value = data[place : place + width].view(dtype)
        place += width
        return np.asarray(value[0])

    return take


def _formatted(machine: Machine, take: Callable[[str], Array], found: re.Match[str]) -> str:
    kind, length = found[2], found[1] or ""
    if kind == "%":
        return "%"
    if kind == "s":
        return _text(machine, int(take("u8")))
    if kind == "p":
        return hex(int(take("u8")))
    conversion = found[0].replace(length, "") if length else found[0]
    if kind in "feEgGaA":
        return (conversion if kind not in "aA" else "%s") % float(take("f8"))
    wide = "8" if length in ("ll", "l", "z") else "4"
    value = int(take(("i" if kind in "dic" else "u") + wide))
    return chr(value & 255) if kind == "c" else conversion.replace("u", "d") % value
