"""Loads and stores (PTX ISA, 9.7.9.8 ld, 9.7.9.11 st)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mla_conformance.suites.emulator import memory
from mla_conformance.suites.emulator.accesses import Pattern
from mla_conformance.suites.emulator.builder import Address, Builder, Step
from mla_conformance.suites.emulator.errors import PTXError
from mla_conformance.suites.emulator.findings import Kind
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.machine import LOCAL_WINDOW, SHARED_WINDOW, Machine
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, Mask, dtype_of

SPACES = ("global", "shared", "shared:cta", "local", "const", "param")
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
# Order and caching do not change what a single, data-race-free access sees.
_MODIFIERS = re.compile(
    r"(weak|relaxed|acquire|release|volatile|nc|cta|gpu|sys|cluster|ca|cg|cs|lu|cv|wb|wt|unified|L1:.*|L2:.*)$"
)


def space_of(builder: Builder, ins: Instruction) -> str:
    """The state space of an access, "" for a generic one; other suffixes are checked."""
    space = ""
    for part in ins.parts[1:-1]:
        if part in SPACES:
            space = part.split(":")[0]
        elif part not in _VECTORS and not _MODIFIERS.match(part):
            raise builder.unsupported(f".{part}")
    return space


def _elements(builder: Builder, ins: Instruction, text: str) -> tuple[str, ...]:
    """The registers of the operand ``text``, as many as the opcode's vector has."""
    elements = builder.vector(text)
    count = next((_VECTORS[part] for part in ins.parts if part in _VECTORS), 1)
    if len(elements) != count:
        raise PTXError(f"PTX line {ins.line}: {ins.opcode} takes {count} registers, not {text}: `{ins.text}`")
    return elements


class _Access:
    """Where one load or store goes: ``count`` elements of ``dtype`` a lane, in any state space."""

    def __init__(self, builder: Builder, ins: Instruction, address: Address, type_: str, count: int) -> None:
        self.machine, self.ins, self.address = builder.machine, ins, address
        self.dtype, self.count = dtype_of(type_).str[1:], count
        self.size = dtype_of(type_).itemsize * count

    def shared(self, mask: Mask, window: int) -> Pattern:
        """The pattern in shared memory, which lies at ``window`` of the address."""
        base = self.address.base - np.uint64(window) if window else self.address.base
        return self.machine.shared.pattern(self.ins, base, self.address.offset, self.size, mask)

    def local(self, mask: Mask, window: int) -> tuple[Array, Array]:
        """The lanes, and the bytes [n, size] of local memory that each means; each lane has memory of its own."""
        machine = self.machine
        lanes = machine.active(mask)
        per_lane = len(machine.local) // machine.lanes
        starts = self.address.base[lanes].astype("i8") + self.address.offset - window
        if self.address.base.dtype.itemsize == 4:
            # Short pointers: an index may be below zero before the offset is added, and the sum wraps.
            starts &= 0xFFFFFFFF
        bad = (starts < 0) | (starts + self.size > per_lane) | (starts % self.size != 0)
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            place = f"byte {int(starts[first])} of {per_lane}, {self.size} byte(s)"
            detail = f"{machine.thread(int(lanes[first]))}, {place}"
            machine.findings.add(Kind.LOCAL_BOUNDS, self.ins, int(bad.sum()), detail)
        return lanes[~bad], (lanes * per_lane + starts)[~bad][:, None] + np.arange(self.size)

    def parts(self, mask: Mask) -> Iterator[tuple[memory.Region, Array, Array]]:
        """Regions of global memory, with lanes and byte offsets in them."""
        machine = self.machine
        lanes = machine.active(mask)
        addresses = self.address.of(slice(None) if mask is True else lanes)
        for region, chosen, offsets in machine.memory.parts(self.ins, addresses, self.size, lanes):
            yield region, lanes[chosen], offsets

    def dispatch(self, space: str, steps: dict[str, Callable[[Mask, int], None]]) -> Step:
        """The step for ``space``; without one, lanes go where the window says that their address lies."""
        if space:
            chosen = steps[space if space != "const" else "global"]
            return lambda mask: chosen(mask, 0)

        def generic(mask: Mask) -> None:
            base = self.address.base.astype("u8")
            active = np.ones(self.machine.lanes, bool) if mask is True else mask
            shared = active & (base >= SHARED_WINDOW) & (base < LOCAL_WINDOW)
            local = active & (base >= LOCAL_WINDOW) & (base < LOCAL_WINDOW + SHARED_WINDOW)
            rest = active & ~shared & ~local
            for name, lanes, window in (("shared", shared, SHARED_WINDOW), ("local", local, LOCAL_WINDOW)):
                if lanes.any():
                    steps[name](lanes, window)
            if rest.any():
                steps["global"](True if rest.all() else rest, 0)

        return generic


@instruction("ld", "ldu")
def load(builder: Builder, ins: Instruction) -> Step:
    """``ld{.space}{.vec}.type``; from ``.param`` it copies a kernel argument or a call's result."""
    type_, space = ins.parts[-1], space_of(builder, ins)
    if space == "param":
        local = _call_parameter(builder, ins.operands[1])
        return _move(builder, ins.operands[0], local, type_) if local else _parameter(builder, ins, type_)
    targets = [builder.destination(text, type_) for text in _elements(builder, ins, ins.operands[0])]
    access = _Access(builder, ins, builder.address(ins.operands[1]), type_, len(targets))
    machine, dtype, count = builder.machine, access.dtype, access.count

    def place(lanes: Array, rows: Array) -> None:
        chosen: Any = slice(None) if len(lanes) == machine.lanes else lanes
        for index, target in enumerate(targets):
            target[chosen] = rows[:, index]

    def from_shared(mask: Mask, window: int) -> None:
        pattern = access.shared(mask, window)
        place(pattern.lanes, machine.shared.read(pattern, dtype, count))

    def from_local(mask: Mask, window: int) -> None:
        lanes, index = access.local(mask, window)
        place(lanes, machine.local[index].view(dtype).reshape(-1, count))

    def from_global(mask: Mask, window: int) -> None:
        for region, lanes, offsets in access.parts(mask):
            place(lanes, memory.gather(region, offsets, dtype, count))

    return access.dispatch(space, {"shared": from_shared, "local": from_local, "global": from_global})


def _parameter(builder: Builder, ins: Instruction, type_: str) -> Step:
    found = re.match(r"\[\s*([\w$]+)\s*(?:\+\s*(\d+))?\s*\]$", ins.operands[1])
    if found is None or found[1] not in builder.parameters:
        raise builder.unsupported("parameter address")
    raw = builder.parameters[found[1]].view("u1")
    start, size = int(found[2] or 0), dtype_of(type_).itemsize
    targets = [builder.destination(text, type_) for text in _elements(builder, ins, ins.operands[0])]
    if start + size * len(targets) > len(raw):
        raise PTXError(f"PTX line {ins.line}: {found[1]} has {len(raw)} bytes: `{ins.text}`")
    values = [raw[start + i * size : start + (i + 1) * size].view(dtype_of(type_)) for i in range(len(targets))]

    def step(mask: Mask) -> None:
        for target, value in zip(targets, values, strict=True):
            np.copyto(target, value[0], where=mask)

    return step


def _call_parameter(builder: Builder, text: str) -> str:
    """The register that holds a call's parameter, "" if the address names none."""
    found = re.match(r"\[\s*([\w$.]+)\s*(?:\+\s*0)?\s*\]$", text)
    name = found[1] if found else ""
    return name if name not in builder.parameters and builder.entry.register_type(name) else ""


def _move(builder: Builder, target: str, source: str, type_: str) -> Step:
    """A call's parameter is moved like a register."""
    value, place = builder.source(source, type_), builder.destination(target, type_)
    return lambda mask: np.copyto(place, value, where=mask, casting="unsafe")


@instruction("st")
def store(builder: Builder, ins: Instruction) -> Step:
    """``st{.space}{.vec}.type``; to ``.param`` it sets a parameter of a call."""
    type_, space = ins.parts[-1], space_of(builder, ins)
    if space == "param":
        local = _call_parameter(builder, ins.operands[0])
        if not local:
            raise builder.unsupported("parameter address")
        return _move(builder, local, ins.operands[1], type_)
    sources = [builder.lanes(text, type_) for text in _elements(builder, ins, ins.operands[1])]
    access = _Access(builder, ins, builder.address(ins.operands[0]), type_, len(sources))
    machine = builder.machine

    def values(lanes: Array) -> Array:
        chosen: Any = slice(None) if len(lanes) == machine.lanes else lanes
        rows = np.empty((len(lanes), len(sources)), sources[0].dtype)
        for index, source in enumerate(sources):
            rows[:, index] = source[chosen]
        return rows

    def to_shared(mask: Mask, window: int) -> None:
        pattern = access.shared(mask, window)
        machine.shared.write(pattern, values(pattern.lanes))

    def to_local(mask: Mask, window: int) -> None:
        lanes, index = access.local(mask, window)
        machine.local[index] = values(lanes).view("u1").reshape(-1, access.size)

    def to_global(mask: Mask, window: int) -> None:
        for region, lanes, offsets in access.parts(mask):
            _put(machine, ins, region, offsets, values(lanes), lanes)

    return access.dispatch(space, {"shared": to_shared, "local": to_local, "global": to_global})


def _put(machine: Machine, ins: Instruction, region: memory.Region, offsets: Array, rows: Array, lanes: Array) -> None:
    """Write to global memory; two CTAs that write one address, and lanes that disagree, are reported."""
    size = rows.dtype.itemsize * rows.shape[1]
    memory.scatter(region, offsets, rows)
    if not machine.shared.check:
        return
    stored = memory.gather(region, offsets, rows.dtype.str[1:], rows.shape[1])
    bits = f"u{rows.dtype.itemsize}"
    differ = (np.ascontiguousarray(stored).view(bits) != np.ascontiguousarray(rows).view(bits)).any(1)
    foreign = region.note_writes(offsets, size, machine.cta_number[lanes])
    for bad, kind in ((differ & ~foreign, Kind.UNEQUAL_LANES), (foreign, Kind.TWO_CTAS)):
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            detail = f"{machine.thread(int(lanes[first]))}, byte {int(offsets[first])} of {region.name}"
            machine.findings.add(kind, ins, int(bad.sum()), detail)
