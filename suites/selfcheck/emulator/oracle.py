"""The rules of shared memory by definition: every access of every byte is kept, with its thread.

Slow and plain on purpose, and it shares no code with the emulator's records, which it judges.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, TypeAlias

from mla_conformance.suites.emulator import Kind

WARP = 32
Access: TypeAlias = tuple[int, int, int]
"""A thread, its first byte and its number of bytes."""
Found: TypeAlias = set[tuple[Kind, Any]]


class Oracle:
    """The shared memory of one CTA.

    Two accesses of one byte by two threads conflict if neither a barrier of the CTA nor, for two threads of one warp,
    a barrier of that warp lies between them, and if one of them writes; atomic accesses do not conflict with each
    other. A byte is pending from the issue of a copy into it until the copy lands, which is a write by its thread.

    Attributes:
        found: pairs of a kind and whatever the caller names its instructions by.
    """

    def __init__(self, found: Found | None = None) -> None:
        self.found: Found = set() if found is None else found
        self.past: defaultdict[int, set[tuple[int, int, str]]] = defaultdict(set)
        self.epochs: Counter[int] = Counter()
        self.initialised: set[int] = set()
        self.pending: Counter[int] = Counter()

    def read(self, where: Any, accesses: Iterable[Access]) -> None:
        """Threads read at once."""
        self._access(where, list(accesses), "read")

    def write(self, where: Any, accesses: Iterable[Access]) -> None:
        """Threads write at once."""
        self._access(where, list(accesses), "write")

    def atomic(self, where: Any, accesses: Iterable[Access]) -> None:
        """Threads read and write atomically."""
        self._access(where, list(accesses), "atomic")

    def issue(self, where: Any, accesses: Iterable[Access]) -> None:
        """Threads begin copies into their bytes."""
        accesses = list(accesses)
        self._judge(where, accesses, "write")
        for _, start, size in accesses:
            self.initialised.update(range(start, start + size))
            self.pending.update(range(start, start + size))

    def land(self, accesses: Iterable[Access]) -> None:
        """Copies that threads began have landed, as their threads know now."""
        for thread, start, size in accesses:
            self.pending.subtract(range(start, start + size))
            self._note(thread, start, size, "write")

    def barrier(self) -> None:
        """All threads of the CTA met."""
        self.past.clear()

    def warp_barrier(self, warp: int) -> None:
        """The threads of a warp met."""
        self.epochs[warp] += 1

    def _access(self, where: Any, accesses: list[Access], what: str) -> None:
        if what != "write" and any(
            byte not in self.initialised for _, start, size in accesses for byte in range(start, start + size)
        ):
            self.found.add((Kind.UNINITIALISED_SHARED, where))
        self._judge(where, accesses, what)
        for thread, start, size in accesses:
            self._note(thread, start, size, what)

    def _note(self, thread: int, start: int, size: int, what: str) -> None:
        for byte in range(start, start + size):
            self.past[byte].add((thread, self.epochs[thread // WARP], what))
            if what == "write":
                self.initialised.add(byte)

    def _judge(self, where: Any, accesses: list[Access], what: str) -> None:
        for thread, start, size in accesses:
            for byte in range(start, start + size):
                if self.pending[byte] > 0:
                    self.found.add((Kind.PENDING_READ if what == "read" else Kind.PENDING_WRITE, where))
                for other, epoch, earlier in self.past.get(byte, ()):
                    kind = _conflict(earlier, what)
                    if kind and other != thread and not self._ordered(thread, other, epoch):
                        self.found.add((kind, where))

    def _ordered(self, thread: int, other: int, epoch: int) -> bool:
        """Whether the two are of one warp, and it met after the other's access."""
        return thread // WARP == other // WARP and self.epochs[other // WARP] > epoch


def _conflict(earlier: str, now: str) -> Kind | None:
    if earlier == now != "write":
        return None
    if now == "read":
        return Kind.READ_AFTER_WRITE
    return Kind.WRITE_AFTER_READ if earlier == "read" else Kind.WRITE_AFTER_WRITE
