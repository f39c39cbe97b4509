"""Asynchronous copies under way, in the groups that their threads commit (PTX ISA, 9.7.9.25.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mla_conformance.suites.emulator.accesses import Pattern
from mla_conformance.suites.emulator.findings import Kind
from mla_conformance.suites.emulator.types import Array, Mask

if TYPE_CHECKING:
    from mla_conformance.suites.emulator.machine import Machine


@dataclass
class Copy:
    """One ``cp.async`` under way: the bytes are read when it is issued and land when its group is waited for."""

    pattern: Pattern
    data: Array
    group: Array
    """[n] the group, of its own thread, that each lane's copy belongs to."""
    left: Array
    """[n] which lanes have not waited yet."""


class CopyGroups:
    """The copies of one batch; groups are counted by thread."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.copies: list[Copy] = []
        self.commits = np.zeros(machine.lanes, "i8")

    def start(self) -> None:
        """A new batch begins."""
        self.copies.clear()
        self.commits[:] = 0

    def issue(self, pattern: Pattern, data: Array) -> None:
        """A copy begins; it belongs to the group that its thread commits next."""
        self.machine.shared.poison(pattern)
        self.copies.append(Copy(pattern, data, self.commits[pattern.lanes], np.ones(len(data), bool)))

    def commit(self, mask: Mask) -> None:
        """Close the group of each lane."""
        self.commits += 1 if mask is True else mask

    def wait(self, mask: Mask, younger: int | None) -> None:
        """Land what belongs to all but the ``younger`` youngest groups of its thread; None: everything."""
        left = []
        for copy in self.copies:
            lanes = copy.pattern.lanes
            done = copy.left if younger is None else copy.left & (copy.group < self.commits[lanes] - younger)
            if mask is not True:
                done = done & mask[lanes]
            if done.all():
                self.machine.shared.land(copy.pattern, copy.data, True)
                continue
            if done.any():
                chosen = np.zeros(self.machine.lanes, bool)
                chosen[lanes[done]] = True
                self.machine.shared.land(copy.pattern, copy.data, chosen)
                copy.left = copy.left & ~done
                if not copy.left.any():
                    continue
            left.append(copy)
        self.copies = left

    def finish(self) -> None:
        """Report what nobody waited for before the batch ended."""
        for copy in self.copies:
            lane = int(copy.pattern.lanes[np.flatnonzero(copy.left)[0]])
            detail = f"{self.machine.thread(lane)} ended without waiting for it"
            self.machine.findings.add(Kind.PENDING_AT_EXIT, copy.pattern.instruction, int(copy.left.sum()), detail)
