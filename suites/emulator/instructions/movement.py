"""Data movement between registers: mov, prmt, cvta, and what only hints (PTX ISA, 9.7.9)."""

from __future__ import annotations

import re

import numpy as np

from mla_conformance.suites.emulator import integers
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.instructions.registry import allow, elementwise, instruction
from mla_conformance.suites.emulator.machine import LOCAL_WINDOW, SHARED_WINDOW
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Mask, dtype_of


@instruction("mov")
def move(builder: Builder, ins: Instruction) -> Step:
    """A register, a constant, a special register, an address; or packing and unpacking of a vector."""
    allow(builder)
    type_ = ins.parts[-1]
    targets, sources = builder.vector(ins.operands[0]), builder.vector(ins.operands[1])
    if type_ == "b128" or (len(targets) > 1 and len(sources) > 1):
        raise builder.unsupported()
    if len(sources) > 1:
        return _pack(builder, type_, targets[0], sources)
    if len(targets) > 1:
        return _unpack(builder, type_, targets, sources[0])
    source, target = builder.source(sources[0], type_), builder.destination(targets[0], type_)
    return lambda mask: np.copyto(target, source, where=mask, casting="unsafe")


def _part_type(builder: Builder, type_: str, count: int) -> str:
    bits = int(re.sub(r"\D", "", type_)) // count
    if bits not in (8, 16, 32):
        raise builder.unsupported()
    return f"b{bits}"


def _pack(builder: Builder, type_: str, target: str, sources: tuple[str, ...]) -> Step:
    part = _part_type(builder, type_, len(sources))
    whole = builder.destination(target, type_.replace("f", "b"))
    pieces = [whole.view(dtype_of(part))[i :: len(sources)] for i in range(len(sources))]
    values = [builder.source(source, part) for source in sources]
    # The target may be one of the sources: read all before writing any.
    overlapping = target in sources

    def step(mask: Mask) -> None:
        for piece, value in zip(pieces, [v.copy() for v in values] if overlapping else values, strict=True):
            np.copyto(piece, value, where=mask)

    return step


def _unpack(builder: Builder, type_: str, targets: tuple[str, ...], source: str) -> Step:
    part = _part_type(builder, type_, len(targets))
    whole = builder.lanes(source, type_.replace("f", "b"))
    pieces = [whole.view(dtype_of(part))[i :: len(targets)] for i in range(len(targets))]
    pairs = [(builder.destination(t, part), piece) for t, piece in zip(targets, pieces, strict=True) if t != "_"]
    overlapping = source in targets

    def step(mask: Mask) -> None:
        values = [piece.copy() if overlapping else piece for _, piece in pairs]
        for (target, _), value in zip(pairs, values, strict=True):
            np.copyto(target, value, where=mask, casting="unsafe")

    return step


@instruction("prmt")
def permute(builder: Builder, ins: Instruction) -> Step:
    """``prmt.b32{.mode}``: bytes of two registers."""
    mode = ins.parts[2] if len(ins.parts) > 2 else None
    if ins.parts[1] != "b32" or mode not in (None, "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        raise builder.unsupported()
    sources = [builder.source(text, "u32") for text in ins.operands[1:4]]
    selector = sources[2]
    if mode is None and selector.ndim == 0 and not int(selector) & 0x8888:
        return _permute_constant(builder, ins, int(selector))
    return elementwise(builder, "u32", lambda a, b, c: integers.permute_bytes(a, b, c, mode), *sources)


def _permute_constant(builder: Builder, ins: Instruction, selector: int) -> Step:
    """A constant selector without sign replication: four strided copies."""
    inputs = [builder.lanes(text, "u32").view("u1") for text in ins.operands[1:3]]
    target = builder.destination(ins.operands[0], "u32")
    choices = [(selector >> 4 * i) & 7 for i in range(4)]
    made = np.zeros_like(target)
    pieces = [(made.view("u1")[i::4], inputs[c // 4][c % 4 :: 4]) for i, c in enumerate(choices)]

    def step(mask: Mask) -> None:
        for piece, byte in pieces:
            piece[...] = byte
        np.copyto(target, made, where=mask)

    return step


@instruction("cvta")
def convert_address(builder: Builder, ins: Instruction) -> Step:
    """Between a state space and generic addresses: each space has its window; global's is the identity."""
    window = {"shared": SHARED_WINDOW, "shared:cta": SHARED_WINDOW, "local": LOCAL_WINDOW}
    window["param"] = builder.machine.parameter_base
    space = next((part for part in ins.parts[1:-1] if part != "to"), "")
    if space not in (*window, "global", "const"):
        raise builder.unsupported()
    shift = np.uint64(window.get(space, 0))
    source = builder.source(ins.operands[1], ins.parts[-1])
    # A 32-bit shared address stays what it is: it names no generic address.
    if source.dtype.itemsize < 8 or not shift:
        return elementwise(builder, ins.parts[-1], lambda a: a, source)
    to = "to" in ins.parts
    return elementwise(builder, ins.parts[-1], lambda a: a - shift if to else a + shift, source)


@instruction("isspacep")
def is_space(builder: Builder, ins: Instruction) -> Step:
    """Whether a generic address lies in a state space."""
    window = {"shared": SHARED_WINDOW, "shared:cta": SHARED_WINDOW, "local": LOCAL_WINDOW, "global": 2 * LOCAL_WINDOW}
    start = window.get(ins.parts[-1])
    if start is None:
        raise builder.unsupported()
    end = 2**64 - 1 if ins.parts[-1] == "global" else start + SHARED_WINDOW
    source = builder.source(ins.operands[1], "u64")
    return elementwise(builder, "pred", lambda a: (a >= np.uint64(start)) & (a < np.uint64(end)), source)


@instruction(
    "prefetch", "prefetchu", "applypriority", "discard", "nanosleep", "griddepcontrol", "setmaxnreg", "pmevent"
)
def hint(builder: Builder, ins: Instruction) -> Step:
    """Nothing that a value depends on."""
    return lambda mask: None


@instruction("createpolicy")
def create_policy(builder: Builder, ins: Instruction) -> Step:
    """A cache policy: a number that only hints use."""
    return elementwise(builder, "b64", lambda: np.zeros((), "u8"))
