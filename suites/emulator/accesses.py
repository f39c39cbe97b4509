"""Access patterns of shared memory, and whether two of them conflict.

A kernel's loop uses the same shared addresses again and again. So an access is *interned*: what can be said about it
once (bounds, alignment, which thread touches which cell) is kept in a :class:`Pattern`, and what can be said about a
pair of patterns (do they overlap, and between which threads) is computed once and remembered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, Mask

WARP = 32
KEPT = 24
"""Patterns kept for one instruction: more than the stages of any pipeline times the tiles of a stage."""


@dataclass(eq=False)
class Pattern:
    """Which lanes touch which bytes of their CTA's shared memory, ``size`` bytes each.

    Attributes:
        instruction: that made it.
        lanes: [n] the lanes that take part, faulty ones left out; int64.
        rows: [n] index of the accessed row in the batch's shared memory, in units of ``size`` bytes.
        cells: [m] the cells (records' grain) touched, sorted, each once.
        first, last: [m] the lowest and the highest lane that touches the cell.
        low, high: bytes [low, high) of a CTA's shared memory that hold all of it.
        serial: a number of its own.
        address, lead: the address register's bytes when it was made, and the first lane's number.
        mask: the active lanes then.
        initialised_in: the batch in which all its cells were last seen initialised.
        repeated: whether two lanes touch one cell.
        clean: states of the logs with which it was found to have no conflict.
        relations: by another pattern's serial, how the two overlap.
    """

    instruction: Instruction
    address: bytes
    lead: int
    mask: Mask
    lanes: Array
    rows: Array
    size: int
    cells: Array
    first: Array
    last: Array
    low: int
    high: int
    serial: int
    repeated: bool
    initialised_in: int = -1
    relations: dict[int, Relation | None] = field(default_factory=dict)
    clean: set[tuple[int | None, ...]] = field(default_factory=set)


@dataclass(frozen=True)
class Relation:
    """How pattern ``mine`` meets an earlier pattern ``theirs``: lanes of pairs that touch one cell.

    Attributes:
        cells: [k] the common cells.
        mine, theirs: [k] lanes on both sides, different where any two lanes are.
        apart: [k] whether the two belong to different warps.
        together: [k] whether they are different threads of one warp.
    """

    cells: Array
    mine: Array
    theirs: Array
    apart: Array
    together: Array


class Patterns:
    """Interns accesses.

    Args:
        grain: bytes of one cell: the smallest shared access of the kernel.
        stride: bytes between two CTAs of the batch.
    """

    def __init__(self, grain: int, stride: int) -> None:
        self.grain, self.stride = grain, stride
        self._by_instruction: dict[tuple[int, str], list[Pattern]] = {}
        self._next = 0
        self._turn = 0

    def find(self, instruction: Instruction, address: Array, mask: Mask) -> Pattern | None:
        """The pattern that this instruction made from equal addresses and an equal mask, if it is kept."""
        lead, key = address.item(0), None
        for pattern in self._by_instruction.get((instruction.line, instruction.text), ()):
            if pattern.lead != lead or (pattern.mask is True) != (mask is True):
                continue
            # Bytes compare several times faster than a NumPy comparison and its reduction.
            key = address.tobytes() if key is None else key
            if pattern.address == key and (mask is True or np.array_equal(mask, pattern.mask)):
                return pattern
        return None

    def make(
        self, instruction: Instruction, address: Array, mask: Mask, lanes: Array, starts: Array, size: int, base: Array
    ) -> Pattern:
        """Make and keep a pattern.

        Args:
            instruction: that accesses.
            address: [lanes] or one for all, what :meth:`find` compares with; copied.
            mask: likewise.
            lanes: [n] lanes that take part.
            starts: [n] byte offsets in their CTA's shared memory, multiples of ``size``.
            size: bytes that each accesses.
            base: [n] byte offset of their CTA in the batch's shared memory.
        """
        per = size // self.grain
        assert per, (size, self.grain)
        flat = ((starts + base) // self.grain)[:, None] + np.arange(per)
        owner = np.repeat(lanes, per)
        order = np.lexsort((owner, flat.ravel()))
        sorted_cells, sorted_owner = flat.ravel()[order], owner[order]
        cells, where = np.unique(sorted_cells, return_index=True)
        ends = np.append(where[1:], len(sorted_cells)) - 1
        first = sorted_owner[where] if len(cells) else cells
        last = sorted_owner[ends] if len(cells) else cells
        made = Pattern(
            instruction=instruction,
            address=address.tobytes(),
            lead=address.item(0),
            mask=mask if mask is True else mask.copy(),
            lanes=lanes,
            rows=(starts + base) // size,
            size=size,
            cells=cells,
            first=first,
            last=last,
            low=int(starts.min()) if len(starts) else 0,
            high=int(starts.max()) + size if len(starts) else 0,
            serial=self._next,
            repeated=bool((first != last).any()),
        )
        self._next += 1
        kept = self._by_instruction.setdefault((instruction.line, instruction.text), [])
        if len(kept) < KEPT:
            kept.append(made)
        else:
            self._turn += 1
            kept[self._turn % KEPT] = made
        return made

    def forget(self, pattern: Pattern) -> None:
        """Do not keep a pattern, so that its faults are reported each time."""
        self._by_instruction[pattern.instruction.line, pattern.instruction.text].remove(pattern)


def relation(mine: Pattern, theirs: Pattern) -> Relation | None:
    """How ``mine`` meets ``theirs``, or None if they share no cell; remembered in ``mine``."""
    if theirs.serial in mine.relations:
        return mine.relations[theirs.serial]
    found = None
    if mine.low < theirs.high and theirs.low < mine.high:
        cells, i, j = np.intersect1d(mine.cells, theirs.cells, assume_unique=True, return_indices=True)
        if len(cells):
            found = _relation(cells, mine.first[i], mine.last[i], theirs.first[j], theirs.last[j])
    mine.relations[theirs.serial] = found
    return found


def _relation(cells: Array, first: Array, last: Array, other_first: Array, other_last: Array) -> Relation:
    # One pair of lanes a cell stands for all: in different warps if any two are, else different if any two are.
    warps = [side // WARP for side in (first, last, other_first, other_last)]
    apart = (warps[0] != warps[2]) | (warps[0] != warps[3]) | (warps[1] != warps[2])
    same = (first == last) & (first == other_first) & (first == other_last)
    mine = np.where(warps[1] != warps[2], last, first)
    theirs = np.where(warps[0] != warps[3], other_last, other_first)
    theirs = np.where((mine == theirs) & ~same, np.where(other_last != mine, other_last, other_first), theirs)
    mine = np.where((mine == theirs) & ~same, last, mine)
    return Relation(cells, mine, theirs, apart, ~apart & ~same)
