"""Findings: what a run did that it must not do, in words that a kernel author can act on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy.typing as npt

from mla_conformance.suites.emulator.ptx import Instruction

Array = npt.NDArray[Any]


class Kind(StrEnum):
    """What can be found; ``docs/emulator.md`` says of each what it means and what usually cures it."""

    GLOBAL_BOUNDS = "global access out of bounds"
    SHARED_BOUNDS = "shared access out of bounds"
    LOCAL_BOUNDS = "local access out of bounds"
    MISALIGNED = "misaligned access"
    UNINITIALISED_SHARED = "read of uninitialised shared memory"
    UNINITIALISED_REGISTER = "use of an uninitialised register"
    PENDING_READ = "read of shared memory before the copy into it was waited for"
    PENDING_WRITE = "write over a copy that is still under way"
    PENDING_AT_EXIT = "copies still under way at exit"
    READ_AFTER_WRITE = "race: read after write without a barrier"
    WRITE_AFTER_READ = "race: write after read without a barrier"
    WRITE_AFTER_WRITE = "race: write after write without a barrier"
    UNEQUAL_LANES = "race: lanes of one instruction store different values to one address"
    TWO_CTAS = "race: two CTAs write one global address"
    BARRIER = "barrier that some threads never reach"
    DIVERGED = "warp-wide instruction with lanes missing"
    MBARRIER = "mbarrier misuse"
    TRAP = "trap"
    SHARED_LIMIT = "shared memory over the target's limit"


@dataclass
class Finding:
    """One kind of fault at one instruction.

    Args:
        kind: what happened.
        line: PTX line, 0 if it belongs to the launch.
        text: the instruction.
        source: the kernel's own line, such as ``kernel.py:57``, where the PTX says it.
        detail: of the first occurrence: thread, address, what was expected.
        count: how many did it, over the whole launch: lanes, or cells of shared memory for each earlier access that
            they conflict with.
    """

    kind: Kind
    line: int
    text: str
    source: str
    detail: str
    count: int = 0

    def __str__(self) -> str:
        place = f"{self.source}, PTX line {self.line}: `{self.text}`" if self.line else self.text
        return (
            ": ".join(part for part in (str(self.kind), place.lstrip(", "), self.detail) if part) + f" ({self.count} x)"
        )


class Findings:
    """The findings of one launch, one for each kind and instruction."""

    def __init__(self) -> None:
        self._found: dict[tuple[Kind, int], Finding] = {}
        self.total = 0
        self.thread: Callable[[int], str] = "lane {}".format
        """How a lane of the batch is called in messages."""

    def add(self, kind: Kind, instruction: Instruction | None, count: int, detail: str) -> None:
        """Note ``count`` lanes; the detail of the first occurrence is kept."""
        line = instruction.line if instruction else 0
        found = self._found.get((kind, line))
        if found is None:
            text = instruction.text if instruction else ""
            source = instruction.source if instruction else ""
            found = self._found[kind, line] = Finding(kind, line, text, source, detail)
        found.count += count
        self.total += count

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def clear(self) -> None:
        """Forget them."""
        self._found.clear()
