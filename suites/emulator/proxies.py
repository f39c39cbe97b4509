"""Writes that a bulk copy may not see yet: the copy unit is another proxy to memory (PTX ISA, 8.7 and 9.7.13.4).

Between a thread's write to shared memory and a bulk copy from or to the same bytes there must be a
``fence.proxy.async``: by the writer itself, or by any thread of the CTA after a barrier that follows the write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mla_conformance.suites.emulator.accesses import Pattern, relation
from mla_conformance.suites.emulator.findings import Kind
from mla_conformance.suites.emulator.logs import Log
from mla_conformance.suites.emulator.types import Mask

if TYPE_CHECKING:
    from mla_conformance.suites.emulator.machine import Machine


class Unfenced:
    """Writes without a fence: those since the last barrier, and those before it.

    Attributes:
        active: whether the kernel has bulk copies; without them nothing is recorded.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.active = False
        self.recent, self.older = Log(), Log()

    def start(self) -> None:
        """A new batch begins."""
        self.recent.clear()
        self.older.clear()

    def wrote(self, pattern: Pattern) -> None:
        """Threads write to shared memory."""
        if self.active:
            self.recent.add(pattern)

    def ordered(self, lanes: Mask) -> None:
        """Threads passed a barrier: a fence of any of them now covers what they wrote."""
        for pattern, still in self.recent.open.values():
            moved = still if lanes is True else lanes if still is True else still & lanes
            if moved is True or moved[pattern.lanes].any():
                self.older.add(pattern, moved)
        self.recent.close(lanes)

    def fence(self, mask: Mask) -> None:
        """``fence.proxy.async`` by the lanes of ``mask``."""
        self.recent.close(mask)
        if mask is True:
            self.older.clear()
        elif self.older.open:
            ctas = np.zeros(self.machine.ctas, bool)
            ctas[self.machine.cta_of_lane[mask]] = True
            self.older.close(ctas[self.machine.cta_of_lane])

    def copy(self, pattern: Pattern, kind: Kind) -> None:
        """A bulk copy reads or writes: report the writes that it is not ordered after."""
        for log in (self.recent, self.older):
            for other, still in log.open.values():
                met = relation(pattern, other)
                if met is None:
                    continue
                bad = np.ones(len(met.cells), bool) if still is True else still[met.theirs]
                if bad.any():
                    writer = self.machine.thread(int(met.theirs[bad][0]))
                    detail = f"no fence.proxy.async after {writer} wrote it at PTX line {other.instruction.line}"
                    self.machine.findings.add(kind, pattern.instruction, int(bad.sum()), detail)
