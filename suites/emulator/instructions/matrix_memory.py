"""Matrix fragments from and to shared memory: ldmatrix, stmatrix (PTX ISA, 9.7.14.5.15 and 9.7.14.5.16)."""

from __future__ import annotations

import numpy as np

from mla_conformance.suites.emulator.accesses import WARP
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Mask


@instruction("ldmatrix")
def load_matrix(builder: Builder, ins: Instruction) -> Step:
    """``ldmatrix.sync.aligned.m8n8.x1|x2|x4{.trans}.shared.b16``: lane i of a warp names row i % 8 of matrix i / 8."""
    count = _matrices(builder, ins)
    targets = [builder.destination(name, "b32") for name in builder.vector(ins.operands[0])]
    address = builder.address(ins.operands[1])
    if len(targets) != count:
        raise builder.unsupported()
    machine, transposed = builder.machine, "trans" in ins.parts
    naming = machine.lane_in_warp < 8 * count
    by_warp = [target.reshape(machine.warps, WARP) for target in targets]

    def step(mask: Mask) -> None:
        chosen: Mask = True if count == 4 else naming
        if mask is not True:
            chosen = naming & np.repeat(machine.whole_warps(ins, mask), WARP)
        pattern = machine.shared.pattern(ins, address.base, address.offset, 16, chosen)
        rows = machine.shared.read(pattern, "u2", 8)
        if len(rows) != 8 * count * machine.warps:
            spread = np.full((machine.lanes, 8), 0xFFFF, "u2")
            spread[pattern.lanes] = rows
            rows = spread[naming]
        matrices = rows.reshape(machine.warps, count, 8, 8)
        if transposed:
            matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
        words = matrices.view("u4").reshape(machine.warps, count, WARP)
        where = mask if mask is True else mask.reshape(machine.warps, WARP)
        for i, target in enumerate(by_warp):
            np.copyto(target, words[:, i], where=where)

    return step


@instruction("stmatrix")
def store_matrix(builder: Builder, ins: Instruction) -> Step:
    """The reverse of ``ldmatrix``."""
    count = _matrices(builder, ins)
    sources = [builder.lanes(name, "b32") for name in builder.vector(ins.operands[1])]
    address = builder.address(ins.operands[0])
    if len(sources) != count:
        raise builder.unsupported()
    machine, transposed = builder.machine, "trans" in ins.parts
    naming = machine.lane_in_warp < 8 * count
    # The row that lane i of a warp names, among those of all lanes that name one.
    place = np.cumsum(naming) - 1

    def step(mask: Mask) -> None:
        chosen: Mask = True if count == 4 else naming
        if mask is not True:
            chosen = naming & np.repeat(machine.whole_warps(ins, mask), WARP)
        words = np.stack([source.reshape(machine.warps, 8, 4) for source in sources], 1)
        matrices = words.view("u2")
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        rows = np.ascontiguousarray(matrices).reshape(-1, 8)
        pattern = machine.shared.pattern(ins, address.base, address.offset, 16, chosen)
        machine.shared.write(pattern, rows[place[pattern.lanes]])

    return step


def _matrices(builder: Builder, ins: Instruction) -> int:
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared:cta", "b16"}
    if any(part not in known for part in ins.parts[1:]):
        raise builder.unsupported()
    return next(int(part[1]) for part in ins.parts if part in ("x1", "x2", "x4"))
