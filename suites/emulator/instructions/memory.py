"""Loads and stores (PTX ISA, 9.7.9.8 ld, 9.7.9.11 st)."""

from __future__ import annotations

import re

import numpy as np

from mla_conformance.suites.emulator import memory
from mla_conformance.suites.emulator.builder import Address, Builder, Step
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


@instruction("ld", "ldu")
def load(builder: Builder, ins: Instruction) -> Step:
    """``ld{.space}{.vec}.type``; from ``.param`` it copies a kernel argument."""
    type_, space = ins.parts[-1], space_of(builder, ins)
    if space == "param":
        local = _call_parameter(builder, ins.operands[1])
        return _move(builder, ins.operands[0], local, type_) if local else _parameter(builder, ins, type_)
    targets = [builder.destination(text, type_) for text in builder.vector(ins.operands[0])]
    address = builder.address(ins.operands[1])
    dtype = dtype_of(type_).str[1:]
    lanes = builder.machine.lanes

    def place(chosen: Array | None, rows: Array) -> None:
        for index, target in enumerate(targets):
            if chosen is None:
                target[...] = rows[:, index]
            else:
                target[chosen] = rows[:, index]

    if space == "shared":
        shared = builder.machine.shared
        size = np.dtype(dtype).itemsize * len(targets)

        def from_shared(mask: Mask) -> None:
            pattern = shared.pattern(ins, address.base, address.offset, size, mask)
            rows = shared.read(pattern, dtype, len(targets))
            place(None if len(rows) == lanes else pattern.lanes, rows)

        return from_shared
    if space == "local":
        return lambda mask: place(*_local_rows(builder.machine, ins, address, dtype, len(targets), mask, 0))
    from_global = _global_loader(builder, ins, address, dtype, len(targets), place)
    return from_global if space else _generic(builder, ins, address, dtype, len(targets), from_global, place, None)


def _global_loader(builder: Builder, ins: Instruction, address: Address, dtype: str, count: int, place: object) -> Step:
    machine = builder.machine
    size = np.dtype(dtype).itemsize * count
    known: list[memory.Region | None] = [None]
    offset = np.uint64(address.offset % 2**64)

    def from_global(mask: Mask) -> None:
        lanes = machine.active(mask)
        base = np.broadcast_to(address.base, machine.lanes)
        addresses = (base if mask is True else base[lanes]).astype("u8") + offset
        region = known[0] if known[0] is not None and machine.memory.holds(known[0]) else None
        for found, chosen, offsets in machine.memory.parts(ins, addresses, size, lanes, region):
            known[0] = found
            rows = memory.gather(found, offsets, dtype, count)
            whole = mask is True and isinstance(chosen, slice)
            place(None if whole else lanes[chosen], rows)  # type: ignore[operator]

    return from_global


def _parameter(builder: Builder, ins: Instruction, type_: str) -> Step:
    found = re.match(r"\[\s*([\w$]+)\s*(?:\+\s*(\d+))?\s*\]$", ins.operands[1])
    if found is None or found[1] not in builder.parameters:
        raise builder.unsupported("parameter address")
    raw = builder.parameters[found[1]].view("u1")
    start, size = int(found[2] or 0), dtype_of(type_).itemsize
    targets = [builder.destination(text, type_) for text in builder.vector(ins.operands[0])]
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
    """``st{.space}{.vec}.type``."""
    type_, space = ins.parts[-1], space_of(builder, ins)
    if space == "param":
        local = _call_parameter(builder, ins.operands[0])
        if not local:
            raise builder.unsupported("parameter address")
        return _move(builder, local, ins.operands[1], type_)
    sources = [builder.lanes(text, type_) for text in builder.vector(ins.operands[1])]
    address = builder.address(ins.operands[0])
    machine, dtype, count = builder.machine, dtype_of(type_).str[1:], len(sources)
    size = np.dtype(dtype).itemsize * count

    def values(lanes: Array | slice) -> Array:
        first = sources[0][lanes]
        rows = np.empty((len(first), count), first.dtype)
        rows[:, 0] = first
        for index in range(1, count):
            rows[:, index] = sources[index][lanes]
        return rows

    def to_shared(mask: Mask) -> None:
        pattern = machine.shared.pattern(ins, address.base, address.offset, size, mask)
        machine.shared.write(pattern, values(pattern.lanes))

    known: list[memory.Region | None] = [None]
    offset = np.uint64(address.offset % 2**64)

    def to_global(mask: Mask) -> None:
        lanes = machine.active(mask)
        base = np.broadcast_to(address.base, machine.lanes)
        addresses = (base if mask is True else base[lanes]).astype("u8") + offset
        region = known[0] if known[0] is not None and machine.memory.holds(known[0]) else None
        for found, chosen, offsets in machine.memory.parts(ins, addresses, size, lanes, region):
            known[0] = found
            _put(machine, ins, found, offsets, values(lanes[chosen]), lanes[chosen])

    def to_local(mask: Mask) -> None:
        lanes, rows = _local_index(machine, ins, address, size, mask, 0)
        machine.local[rows[:, None] + np.arange(size)] = np.ascontiguousarray(values(lanes)).view("u1").reshape(-1, size)

    if space == "":
        return _generic(builder, ins, address, dtype, count, to_global, None, values)
    return {"shared": to_shared, "local": to_local, "global": to_global}[space]


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


# ---- local memory: each lane has its own


def _local_index(
    machine: Machine, ins: Instruction, address: Address, size: int, mask: Mask, window: int
) -> tuple[Array, Array]:
    lanes = machine.active(mask)
    per_lane = len(machine.local) // machine.lanes
    starts = np.broadcast_to(address.base, machine.lanes)[lanes].astype("i8") + address.offset - window
    if address.base.dtype.itemsize == 4:
        # Short pointers: an index may be below zero before the offset is added, and the sum wraps.
        starts &= 0xFFFFFFFF
    bad = (starts < 0) | (starts + size > per_lane) | (starts % size != 0)
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        detail = f"{machine.thread(int(lanes[first]))}, byte {int(starts[first])} of {per_lane}, {size} byte(s)"
        machine.findings.add(Kind.LOCAL_BOUNDS, ins, int(bad.sum()), detail)
    return lanes[~bad], (lanes * per_lane + starts)[~bad]


def _local_rows(
    machine: Machine, ins: Instruction, address: Address, dtype: str, count: int, mask: Mask, window: int
) -> tuple[Array, Array]:
    size = np.dtype(dtype).itemsize * count
    lanes, rows = _local_index(machine, ins, address, size, mask, window)
    return lanes, machine.local[rows[:, None] + np.arange(size)].view(dtype).reshape(-1, count)


# ---- generic addresses


def _generic(
    builder: Builder, ins: Instruction, address: Address, dtype: str, count: int, other: Step, place: object, values: object
) -> Step:
    """An access without a state space: lanes in the shared or local window go there, the rest to global memory."""
    machine = builder.machine
    size = np.dtype(dtype).itemsize * count

    def step(mask: Mask) -> None:
        base = np.broadcast_to(address.base, machine.lanes).astype("u8")
        active = np.ones(machine.lanes, bool) if mask is True else mask
        shared = active & (base >= SHARED_WINDOW) & (base < LOCAL_WINDOW)
        local = active & (base >= LOCAL_WINDOW) & (base < 2 * LOCAL_WINDOW - SHARED_WINDOW)
        if shared.any():
            pattern = machine.shared.pattern(ins, base - np.uint64(SHARED_WINDOW), address.offset, size, shared)
            if place is not None:
                place(pattern.lanes, machine.shared.read(pattern, dtype, count))  # type: ignore[operator]
            else:
                machine.shared.write(pattern, values(pattern.lanes))  # type: ignore[operator]
        if local.any():
            if place is not None:
                place(*_local_rows(machine, ins, address, dtype, count, local, LOCAL_WINDOW))  # type: ignore[operator]
            else:
                lanes, rows = _local_index(machine, ins, address, size, local, LOCAL_WINDOW)
                raw = np.ascontiguousarray(values(lanes)).view("u1").reshape(-1, size)  # type: ignore[operator]
                machine.local[rows[:, None] + np.arange(size)] = raw
        rest = active & ~shared & ~local
        if rest.any():
            other(True if mask is True and rest.all() else rest)

    return step
