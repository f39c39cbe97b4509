"""Runs of the emulator judged by the oracle: every shared access of a run is passed on to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from mla_conformance.suites.emulator.accesses import Pattern
from mla_conformance.suites.emulator.shared import SharedMemory
from mla_conformance.suites.emulator.types import Mask

from .oracle import WARP, Access, Found, Oracle


@dataclass
class Judged:
    """What the oracle found in the runs, and how many accesses it saw."""

    faults: Found = field(default_factory=set)
    accesses: int = 0


@contextmanager
def judged() -> Iterator[Judged]:
    """Pass what happens to shared memory inside on to oracles, one a CTA; emulator lanes count as threads."""
    made = Judged()
    oracles: defaultdict[int, Oracle] = defaultdict(lambda: Oracle(made.faults))

    def spied(name: str, tell: Any) -> Any:
        original = getattr(SharedMemory, name)

        def method(memory: SharedMemory, *args: Any) -> Any:
            tell(memory, *args)
            return original(memory, *args)

        return patch.object(SharedMemory, name, method)

    def by_cta(memory: SharedMemory, pattern: Pattern, lanes: Mask = True) -> dict[int, list[Access]]:
        # Every access is a whole number of grains, so a grain may stand for a byte.
        cells = pattern.size // memory.grain
        per_cta = len(memory.base) // (len(memory.data) // memory.stride)
        groups: defaultdict[int, list[Access]] = defaultdict(list)
        for lane, row in zip(pattern.lanes.tolist(), pattern.rows.tolist(), strict=True):
            if lanes is True or lanes[lane]:
                groups[lane // per_cta].append((lane, row * cells, cells))
        return groups

    def access(method: str) -> Any:
        def tell(memory: SharedMemory, pattern: Pattern, *_: Any) -> None:
            for cta, accesses in by_cta(memory, pattern).items():
                made.accesses += len(accesses)
                getattr(oracles[cta], method)(pattern.instruction.line, accesses)

        return tell

    def land(memory: SharedMemory, pattern: Pattern, values: Any, lanes: Mask) -> None:
        for cta, accesses in by_cta(memory, pattern, lanes).items():
            oracles[cta].land(accesses)

    def barrier(memory: SharedMemory, lanes: Mask) -> None:
        ctas = len(memory.data) // memory.stride
        passed = np.ones(ctas, bool) if lanes is True else lanes.reshape(ctas, -1).all(1)
        for cta in np.flatnonzero(passed).tolist():
            oracles[cta].barrier()

    def warp_barrier(memory: SharedMemory, lanes: Mask) -> None:
        warps = np.arange(len(memory.base) // WARP) if lanes is True else np.flatnonzero(lanes.reshape(-1, WARP).all(1))
        for warp in warps.tolist():
            for oracle in oracles.values():
                oracle.warp_barrier(warp)

    told = {"read": access("read"), "write": access("write"), "atomic": access("atomic"), "poison": access("issue")}
    with ExitStack() as stack:
        for name, tell in {**told, "land": land, "barrier": barrier, "warp_barrier": warp_barrier}.items():
            stack.enter_context(spied(name, tell))
        stack.enter_context(spied("start", lambda memory: oracles.clear()))
        yield made
