"""Tensor maps that a kernel makes itself (PTX ISA, 9.7.9.28, and 9.7.13.4 for the copy)."""

from __future__ import annotations

import numpy as np

from mla_conformance.suites.emulator import memory
from mla_conformance.suites.emulator.accesses import WARP
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.tensormaps import FIELDS, SIZE, field_place
from mla_conformance.suites.emulator.types import Mask, dtype_of


@instruction("tensormap")
def tensor_map(builder: Builder, ins: Instruction) -> Step:
    """``tensormap.replace`` of a map in shared memory, and ``tensormap.cp_fenceproxy`` of it to global memory."""
    if ins.parts[1] == "cp_fenceproxy":
        return _publish(builder, ins)
    parts = ins.parts
    if (
        parts[1:3] != ("replace", "tile")
        or parts[4:6] != ("shared:cta", "b1024")
        or parts[3] not in (FIELDS.names or ())
    ):
        raise builder.unsupported()
    index = int(ins.operands[1], 0) if len(ins.operands) == 3 else 0
    place, width = field_place(parts[3], index)
    address, values = builder.address(ins.operands[0]), builder.lanes(ins.operands[-1], f"b{8 * width}")
    if dtype_of(parts[-1]).itemsize != width:
        raise builder.unsupported()
    shared = builder.machine.shared

    def step(mask: Mask) -> None:
        pattern = shared.pattern(ins, address.base, address.offset + place, width, mask)
        shared.write(pattern, values[pattern.lanes][:, None])

    return step


def _publish(builder: Builder, ins: Instruction) -> Step:
    known = ("global", "shared:cta", "tensormap:generic", "release")
    if ins.parts[2:6] != known or ins.parts[-2:] != ("sync", "aligned") or int(ins.operands[2], 0) != SIZE:
        raise builder.unsupported()
    machine, shared = builder.machine, builder.machine.shared
    target, source = builder.address(ins.operands[0]), builder.address(ins.operands[1])
    piece = 4 * machine.lane_in_warp.astype("u8")

    def step(mask: Mask) -> None:
        # The whole warp copies the map, each lane a word, after all of it have come.
        whole = np.repeat(machine.whole_warps(ins, mask), WARP)
        shared.warp_barrier(True if mask is True else whole)
        pattern = shared.pattern(ins, source.base + piece, source.offset, 4, mask)
        rows = shared.read(pattern, "u4", 1)
        places = (np.broadcast_to(target.base, machine.lanes) + piece)[pattern.lanes].astype("u8")
        places = places + np.uint64(target.offset % 2**64)
        for region, chosen, offsets in machine.memory.parts(ins, places, 4, pattern.lanes):
            memory.scatter(region, offsets, rows[chosen])

    return step
