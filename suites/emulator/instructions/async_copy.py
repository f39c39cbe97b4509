"""Asynchronous copies, global to shared, in groups (PTX ISA, 9.7.9.25.3)."""

from __future__ import annotations

import numpy as np

from mla_conformance.suites.emulator import memory
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.copies import CopyGroups
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, Mask


@instruction("cp")
def copy(builder: Builder, ins: Instruction) -> Step:
    """``cp.async.ca|cg.shared.global [d], [s], size{, source size}`` and its groups."""
    parts = ins.parts
    groups = builder.machine.copy_groups
    if parts[1] != "async" or "bulk" in parts or "mbarrier" in parts:
        raise builder.unsupported()
    if "commit_group" in parts:
        return groups.commit
    if "wait_group" in parts:
        younger = int(ins.operands[0], 0)
        return lambda mask: groups.wait(mask, younger)
    if "wait_all" in parts:
        return lambda mask: groups.wait(mask, None)
    return _issue(builder, ins, groups)


def _issue(builder: Builder, ins: Instruction, groups: CopyGroups) -> Step:
    machine = builder.machine
    target, source = builder.address(ins.operands[0]), builder.address(ins.operands[1])
    size = int(ins.operands[2], 0)
    given = builder.lanes(ins.operands[3], "u32") if len(ins.operands) > 3 else None
    if size not in (4, 8, 16) or len(ins.operands) > 4:
        raise builder.unsupported()

    def fetch(data: Array, rows: Array, lanes: Array, count: int) -> None:
        """The first ``count`` bytes of some rows; the rest of a row stays zero."""
        whole = count == size
        for found, chosen, offsets in machine.memory.parts(ins, source.of(lanes), count if whole else 1, lanes):
            if whole:
                data[rows[chosen]] = memory.gather(found, offsets, "u1", size)
            else:
                data[rows[chosen], :count] = found.data[offsets[:, None] + np.arange(count)]

    def step(mask: Mask) -> None:
        pattern = machine.shared.pattern(ins, target.base, target.offset, size, mask)
        lanes = pattern.lanes
        data = np.zeros((len(lanes), size), "u1")
        if given is None:
            fetch(data, np.arange(len(lanes)), lanes, size)
        else:
            counts = np.minimum(given[lanes], size)
            if (counts == size).all():
                fetch(data, np.arange(len(lanes)), lanes, size)
                return groups.issue(pattern, data)
            for count in np.unique(counts):
                rows = np.flatnonzero(counts == count)
                if count:
                    fetch(data, rows, lanes[rows], int(count))
        return groups.issue(pattern, data)

    return step
