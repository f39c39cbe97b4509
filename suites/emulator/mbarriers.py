"""mbarrier objects of a batch of CTAs: phases, pending arrivals, transaction bytes (PTX ISA, 9.7.13.15).

A thread that waits for a phase is parked until the phase completes, so a wait never spins. Threads for which nothing
can complete it any more are reported as a deadlock and let go. What ``complete_tx`` counts is applied when its copy is
issued: the earliest moment that the model allows, so a count that is too small shows as an early wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mla_conformance.suites.emulator.findings import Kind
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, Mask

if TYPE_CHECKING:
    from mla_conformance.suites.emulator.machine import Machine

SIZE = 8
Todo = dict[int, Mask]
Add = Callable[[Todo, int, Mask], None]
Exits = list[tuple[int, Mask]]


class Barrier:
    """The objects at one offset of shared memory, one a CTA.

    Attributes:
        phase: number of the phase that is not complete yet; its parity is that of the object.
        first: the number that the object's first phase has. A second object at the same place goes on counting.
        expected, pending: arrivals of a phase, and those still missing.
        bytes: transaction bytes still missing; negative while more came than were announced.
    """

    def __init__(self, ctas: int) -> None:
        self.valid = np.zeros(ctas, bool)
        self.expected, self.pending, self.bytes, self.phase, self.first = np.zeros((5, ctas), "i8")

    def settle(self) -> None:
        """Complete the phases of which nothing is missing."""
        done = self.valid & (self.pending <= 0) & (self.bytes == 0)
        self.phase[done] += 1
        self.pending[done] = self.expected[done]


@dataclass(eq=False)
class Parked:
    """Lanes that wait for a phase: where they go on, and the predicate that tells them."""

    instruction: Instruction
    barrier: Barrier
    offset: int
    mask: Array
    wanted: Array
    """[lanes] the parity, or the phase that a state token names."""
    parity: bool
    polls: bool
    """``test_wait``: the lanes go on with the answer no if nobody else can run."""
    answer: Array
    block: int = -1

    def done(self) -> Array:
        """Which of its lanes' phases are complete; a wait at no object ends at once."""
        return completed(self.barrier, self.wanted, self.parity)


def completed(barrier: Barrier, wanted: Array, parity: bool, ctas: Array | None = None) -> Array:
    """For each lane (or each of ``ctas``), whether the phase it waits for is complete."""
    threads = 1 if ctas is not None else len(wanted) // len(barrier.phase)
    pick = (lambda a: a[ctas]) if ctas is not None else (lambda a: np.repeat(a, threads))
    phase = pick(barrier.phase)
    return np.asarray(((phase & 1) != wanted if parity else phase != wanted) | ~pick(barrier.valid))


class MBarriers:
    """All objects of the batch, and the lanes that wait for them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.objects: dict[int, Barrier] = {}
        self.parked: list[Parked] = []
        self._undecided: dict[int, list[Parked]] = {}

    def start(self) -> None:
        """A new batch begins."""
        self.objects.clear()
        self.parked.clear()
        self._undecided.clear()

    def at(self, offset: int) -> Barrier:
        """The objects at an offset, valid or not."""
        if offset not in self.objects:
            self.objects[offset] = Barrier(self.machine.ctas)
        return self.objects[offset]

    def report(self, instruction: Instruction, lanes: Array, what: str) -> None:
        """Note a misuse by some lanes."""
        self.machine.findings.add(
            Kind.MBARRIER, instruction, len(lanes), f"{self.machine.thread(int(lanes[0]))}: {what}"
        )

    def valid(self, instruction: Instruction, offset: int, lanes: Array) -> Array:
        """Those of the lanes whose CTA has an object there; the others are reported."""
        good = self.at(offset).valid[self.machine.cta_of_lane[lanes]]
        if not good.all():
            self.report(instruction, lanes[~good], f"no mbarrier was initialised at shared byte {offset}")
        return lanes[good]

    # ---- operations; ``lanes`` all name the object at ``offset`` of their own CTA

    def initialise(self, instruction: Instruction, offset: int, lanes: Array, counts: Array) -> None:
        """``mbarrier.init``."""
        barrier, ctas = self.at(offset), self.machine.cta_of_lane[lanes]
        live = barrier.valid[ctas]
        if live.any():
            self.report(instruction, lanes[live], f"there is a valid mbarrier at shared byte {offset} already")
        if (counts < 1).any():
            self.report(instruction, lanes[counts < 1], "the expected count is not positive")
        barrier.valid[ctas] = True
        barrier.expected[ctas] = barrier.pending[ctas] = np.maximum(counts, 1)
        barrier.bytes[ctas] = 0
        # A new object starts with an even phase.
        barrier.phase[ctas] = barrier.first[ctas] = (barrier.phase[ctas] // 2 + 1) * 2

    def invalidate(self, instruction: Instruction, offset: int, lanes: Array) -> None:
        """``mbarrier.inval``."""
        lanes = self.valid(instruction, offset, lanes)
        barrier, ctas = self.at(offset), self.machine.cta_of_lane[lanes]
        open_ = barrier.bytes[ctas] != 0
        if open_.any():
            missing = int(barrier.bytes[ctas][open_][0])
            self.report(instruction, lanes[open_], f"{missing} transaction bytes of the phase are still missing")
        barrier.valid[ctas] = False

    def arrive(self, instruction: Instruction, offset: int, lanes: Array, arrivals: Array, expects: Array) -> None:
        """Announce transaction bytes, then arrive: ``mbarrier.expect_tx`` and ``.arrive{.expect_tx}``."""
        chosen = self.valid(instruction, offset, lanes)
        kept = np.isin(lanes, chosen)
        barrier, ctas = self.at(offset), self.machine.cta_of_lane[chosen]
        np.add.at(barrier.bytes, ctas, expects[kept])
        np.subtract.at(barrier.pending, ctas, arrivals[kept])
        over = barrier.pending[ctas] < 0
        if over.any():
            self.report(instruction, chosen[over], "more arrivals than the phase expects")
        barrier.settle()

    def complete(self, instruction: Instruction, offset: int, lane: int, count: int) -> int:
        """``count`` bytes of a copy by ``lane`` arrive; returns the phase that they belong to."""
        barrier, cta = self.at(offset), int(self.machine.cta_of_lane[lane])
        phase = int(barrier.phase[cta])
        if len(self.valid(instruction, offset, np.array([lane]))):
            barrier.bytes[cta] -= count
            barrier.settle()
        return phase

    def test(
        self,
        instruction: Instruction,
        offset: int,
        lanes: Array,
        wanted: Array,
        answer: Array,
        *,
        parity: bool,
        polls: bool,
    ) -> None:
        """Answer those lanes whose phase is complete; the others park when their block ends."""
        self.valid(instruction, offset, lanes)
        barrier = self.at(offset)
        done = completed(barrier, wanted[lanes], parity, self.machine.cta_of_lane[lanes])
        answer[lanes] = done
        self.machine.bulk.observe(barrier, lanes[done])
        if not done.all():
            mask = np.zeros(self.machine.lanes, bool)
            mask[lanes[~done]] = True
            parked = Parked(instruction, barrier, offset, mask, wanted.copy(), parity, polls, answer)
            self._undecided.setdefault(id(instruction), []).append(parked)

    # ---- scheduling

    def leaving(self, instruction: Instruction, following: int) -> Callable[[Mask], Exits]:
        """How lanes leave the block that a wait ends."""

        def leave(mask: Mask) -> Exits:
            found = self._undecided.pop(id(instruction), None)
            if found is None:
                return [(following, mask)]
            rest = np.ones(self.machine.lanes, bool) if mask is True else mask
            for parked in found:
                parked.block = following
                rest = rest & ~parked.mask
            self.parked += found
            return [(following, rest)]

        return leave

    def release(self, todo: Todo, add: Add) -> bool:
        """Let those lanes go on whose phase is complete; whether there was one."""
        freed = False
        for parked in self.parked:
            done = parked.mask & parked.done()
            if done.any():
                freed = True
                self.machine.bulk.observe(parked.barrier, np.flatnonzero(done))
                self._free(parked, done, todo, add, answer=True)
        self.parked = [parked for parked in self.parked if parked.mask.any()]
        return freed

    def give_up(self, todo: Todo, add: Add) -> bool:
        """Nothing else can run: polls get their answer no; failing that, waits are reported and let go."""
        polling = [parked for parked in self.parked if parked.polls]
        for parked in polling or self.parked:
            if not polling:
                lanes = np.flatnonzero(parked.mask)
                cta = int(self.machine.cta_of_lane[lanes[0]])
                missing = f"{int(parked.barrier.pending[cta])} arrival(s) and {int(parked.barrier.bytes[cta])} byte(s)"
                self.report(parked.instruction, lanes, f"waits for ever: shared byte {parked.offset} lacks {missing}")
            self._free(parked, parked.mask, todo, add, answer=not polling)
        freed = bool(self.parked)
        self.parked = [parked for parked in self.parked if parked.mask.any()]
        return freed

    @staticmethod
    def _free(parked: Parked, lanes: Array, todo: Todo, add: Add, *, answer: bool) -> None:
        parked.answer[lanes] = answer
        add(todo, parked.block, lanes.copy())
        parked.mask = parked.mask & ~lanes
