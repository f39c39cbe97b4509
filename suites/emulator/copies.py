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
    """One ``cp.async`` under way: the bytes are read when it is issued and land when its group is waited for.

    Attributes:
        group: the group of its own thread that each lane's copy belongs to: [n], or one number for all.
        left: [n] which lanes have not waited yet; None for all.
    """

    pattern: Pattern
    data: Array
    group: Array | int
    left: Array | None = None


class CopyGroups:
    """The copies of one batch; groups are counted by thread."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.copies: list[Copy] = []
        self.commits: Array | int = 0

    def start(self) -> None:
        """A new batch begins."""
        self.copies.clear()
        self.commits = 0

    def issue(self, pattern: Pattern, data: Array) -> None:
        """A copy begins; it belongs to the group that its thread commits next."""
        self.machine.shared.poison(pattern, data)
        group = self.commits if isinstance(self.commits, int) else self.commits[pattern.lanes]
        self.copies.append(Copy(pattern, data, group))

    def commit(self, mask: Mask) -> None:
        """Close the group of each lane."""
        if mask is not True and isinstance(self.commits, int):
            self.commits = np.full(self.machine.lanes, self.commits)
        self.commits = self.commits + (1 if mask is True else mask)

    def wait(self, mask: Mask, younger: int | None) -> None:
        """Land what belongs to all but the ``younger`` youngest groups of its thread; None: everything."""
        left = []
        for copy in self.copies:
            if mask is True and copy.left is None and isinstance(self.commits, int) and isinstance(copy.group, int):
                if younger is None or copy.group < self.commits - younger:
                    self.machine.shared.land(copy.pattern, copy.data, True)
                else:
                    left.append(copy)
            elif self._land_some(copy, mask, younger):
                left.append(copy)
        self.copies = left

    def _land_some(self, copy: Copy, mask: Mask, younger: int | None) -> bool:
        """Land the copies of those lanes that wait for them; whether any are left."""
        lanes = copy.pattern.lanes
        waiting = np.ones(len(lanes), bool) if copy.left is None else copy.left
        commits = self.commits if isinstance(self.commits, int) else self.commits[lanes]
        done = waiting if younger is None else waiting & (copy.group < commits - younger)
        if mask is not True:
            done = done & mask[lanes]
        if done.all():
            self.machine.shared.land(copy.pattern, copy.data, True)
            return False
        if done.any():
            chosen = np.zeros(self.machine.lanes, bool)
            chosen[lanes[done]] = True
            self.machine.shared.land(copy.pattern, copy.data, chosen)
        copy.left = waiting & ~done
        return bool(copy.left.any())

    def finish(self) -> None:
        """Report what nobody waited for before the batch ended."""
        for copy in self.copies:
            lanes = copy.pattern.lanes if copy.left is None else copy.pattern.lanes[copy.left]
            if len(lanes):
                detail = f"{self.machine.thread(int(lanes[0]))} ended without waiting for it"
                self.machine.findings.add(Kind.PENDING_AT_EXIT, copy.pattern.instruction, len(lanes), detail)
