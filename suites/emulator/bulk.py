"""Bulk asynchronous copies under way: who may touch their shared memory (PTX ISA, 9.7.9.25.4 and 9.7.9.27).

A load belongs to a phase of an mbarrier. Its bytes land when the first thread has seen that phase complete, and a
thread may touch them once it has seen it too, or is ordered by a barrier after one that has. A store's source is read
until its own thread waits for its group; nobody may write there before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mla_conformance.suites.emulator.accesses import WARP, Pattern
from mla_conformance.suites.emulator.findings import Kind
from mla_conformance.suites.emulator.mbarriers import Barrier
from mla_conformance.suites.emulator.proxies import Unfenced
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, Mask

if TYPE_CHECKING:
    from mla_conformance.suites.emulator.machine import Machine

PIECE = 16
"""Bulk copies move whole pieces of so many bytes."""


@dataclass(eq=False)
class Load:
    """Copies of one instruction to one place, in several CTAs.

    Attributes:
        pattern: what they write.
        ctas: [n] their CTAs.
        phase: [n] the phase of ``barrier`` that each belongs to.
        data: [n, pieces, PIECE] what lands.
        landed: [n]
        unseen: [lanes] threads that may not touch the place yet.
    """

    pattern: Pattern
    ctas: Array
    barrier: Barrier
    phase: Array
    data: Array
    landed: Array
    unseen: Array


@dataclass(eq=False)
class Store:
    """The same in the other direction; ``group`` [n] is the number of the group, of its own thread."""

    pattern: Pattern
    lanes: Array
    group: Array
    left: Array
    """[n] which have not been waited for."""


class BulkCopies:
    """The bulk copies of a batch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.loads: list[Load] = []
        self.stores: list[Store] = []
        self.commits = np.zeros(machine.lanes, "i8")
        self.unfenced = Unfenced(machine)

    def start(self) -> None:
        """A new batch begins."""
        self.loads.clear()
        self.stores.clear()
        self.commits[:] = 0
        self.unfenced.start()

    def place(self, instruction: Instruction, lanes: Array, start: int, size: int) -> Pattern:
        """The pattern of ``size`` bytes from ``start`` on that each of the lanes copies, in its CTA."""
        shared = self.machine.shared
        mask = np.zeros(self.machine.lanes, bool)
        mask[lanes] = True
        key = np.array([start, size])
        found = shared.patterns.find(instruction, key, mask)
        if found is not None:
            return found
        pieces = size // PIECE
        starts = np.tile(start + PIECE * np.arange(pieces), len(lanes))
        owners = np.repeat(lanes, pieces)
        return shared.patterns.make(instruction, key, mask, owners, starts, PIECE, shared.base[owners])

    # ---- loads

    def load(self, pattern: Pattern, lanes: Array, barrier: Barrier, phase: Array, data: Array) -> None:
        """Copies begin: the place holds poison until they land."""
        machine = self.machine
        # The records of cp.async end a copy by its own thread's wait; here any thread's wait does.
        machine.shared.poison(pattern)
        if machine.shared.check:
            machine.shared.pending.remove(pattern)
        self.unfenced.copy(pattern, Kind.WRITE_AFTER_WRITE)
        ctas = machine.cta_of_lane[lanes]
        unseen = np.zeros(machine.ctas, bool)
        unseen[ctas] = True
        landed = np.zeros(len(lanes), bool)
        self.loads.append(Load(pattern, ctas, barrier, phase, data, landed, unseen[machine.cta_of_lane]))

    def observe(self, barrier: Barrier, lanes: Array) -> None:
        """Threads have seen the last complete phase of their CTA's ``barrier``, and with it those before."""
        if not len(lanes):
            return
        machine = self.machine
        ctas = machine.cta_of_lane[lanes]
        seeing = np.zeros(machine.ctas, bool)
        seeing[ctas] = True
        for load in self.loads:
            if load.barrier is not barrier:
                continue
            done = (
                (load.phase < barrier.phase[load.ctas]) & (load.phase >= barrier.first[load.ctas]) & seeing[load.ctas]
            )
            new = done & ~load.landed
            if new.any():
                rows = load.pattern.rows.reshape(len(load.ctas), -1)
                machine.shared.rows("u1", PIECE)[rows[new]] = load.data[new]
                load.landed |= new
            complete = np.zeros(machine.ctas, bool)
            complete[load.ctas[done]] = True
            load.unseen[lanes[complete[ctas]]] = False
        self._forget()

    def _forget(self) -> None:
        check = self.machine.shared.check
        self.loads = [load for load in self.loads if not load.landed.all() or (check and load.unseen.any())]

    def barrier(self, lanes: Mask) -> None:
        """Whole CTAs passed a barrier: what one thread of them had seen, all have."""
        self.unfenced.ordered(lanes)
        for load in self.loads:
            done = np.zeros(self.machine.ctas, bool)
            done[load.ctas[load.landed]] = True
            passing = done[self.machine.cta_of_lane]
            load.unseen[passing if lanes is True else passing & lanes] = False
        self._forget()

    def warp_barrier(self, lanes: Mask) -> None:
        """Whole warps passed ``bar.warp.sync``."""
        self.unfenced.ordered(lanes)
        for load in self.loads:
            seen = np.repeat((~load.unseen).reshape(-1, WARP).any(1), WARP)
            load.unseen[seen if lanes is True else seen & lanes] = False

    # ---- stores

    def store(self, pattern: Pattern, lanes: Array) -> None:
        """Stores from the place begin, in the group that their thread commits next."""
        self.unfenced.copy(pattern, Kind.READ_AFTER_WRITE)
        self.stores.append(Store(pattern, lanes, self.commits[lanes], np.ones(len(lanes), bool)))

    def commit(self, mask: Mask) -> None:
        """``cp.async.bulk.commit_group``."""
        self.commits += 1 if mask is True else mask

    def wait(self, mask: Mask, younger: int) -> None:
        """``cp.async.bulk.wait_group{.read}``: all but the ``younger`` youngest groups have read their source."""
        shared = self.machine.shared
        for store in self.stores:
            done = store.left & (store.group < self.commits[store.lanes] - younger)
            if mask is not True:
                done = done & mask[store.lanes]
            if done.any():
                store.left = store.left & ~done
                # To the other threads the source was read just now.
                reading = np.zeros(self.machine.lanes, bool)
                reading[store.lanes[done]] = True
                shared.reads.add(store.pattern, reading)
                shared.warp_reads.add(store.pattern, reading)
        self.stores = [store for store in self.stores if store.left.any()]

    # ---- records

    def check(self, pattern: Pattern, *, writes: bool) -> None:
        """Report an access to shared memory that a copy is using."""
        for load in self.loads:
            touching = self._touching(pattern, load.pattern)
            if touching is not None:
                early = touching[load.unseen[touching]]
                kind = Kind.PENDING_WRITE if writes else Kind.PENDING_READ
                self._report(kind, pattern, early, "has not waited for the mbarrier of", load.pattern.instruction)
        if not writes:
            return
        for store in self.stores:
            touching = self._touching(pattern, store.pattern)
            if touching is not None:
                busy = np.zeros(self.machine.ctas, bool)
                busy[self.machine.cta_of_lane[store.lanes[store.left]]] = True
                early = touching[busy[self.machine.cta_of_lane[touching]]]
                self._report(Kind.PENDING_WRITE, pattern, early, "writes over the source of", store.pattern.instruction)
        if pattern.instruction.parts[0] == "mbarrier":
            return
        if "bulk" not in pattern.instruction.parts:
            self.unfenced.wrote(pattern)
        for offset, barrier in self.machine.mbarriers.objects.items():
            if pattern.low < offset + PIECE // 2 and offset < pattern.high:
                touching = self._lanes(pattern, offset, offset + PIECE // 2)
                bad = touching[barrier.valid[self.machine.cta_of_lane[touching]]]
                if len(bad):
                    self.machine.mbarriers.report(
                        pattern.instruction, bad, f"writes over the mbarrier at shared byte {offset}"
                    )

    def _touching(self, mine: Pattern, theirs: Pattern) -> Array | None:
        if mine.low < theirs.high and theirs.low < mine.high:
            return self._lanes(mine, theirs.low, theirs.high)
        return None

    def _lanes(self, pattern: Pattern, low: int, high: int) -> Array:
        """Those of the pattern's lanes that touch bytes [low, high) of their CTA."""
        starts = pattern.rows * pattern.size % self.machine.shared.stride
        return pattern.lanes[(starts < high) & (starts + pattern.size > low)]

    def _report(self, kind: Kind, pattern: Pattern, lanes: Array, what: str, copy: Instruction) -> None:
        if len(lanes):
            detail = f"{self.machine.thread(int(lanes[0]))} {what} the copy at PTX line {copy.line} `{copy.text[:80]}`"
            self.machine.findings.add(kind, pattern.instruction, len(lanes), detail)

    def finish(self) -> None:
        """Report what nobody waited for before the batch ended."""
        add, thread = self.machine.findings.add, self.machine.thread
        for load in self.loads:
            if not load.landed.all():
                lane = int(load.ctas[~load.landed][0]) * self.machine.threads
                detail = f"{thread(lane)} and the rest of its CTA ended; nobody waited for the copy"
                add(Kind.PENDING_AT_EXIT, load.pattern.instruction, int((~load.landed).sum()), detail)
        for store in self.stores:
            detail = f"{thread(int(store.lanes[store.left][0]))} ended without waiting for its bulk group"
            add(Kind.PENDING_AT_EXIT, store.pattern.instruction, int(store.left.sum()), detail)
