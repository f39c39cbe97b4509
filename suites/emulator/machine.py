"""The machine: a batch of CTAs whose threads are the lanes of NumPy vectors, and the scheduler that runs blocks.

Control flow is a worklist of (block, mask of lanes); the lowest block in text order runs first, which reconverges
structured code. A barrier ends a block: lanes that reach it wait until all live threads of their CTA have, whatever
branch they came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mla_conformance.suites.emulator.accesses import WARP
from mla_conformance.suites.emulator.bulk import BulkCopies
from mla_conformance.suites.emulator.copies import CopyGroups
from mla_conformance.suites.emulator.declarations import Variable
from mla_conformance.suites.emulator.errors import EmulationStopped
from mla_conformance.suites.emulator.findings import Findings, Kind
from mla_conformance.suites.emulator.mbarriers import MBarriers
from mla_conformance.suites.emulator.memory import GlobalMemory
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.shared import SharedMemory
from mla_conformance.suites.emulator.types import Array, Mask

if TYPE_CHECKING:
    from mla_conformance.suites.emulator.program import Block

SHARED_WINDOW = 1 << 40
"""Generic addresses of shared memory start here, those of local memory one window later (PTX ISA, 5.1)."""
LOCAL_WINDOW = 1 << 41
ALL_THREADS = -1


@dataclass
class Waiting:
    """Lanes parked at one barrier of a CTA: where each goes on, and the barrier instruction."""

    mask: Array
    block: int | None
    instruction: Instruction
    barrier: int
    count: int


class Machine:
    """State that all instructions share.

    Args:
        threads: threads of a CTA.
        ctas: CTAs that run together, as one vector.
        shared: the batch's shared memory.
        findings: where faults are noted.
    """

    def __init__(self, threads: int, ctas: int, shared: SharedMemory, findings: Findings) -> None:
        self.threads, self.ctas = threads, ctas
        self.lanes = threads * ctas
        self.warps = self.lanes // WARP
        self.shared, self.findings = shared, findings
        self.memory = GlobalMemory(findings)
        self.lane_in_warp = np.arange(self.lanes) % WARP
        self.cta_of_lane = np.arange(self.lanes) // threads
        self.cta_number = np.zeros(self.lanes, "i4")
        self.live = np.ones(self.lanes, bool)
        self.carry = np.zeros(self.lanes, bool)
        self.special = self._special()
        self.local = np.zeros(0, "u1")
        self.addresses: dict[str, int] = {}
        self.parameter_base = 0
        """Generic address of the space of parameters."""
        self.copy_groups = CopyGroups(self)
        self.mbarriers = MBarriers(self)
        self.bulk = shared.bulk = BulkCopies(self)
        self.undefined: list[Array] = []
        self.waiting: list[Waiting] = []
        self.instructions = 0
        findings.thread = self.thread

    def _special(self) -> dict[str, Array]:
        """Special registers (PTX ISA, chapter 10); %ctaid and %nctaid are set for each batch."""
        lanes = self.lanes
        thread = (np.arange(lanes) % self.threads).astype("u4")
        lane = thread % WARP
        bits = np.uint32(1) << lane
        zero = np.zeros(lanes, "u4")
        found = {
            "%tid.x": thread,
            "%ntid.x": np.full(lanes, self.threads, "u4"),
            "%laneid": lane,
            "%warpid": thread // WARP,
            "%nwarpid": np.full(lanes, self.threads // WARP, "u4"),
            "WARP_SZ": np.full(lanes, WARP, "u4"),
            "%lanemask_eq": bits,
            "%lanemask_lt": bits - np.uint32(1),
            "%lanemask_le": (bits - np.uint32(1)) | bits,
            "%lanemask_gt": ~((bits - np.uint32(1)) | bits),
            "%lanemask_ge": ~(bits - np.uint32(1)),
            "%smid": zero,
            "%nsmid": zero + np.uint32(1),
            "%clusterid.x": zero,
            "%cluster_ctarank": zero,
            "%cluster_ctaid.x": zero,
            "%cluster_nctaid.x": zero + np.uint32(1),
            "%dynamic_smem_size": np.full(lanes, self.shared.size, "u4"),
        }
        for axis in "yz":
            found[f"%tid.{axis}"] = zero
            found[f"%ntid.{axis}"] = zero + np.uint32(1)
        for axis in "xyz":
            found[f"%ctaid.{axis}"] = np.zeros(lanes, "u4")
            found[f"%nctaid.{axis}"] = np.ones(lanes, "u4")
        return found

    def thread(self, lane: int) -> str:
        """How messages call a lane."""
        return f"CTA {int(self.cta_number[lane])} thread {lane % self.threads}"

    def address_of(self, variable: Variable) -> int:
        """The address of a module or function variable in its own state space."""
        return self.addresses[variable.name]

    def active(self, mask: Mask) -> Array:
        """The lanes of a mask, as numbers."""
        return np.arange(self.lanes) if mask is True else np.flatnonzero(mask)

    def whole_warps(self, instruction: Instruction, mask: Mask, members: Array | None = None) -> Array:
        """Which warps take part in a warp-wide instruction; one with lanes missing is reported.

        Args:
            instruction: it.
            mask: the lanes that execute it.
            members: [lanes] those that its membermask names; None for all of each warp.
        """
        if mask is True:
            return np.ones(self.warps, bool)
        lanes = mask.reshape(self.warps, WARP)
        due = (self.live if members is None else self.live & members).reshape(self.warps, WARP)
        found = np.asarray(lanes.any(1))
        partly = found & (due & ~lanes).any(1)
        if partly.any():
            detail = f"only some lanes of the warp of {self.thread(int(np.flatnonzero(partly)[0]) * WARP)} execute it"
            self.findings.add(Kind.DIVERGED, instruction, int(partly.sum()), detail)
        return found

    # ---- scheduling

    def run(self, blocks: list[Block], ctas: Array, grid: tuple[int, int, int], budget: int) -> None:
        """Run one batch: ``ctas`` holds the linear numbers of at most as many CTAs as the machine has.

        Raises:
            EmulationStopped: no lane can go on, or the budget of instructions is spent.
        """
        numbers = np.concatenate([ctas, np.repeat(ctas[-1:], self.ctas - len(ctas))])[self.cta_of_lane]
        self.cta_number[:] = numbers
        for axis, index in zip(
            "xyz", (numbers % grid[0], numbers // grid[0] % grid[1], numbers // (grid[0] * grid[1])), strict=True
        ):
            self.special[f"%ctaid.{axis}"][:] = index
        everyone: Mask = True if len(ctas) == self.ctas else self.cta_of_lane < len(ctas)
        self.live[:] = everyone
        self.shared.start()
        self.copy_groups.start()
        self.mbarriers.start()
        self.bulk.start()
        self.waiting.clear()
        self.local[:] = 0xFF
        for shadow in self.undefined:
            shadow[:] = True
        todo: dict[int, Mask] = {0: everyone}
        while todo or self.waiting or self.mbarriers.parked:
            if not todo:
                self._release(todo, stuck=True)
                continue
            number = min(todo)
            mask = todo.pop(number)
            block = blocks[number]
            for step in block.steps:
                step(mask)
            self.instructions += len(block.steps) + 1
            if self.instructions > budget:
                raise EmulationStopped(
                    f"more than {budget} instructions: does a loop not end? Raise budget= if it is only long"
                )
            for target, lanes in block.leave(mask):
                self._add(todo, target, lanes)
            if self.waiting or self.mbarriers.parked:
                self._release(todo)
        self.copy_groups.finish()
        self.bulk.finish()

    def _add(self, todo: dict[int, Mask], block: int, lanes: Mask) -> None:
        before = todo.get(block)
        if before is not None and lanes is not True:
            lanes = True if before is True else before | lanes
        count = self.lanes if lanes is True else np.count_nonzero(lanes)
        if count:
            # All lanes together again are True, which is the fast path.
            todo[block] = True if count == self.lanes else lanes

    def exit(self, lanes: Mask) -> None:
        """Lanes end."""
        if lanes is True:
            self.live[:] = False
        else:
            self.live &= ~lanes

    def wait(self, instruction: Instruction, barrier: int, count: int, lanes: Mask, block: int | None) -> None:
        """Park lanes at a barrier; ``block`` is where they go on, or None if they only arrive."""
        mask = np.ones(self.lanes, bool) if lanes is True else lanes
        self.waiting.append(Waiting(mask, block, instruction, barrier, count))

    def _release(self, todo: dict[int, Mask], *, stuck: bool = False) -> None:
        """Let those CTAs go on of which enough threads wait at one barrier; all, with a report, if nobody can."""
        freed = self.mbarriers.release(todo, self._add)
        for barrier in {entry.barrier for entry in self.waiting}:
            entries = [entry for entry in self.waiting if entry.barrier == barrier]
            here = np.logical_or.reduce([entry.mask for entry in entries]).reshape(self.ctas, self.threads)
            if entries[0].count == ALL_THREADS:
                complete = here.any(1) & (here == self.live.reshape(self.ctas, self.threads)).all(1)
            else:
                complete = here.sum(1) >= entries[0].count
            if not complete.any():
                continue
            freed = True
            lanes = complete[self.cta_of_lane]
            self._missed(entries[0], complete)
            self.shared.barrier(True if complete.all() else lanes)
            self._free(todo, entries, lanes)
        if stuck and not freed and not self.mbarriers.give_up(todo, self._add):
            entry = self.waiting[0]
            detail = f"{self.thread(int(np.flatnonzero(entry.mask)[0]))} waits for ever: too few threads come"
            self.findings.add(Kind.BARRIER, entry.instruction, int(entry.mask.sum()), detail)
            self._free(todo, list(self.waiting), np.ones(self.lanes, bool))

    def _missed(self, entry: Waiting, complete: Array) -> None:
        """Report threads that ended without coming to a barrier at which all threads of their CTA are due."""
        if entry.count != ALL_THREADS:
            return
        gone = ~self.live & complete[self.cta_of_lane]
        if gone.any():
            detail = f"{self.thread(int(np.flatnonzero(gone)[0]))} ended without coming to it"
            self.findings.add(Kind.BARRIER, entry.instruction, int(gone.sum()), detail)

    def _free(self, todo: dict[int, Mask], entries: list[Waiting], lanes: Array) -> None:
        for entry in entries:
            if entry.block is not None:
                self._add(todo, entry.block, entry.mask & lanes)
            entry.mask = entry.mask & ~lanes
        self.waiting = [entry for entry in self.waiting if entry.mask.any()]
