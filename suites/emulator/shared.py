"""Shared memory of a batch of CTAs, with the records that tell races, early reads and uninitialised reads.

The rule (PTX ISA, 8 Memory consistency model; 9.7.13 barriers): two accesses of one cell by different threads, one of
them a write, must be ordered by a barrier of the CTA, or by ``bar.warp.sync`` if both threads are of one warp. Lanes
run in lockstep here, so a missing barrier never changes a value: only these records see it.

What was accessed since the last barrier is kept as a log of patterns. A barrier that all CTAs of the batch reach
empties it; one that some reach closes the entries for those CTAs only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mla_conformance.suites.emulator.accesses import WARP, Pattern, Patterns, Relation, relation
from mla_conformance.suites.emulator.findings import Findings, Kind
from mla_conformance.suites.emulator.logs import Log
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, Mask, whole

if TYPE_CHECKING:
    from mla_conformance.suites.emulator.bulk import BulkCopies

ROW = 16
"""The widest access, in bytes."""
_POISON = 0xFF
"""What a copy's destination holds until the copy is waited for: NaN in every float format."""


class SharedMemory:
    """One CTA after the other, ``stride`` bytes apart.

    Args:
        size: bytes that the launch gives each CTA.
        threads, ctas: threads of a CTA, CTAs of the batch.
        grain: bytes of the smallest shared access of the kernel.
        warp_barriers: whether the kernel has any; without them threads of one warp are ordered as all others are.
        check: False leaves out the records (bounds and alignment are always checked).
    """

    def __init__(
        self,
        size: int,
        threads: int,
        ctas: int,
        grain: int,
        findings: Findings,
        *,
        warp_barriers: bool = True,
        check: bool = True,
    ) -> None:
        self.size, self.findings, self.check = size, findings, check
        self.stride = max(ROW, -(-size // ROW) * ROW)
        self.data = np.zeros(self.stride * ctas, "u1")
        self.base = np.arange(threads * ctas) // threads * self.stride
        self.patterns = Patterns(grain, self.stride)
        self.grain = grain
        self.initialised = np.zeros(len(self.data) // grain, bool)
        self.writes, self.reads, self.atomics = Log(), Log(), Log()
        self.warp_writes, self.warp_reads, self.warp_atomics = self.writes, self.reads, self.atomics
        if warp_barriers:
            self.warp_writes, self.warp_reads, self.warp_atomics = Log(), Log(), Log()
        self.pending = Log()
        self.batch = 0
        self._views: dict[tuple[str, int], Array] = {}
        self.bulk: BulkCopies | None = None
        """Checks accesses against bulk copies; set by the machine."""

    def start(self) -> None:
        """A new batch of CTAs begins: nothing is initialised, nothing is recorded."""
        self.batch += 1
        self.initialised[:] = False
        for log in (*self._ordered_by_cta(), self.pending):
            log.clear()

    def rows(self, dtype: str, count: int) -> Array:
        """The bytes as rows of ``count`` elements."""
        key = dtype, count
        if key not in self._views:
            self._views[key] = self.data.view(dtype).reshape(-1, count)
        return self._views[key]

    def _put(self, rows: Array, values: Array) -> None:
        """Write ``values`` [n, k] to rows of their size."""
        dtype = whole(values.dtype.itemsize * values.shape[1])
        self.rows(dtype, 1)[rows, 0] = np.ascontiguousarray(values).view(dtype)[:, 0]

    def pattern(self, instruction: Instruction, address: Array, offset: int, size: int, mask: Mask) -> Pattern:
        """The pattern of an access of ``size`` bytes at ``address + offset`` by the lanes of ``mask``.

        Lanes out of bounds or misaligned are reported, each time, and left out.
        """
        found = self.patterns.find(instruction, address, mask)
        if found is None:
            found = self._make(instruction, address, offset, size, mask)
        return found

    def _make(self, instruction: Instruction, address: Array, offset: int, size: int, mask: Mask) -> Pattern:
        lanes = np.arange(len(self.base)) if mask is True else np.flatnonzero(mask)
        # A 32-bit register holds a window offset; sums wrap as the hardware's do not, so a negative one stays one.
        starts = address[lanes].astype("i8") + offset
        outside = (starts < 0) | (starts + size > self.size)
        crooked = ~outside & (starts % size != 0)
        for bad, kind, expected in (
            (outside, Kind.SHARED_BOUNDS, f"the CTA has {self.size} bytes"),
            (crooked, Kind.MISALIGNED, f"expected a multiple of {size}"),
        ):
            if bad.any():
                first = np.flatnonzero(bad)[0]
                thread = self.findings.thread(int(lanes[first]))
                detail = f"{thread} accesses {size} byte(s) at shared byte {starts[first]}; {expected}"
                self.findings.add(kind, instruction, int(bad.sum()), detail)
        good = ~(outside | crooked)
        faulty = not good.all()
        made = self.patterns.make(instruction, address, mask, lanes[good], starts[good], size, self.base[lanes[good]])
        if faulty:
            self.patterns.forget(made)
        return made

    # ---- accesses

    def read(self, pattern: Pattern, dtype: str, count: int) -> Array:
        """Rows [n, count] that the pattern's lanes read, recorded."""
        if self.check:
            self._check_read(pattern)
        return self.rows(dtype, count).take(pattern.rows, 0)

    def write(self, pattern: Pattern, values: Array) -> None:
        """Write rows [n, count], recorded."""
        if self.check:
            self._check_write(pattern)
        self._put(pattern.rows, values)
        if self.check and pattern.repeated:
            # As bytes: a NaN equals itself here, and zeros of either sign do not.
            self._check_equal(pattern, self.rows("u1", pattern.size), np.ascontiguousarray(values).view("u1"))

    def atomic(self, pattern: Pattern) -> None:
        """Record an atomic access: in order with other atomics, but not with plain reads and writes."""
        if not self.check:
            return
        if self.bulk is not None:
            self.bulk.check(pattern, writes=False)
        if pattern.initialised_in != self.batch:
            self._check_initialised(pattern)
        self._check_pending(pattern, Kind.PENDING_WRITE)
        self._check_order(pattern, Kind.WRITE_AFTER_WRITE, self.writes, self.warp_writes)
        self._check_order(pattern, Kind.WRITE_AFTER_READ, self.reads, self.warp_reads)
        self.atomics.add(pattern)
        self.warp_atomics.add(pattern)

    def poison(self, pattern: Pattern, values: Array | None = None) -> None:
        """An asynchronous copy into the pattern begins: until it is waited for, nobody may touch it.

        Args:
            pattern: where the copy goes.
            values: [n, size] bytes that each lane copies; lanes that copy different ones to one place are reported.
        """
        if self.check and pattern.repeated and values is not None:
            self._put(pattern.rows, values)
            self._check_equal(pattern, self.rows("u1", pattern.size), values)
        if self.check:
            self._check_write(pattern, landed=False)
            self.pending.add(pattern)
        self._put(pattern.rows, np.full((len(pattern.rows), pattern.size), _POISON, "u1"))

    def land(self, pattern: Pattern, values: Array, lanes: Mask) -> None:
        """``lanes`` waited for their copies into ``pattern``: to the others that is a write of just now.

        Args:
            pattern: where the copy goes.
            values: [n, size] bytes, a row for each of the pattern's lanes.
            lanes: which of them waited.
        """
        chosen = slice(None) if lanes is True else np.flatnonzero(lanes[pattern.lanes])
        self._put(pattern.rows[chosen], values[chosen])
        if self.check:
            before = self.pending.remove(pattern)
            left = None if before is None or lanes is True else ~lanes if before is True else before & ~lanes
            if left is not None and left[pattern.lanes].any():
                self.pending.add(pattern, left)
            self._record_write(pattern, lanes)

    def barrier(self, lanes: Mask) -> None:
        """Whole CTAs passed a barrier."""
        if self.bulk is not None:
            self.bulk.barrier(lanes)
        for log in self._ordered_by_cta():
            log.close(lanes)

    def warp_barrier(self, lanes: Mask) -> None:
        """Whole warps passed ``bar.warp.sync``."""
        if self.bulk is not None:
            self.bulk.warp_barrier(lanes)
        for log in (self.warp_writes, self.warp_reads, self.warp_atomics):
            log.close(lanes)

    def _ordered_by_cta(self) -> tuple[Log, ...]:
        return self.writes, self.reads, self.atomics, self.warp_writes, self.warp_reads, self.warp_atomics

    # ---- records

    def _record_write(self, pattern: Pattern, lanes: Mask = True) -> None:
        self.writes.add(pattern, lanes)
        self.warp_writes.add(pattern, lanes)
        if lanes is not True:
            self.initialised[pattern.cells] = True
        elif pattern.initialised_in != self.batch:
            self._initialise(pattern)

    def _check_initialised(self, pattern: Pattern) -> None:
        known = self.initialised[pattern.cells]
        if known.all():
            pattern.initialised_in = self.batch
        else:
            cells = pattern.cells[~known]
            self._report(Kind.UNINITIALISED_SHARED, pattern, pattern.first[~known], cells, "nothing wrote it")

    def _check_read(self, pattern: Pattern) -> None:
        if self.bulk is not None:
            self.bulk.check(pattern, writes=False)
        if pattern.initialised_in != self.batch:
            self._check_initialised(pattern)
        states = (
            self.pending.state,
            self.writes.state,
            self.atomics.state,
            self.warp_writes.state,
            self.warp_atomics.state,
        )
        if states not in pattern.clean:
            before = self.findings.total
            self._check_pending(pattern, Kind.PENDING_READ)
            self._check_order(pattern, Kind.READ_AFTER_WRITE, self.writes, self.warp_writes)
            self._check_order(pattern, Kind.READ_AFTER_WRITE, self.atomics, self.warp_atomics)
            self._remember(pattern, states, before)
        self.reads.add(pattern)
        self.warp_reads.add(pattern)

    def _check_write(self, pattern: Pattern, *, landed: bool = True) -> None:
        if self.bulk is not None:
            self.bulk.check(pattern, writes=True)
        states = (self.pending.state, *(log.state for log in self._ordered_by_cta()))
        if states not in pattern.clean:
            before = self.findings.total
            self._check_pending(pattern, Kind.PENDING_WRITE)
            self._check_order(pattern, Kind.WRITE_AFTER_WRITE, self.writes, self.warp_writes)
            self._check_order(pattern, Kind.WRITE_AFTER_READ, self.reads, self.warp_reads)
            self._check_order(pattern, Kind.WRITE_AFTER_WRITE, self.atomics, self.warp_atomics)
            self._remember(pattern, states, before)
        if landed:
            self._record_write(pattern)
        elif pattern.initialised_in != self.batch:
            self._initialise(pattern)

    def _remember(self, pattern: Pattern, states: tuple[int | None, ...], before: int) -> None:
        if None not in states and self.findings.total == before:
            pattern.clean.add(states)

    def _initialise(self, pattern: Pattern) -> None:
        self.initialised[pattern.cells] = True
        pattern.initialised_in = self.batch

    def _check_pending(self, pattern: Pattern, kind: Kind) -> None:
        for other, still in self.pending.open.values():
            met = relation(pattern, other)
            if met is None:
                continue
            early = np.ones(len(met.cells), bool) if still is True else still[met.theirs]
            if early.any():
                copy = f"the copy: {_place(other.instruction)}"
                self._report(kind, pattern, met.mine[early], met.cells[early], copy)

    def _check_order(self, pattern: Pattern, kind: Kind, log: Log, warp_log: Log) -> None:
        for other, still in log.open.values():
            met = relation(pattern, other)
            if met is not None:
                self._judge(pattern, kind, other, met, met.apart, still)
        for other, still in warp_log.open.values():
            met = relation(pattern, other)
            if met is not None:
                self._judge(pattern, kind, other, met, met.together, still)

    def _judge(self, pattern: Pattern, kind: Kind, other: Pattern, met: Relation, bad: Array, still: Mask) -> None:
        if still is not True:
            bad = bad & still[met.theirs]
        if bad.any():
            first = int(np.flatnonzero(bad)[0])
            scope = "its own warp" if met.mine[first] // WARP == met.theirs[first] // WARP else "another warp"
            there = f"{self.findings.thread(int(met.theirs[first]))} of {scope}: {_place(other.instruction)}"
            self._report(kind, pattern, met.mine[bad], met.cells[bad], there)

    def _check_equal(self, pattern: Pattern, view: Array, values: Array) -> None:
        differ = (view.take(pattern.rows, 0) != values).any(1)
        if differ.any():
            lanes = pattern.lanes[differ]
            byte = int(pattern.rows[differ][0] * pattern.size) % self.stride
            detail = f"{self.findings.thread(int(lanes[0]))} and another lane, shared byte {byte}"
            self.findings.add(Kind.UNEQUAL_LANES, pattern.instruction, len(lanes), detail)

    def _report(self, kind: Kind, pattern: Pattern, lanes: Array, cells: Array, other: str) -> None:
        byte = int(cells[0]) * self.grain % self.stride
        detail = f"{self.findings.thread(int(lanes[0]))}, shared byte {byte}; {other}"
        self.findings.add(kind, pattern.instruction, len(lanes), detail)


def _place(instruction: Instruction) -> str:
    place = f"{instruction.source}, " if instruction.source else ""
    return f"{place}PTX line {instruction.line} `{instruction.text[:80]}`"
