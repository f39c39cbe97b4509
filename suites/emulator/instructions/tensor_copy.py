"""Bulk copies, of bytes and of tiles of a tensor (PTX ISA, 9.7.9.25.4 to 9.7.9.27).

Tiles are copied when the instruction is issued and land as ``bulk.py`` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mla_conformance.suites.emulator import floats, integers, memory
from mla_conformance.suites.emulator.builder import Address, Builder, Step
from mla_conformance.suites.emulator.bulk import PIECE
from mla_conformance.suites.emulator.errors import PTXError, UnsupportedInstruction
from mla_conformance.suites.emulator.findings import Kind
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.ptx import Instruction, split_operands
from mla_conformance.suites.emulator.tensormaps import SIZE, TensorMap, decode, swizzled
from mla_conformance.suites.emulator.types import Array, Mask, dtype_of, is_float

TENSOR_ALIGNMENT = 128
"""Of a tensor copy's place in shared memory; PIECE for other bulk copies."""
_RANK = re.compile(r"([1-5])d$")
_KNOWN = {
    "async",
    "bulk",
    "tensor",
    "tile",
    "tile:gather4",
    "tile:scatter4",
    "reduce",
    "global",
    "shared:cta",
    "shared:cluster",
    "mbarrier:complete_tx:bytes",
    "bulk_group",
    "L2:cache_hint",
}


@instruction("cp.bulk")
def bulk_copy(builder: Builder, ins: Instruction) -> Step:
    """``cp.async.bulk`` and ``cp.async.bulk.tensor``, loads and stores, ``cp.reduce.async.bulk.tensor``, groups."""
    parts, bulk = ins.parts, builder.machine.bulk
    if "commit_group" in parts:
        return bulk.commit
    if "wait_group" in parts:
        younger = int(ins.operands[0], 0)
        return lambda mask: bulk.wait(mask, younger)
    if "prefetch" in parts:
        return lambda mask: None
    reduction = next((part for part in parts if part in integers.REDUCTIONS), "")
    if any(part not in _KNOWN and part != reduction and not _RANK.match(part) for part in parts[1:]):
        raise builder.unsupported()
    spaces = tuple(part for part in parts if part in ("global", "shared:cta", "shared:cluster"))
    loads = spaces in (("shared:cta", "global"), ("shared:cluster", "global")) and "mbarrier:complete_tx:bytes" in parts
    stores = spaces == ("global", "shared:cta") and "bulk_group" in parts
    tensor = "tensor" in parts
    if loads == stores or (reduction and not (tensor and stores)) or bool(reduction) != ("reduce" in parts):
        raise builder.unsupported()
    if loads:
        return _Load(builder, ins, tensor=tensor).step
    return _Store(builder, ins, reduction, tensor=tensor).step


@dataclass
class _Tile:
    """What one lane copies: ``offsets`` [rows, columns] from ``address``, in bytes, where ``inside``."""

    address: int
    offsets: Array
    inside: Array
    element: str
    fill: int
    swizzle: int

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.element).itemsize

    @property
    def size(self) -> int:
        """Bytes in shared memory."""
        return self.inside.size * self.width

    def addresses(self) -> Array:
        """[n] of the elements inside."""
        return (self.offsets[self.inside] + self.address).astype("u8")

    def order(self, start: int) -> Array:
        """[pieces] where each piece of the tile is, counted from shared byte ``start``."""
        linear = start + PIECE * np.arange(self.size // PIECE)
        return (swizzled(linear, self.swizzle) - start) // PIECE


class _Copy:
    """Operands that loads and stores have in common."""

    def __init__(self, builder: Builder, ins: Instruction, shared: str, other: str, *, tensor: bool) -> None:
        self.machine, self.ins = builder.machine, ins
        self.machine.bulk.unfenced.active = True
        self.shared = builder.address(shared)
        self.rank = next((int(part[0]) for part in ins.parts if _RANK.match(part)), 0)
        self.scattered = "tile:gather4" in ins.parts or "tile:scatter4" in ins.parts
        self.coordinates: list[Array] = []
        if tensor:
            base, coordinates = split_operands(other[1:-1])
            other = f"[{base}]"
            self.coordinates = [builder.lanes(text, "s32") for text in builder.vector(coordinates)]
            if len(self.coordinates) != (5 if self.scattered else self.rank):
                raise builder.unsupported()
        self.other = builder.address(other)
        self.alignment = TENSOR_ALIGNMENT if tensor else PIECE

    def places(self, address: Address, lanes: Array) -> Array:
        """Addresses of some lanes."""
        return np.broadcast_to(address.base, self.machine.lanes)[lanes].astype("i8") + address.offset

    def refuse(self, why: str) -> UnsupportedInstruction:
        return UnsupportedInstruction(f"PTX line {self.ins.line}: not implemented: `{self.ins.text}` ({why})")

    def tiles(self, lanes: Array, sizes: Array | None) -> Iterator[tuple[int, int, _Tile]]:
        """For each lane whose operands make sense: the lane, its byte of shared memory, and its tile."""
        for lane, start, other in zip(
            lanes, self.places(self.shared, lanes), self.places(self.other, lanes), strict=True
        ):
            if self.coordinates:
                tile = self._tile(int(lane), int(other))
            else:
                assert sizes is not None
                count = int(sizes[lane])
                offsets = np.arange(count).reshape(1, -1)
                tile = _Tile(int(other), offsets, np.ones((1, count), bool), "b8", 0, 0)
            if tile is not None:
                yield int(lane), int(start), tile

    def _tile(self, lane: int, address: int) -> _Tile | None:
        found = self._map(lane, address)
        if found is None:
            return None
        if found.unsupported():
            raise self.refuse(found.unsupported())
        if len(found.dims) != self.rank:
            raise PTXError(f"PTX line {self.ins.line}: a tensor map of rank {len(found.dims)}: `{self.ins.text}`")
        if found.fault():
            detail = f"{self.machine.thread(lane)}: the tensor map's {found.fault()}"
            self.machine.findings.add(Kind.MISALIGNED, self.ins, 1, detail)
            return None
        start = tuple(int(values[lane]) for values in self.coordinates)
        if self.scattered:
            if self.rank != 2 or found.box[1] != 1:
                raise self.refuse(f"a box {found.box} for four rows")
            rows = [found.tile((start[0], row)) for row in start[1:]]
            offsets, inside = (np.concatenate(part) for part in zip(*rows, strict=True))
        else:
            offsets, inside = found.tile(start)
        return _Tile(found.address, offsets, inside, found.element, found.fill, found.swizzle)

    def _map(self, lane: int, address: int) -> TensorMap | None:
        places = np.array([address, address + SIZE // 2], "u8")
        raw = np.zeros((2, SIZE // 2), "u1")
        for region, chosen, offsets in self.machine.memory.parts(self.ins, places, SIZE // 2, np.array([lane, lane])):
            raw[chosen] = memory.gather(region, offsets, "u1", SIZE // 2)
            if len(offsets) == len(places):
                return decode(raw.tobytes())
        return None

    def usable(self, lane: int, start: int, size: int) -> bool:
        """Whether a tile may be at shared byte ``start``; it is reported if not."""
        machine = self.machine
        where = f"{machine.thread(lane)} copies {size} byte(s) at shared byte {start}"
        if start < 0 or start + size > machine.shared.size:
            machine.findings.add(Kind.SHARED_BOUNDS, self.ins, 1, f"{where}; the CTA has {machine.shared.size} bytes")
            return False
        if start % self.alignment or size % PIECE or not size:
            multiple = f"expected a multiple of {self.alignment}, and of {PIECE} bytes"
            machine.findings.add(Kind.MISALIGNED, self.ins, 1, f"{where}; {multiple}")
            return False
        return True


class _Load(_Copy):
    """Global to shared memory: ``[dst], [map, {coordinates}], [mbarrier]`` or ``[dst], [src], size, [mbarrier]``."""

    def __init__(self, builder: Builder, ins: Instruction, *, tensor: bool) -> None:
        super().__init__(builder, ins, ins.operands[0], ins.operands[1], tensor=tensor)
        self.sizes = None if tensor else builder.lanes(ins.operands[2], "u32")
        self.barrier = builder.address(ins.operands[2 if tensor else 3])

    def step(self, mask: Mask) -> None:
        """Run it."""
        machine = self.machine
        lanes = machine.active(mask)
        objects = dict(zip(lanes.tolist(), self.places(self.barrier, lanes).tolist(), strict=True))
        groups: dict[tuple[int, int, int], list[tuple[int, int, Array]]] = {}
        for lane, start, tile in self.tiles(lanes, self.sizes):
            data = self._read(lane, tile)
            phase = machine.mbarriers.complete(self.ins, objects[lane], lane, tile.size)
            if self.usable(lane, start, tile.size):
                moved = np.empty((tile.size // PIECE, PIECE), "u1")
                moved[tile.order(start)] = data.view("u1").reshape(-1, PIECE)
                groups.setdefault((start, tile.size, objects[lane]), []).append((lane, phase, moved))
        for (start, size, offset), copies in groups.items():
            issuing = np.array([lane for lane, _, _ in copies])
            pattern = machine.bulk.place(self.ins, issuing, start, size)
            phases = np.array([phase for _, phase, _ in copies])
            machine.bulk.load(pattern, issuing, machine.mbarriers.at(offset), phases, np.stack([c[2] for c in copies]))

    def _read(self, lane: int, tile: _Tile) -> Array:
        bits = f"u{tile.width}"
        inner = np.full(int(np.count_nonzero(tile.inside)), tile.fill, bits)
        addresses = tile.addresses()
        for region, chosen, offsets in self.machine.memory.parts(
            self.ins, addresses, tile.width, np.full(len(addresses), lane)
        ):
            inner[chosen] = memory.gather(region, offsets, bits, 1)[:, 0]
        data = np.full(tile.inside.shape, tile.fill, bits)
        data[tile.inside] = inner
        return data


class _Store(_Copy):
    """Shared to global memory: ``[map, {coordinates}], [src]`` or ``[dst], [src], size``; a reduction adds to it."""

    def __init__(self, builder: Builder, ins: Instruction, reduction: str, *, tensor: bool) -> None:
        super().__init__(builder, ins, ins.operands[1], ins.operands[0], tensor=tensor)
        self.sizes = None if tensor else builder.lanes(ins.operands[2], "u32")
        self.reduction = reduction

    def step(self, mask: Mask) -> None:
        """Run it."""
        machine = self.machine
        groups: dict[tuple[int, int], list[tuple[int, _Tile]]] = {}
        for lane, start, tile in self.tiles(machine.active(mask), self.sizes):
            if self.usable(lane, start, tile.size):
                groups.setdefault((start, tile.size), []).append((lane, tile))
        for (start, size), copies in groups.items():
            issuing = np.array([lane for lane, _ in copies])
            pattern = machine.bulk.place(self.ins, issuing, start, size)
            rows = machine.shared.read(pattern, "u1", PIECE).reshape(len(copies), -1, PIECE)
            machine.bulk.store(pattern, issuing)
            for (lane, tile), pieces in zip(copies, rows, strict=True):
                values = np.ascontiguousarray(pieces[tile.order(start)]).view(f"u{tile.width}")
                self._write(lane, tile, values.reshape(tile.inside.shape)[tile.inside])

    def _write(self, lane: int, tile: _Tile, values: Array) -> None:
        machine, addresses = self.machine, tile.addresses()
        for region, chosen, offsets in machine.memory.parts(
            self.ins, addresses, tile.width, np.full(len(addresses), lane)
        ):
            new = values[chosen]
            if self.reduction:
                old = memory.gather(region, offsets, new.dtype.str[1:], 1)[:, 0]
                new = self._reduced(old, new, tile.element)
            elif machine.shared.check:
                owner = np.full(len(offsets), machine.cta_number[lane])
                foreign = region.note_writes(offsets, tile.width, owner)
                if foreign.any():
                    detail = f"{machine.thread(lane)}, byte {int(offsets[foreign][0])} of {region.name}"
                    machine.findings.add(Kind.TWO_CTAS, self.ins, int(foreign.sum()), detail)
            memory.scatter(region, offsets, new[:, None])

    def _reduced(self, old: Array, new: Array, element: str) -> Array:
        dtype = dtype_of(element)
        a, b = old.view(dtype), new.view(dtype)
        if not is_float(element):
            result = integers.REDUCTIONS[self.reduction](a, b)
        elif self.reduction == "add":
            result = floats.add(a, b, element)
        elif self.reduction in ("min", "max"):
            result = (floats.minimum if self.reduction == "min" else floats.maximum)(a, b, element)
        else:
            raise self.refuse(f".{self.reduction} of .{element}")
        return np.ascontiguousarray(result).view(old.dtype)
