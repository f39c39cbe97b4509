"""Synchronisation besides ``bar.sync``, which ends a block and is in ``program.py`` (PTX ISA, 9.7.13)."""

from __future__ import annotations

import numpy as np

from mla_conformance.suites.emulator.accesses import WARP
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.findings import Kind
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Mask


@instruction("bar")
def warp_barrier(builder: Builder, ins: Instruction) -> Step:
    """``bar.warp.sync membermask``: orders the accesses of a warp's threads; all of the warp must come."""
    if ins.parts[1:3] != ("warp", "sync"):
        raise builder.unsupported()
    machine = builder.machine

    def step(mask: Mask) -> None:
        if mask is True:
            machine.shared.warp_barrier(True)
        else:
            machine.shared.warp_barrier(np.repeat(machine.whole_warps(ins, mask), WARP))

    return step


@instruction("membar", "fence")
def fence(builder: Builder, ins: Instruction) -> Step:
    """Lanes run in lockstep and copies land when waited for: only ``fence.proxy.async`` of shared memory is noted."""
    if ins.parts[1:3] == ("proxy", "async") and "global" not in ins.parts:
        return builder.machine.bulk.unfenced.fence
    return lambda mask: None


@instruction("trap", "brkpt")
def trap(builder: Builder, ins: Instruction) -> Step:
    """A kernel stops itself, as ``tl.device_assert`` does: reported; the lanes go on."""
    machine = builder.machine

    def step(mask: Mask) -> None:
        lanes = machine.active(mask)
        machine.findings.add(Kind.TRAP, ins, len(lanes), f"{machine.thread(int(lanes[0]))} executes it")

    return step
