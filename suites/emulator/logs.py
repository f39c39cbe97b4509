"""What was accessed since the last barrier."""

from __future__ import annotations

from typing import ClassVar

from mla_conformance.suites.emulator.accesses import Pattern
from mla_conformance.suites.emulator.types import Mask


class Log:
    """Patterns accessed and not yet ordered; a mask over lanes says for which threads each is still open.

    Attributes:
        state: a number that is equal only for equal contents, or None where that is not known. A pattern that was found
            to conflict with nothing in a state need not be checked against it again.
    """

    _states: ClassVar[dict[tuple[int, int], int]] = {}

    def __init__(self) -> None:
        self.open: dict[int, tuple[Pattern, Mask]] = {}
        self.state: int | None = 0

    def add(self, pattern: Pattern, lanes: Mask = True) -> None:
        """Note an access by those of the pattern's lanes that are in ``lanes``."""
        before = self.open.get(pattern.serial)
        if lanes is True:
            if before is None or before[1] is not True:
                self._turn(pattern.serial if before is None else None)
                self.open[pattern.serial] = pattern, True
            return
        self.open[pattern.serial] = pattern, lanes if before is None else before[1] is True or before[1] | lanes
        self._turn(None)

    def remove(self, pattern: Pattern) -> Mask | None:
        """Forget a pattern; returns for whom it was open, None if it was not there."""
        found = self.open.pop(pattern.serial, None)
        self._turn(~pattern.serial)
        return None if found is None else found[1]

    def clear(self) -> None:
        """Forget all."""
        self.open.clear()
        self.state = 0

    def close(self, lanes: Mask) -> None:
        """The threads of ``lanes`` passed a barrier."""
        if lanes is True:
            self.clear()
            return
        for serial, (pattern, still) in list(self.open.items()):
            left = ~lanes if still is True else still & ~lanes
            if left[pattern.lanes].any():
                self.open[serial] = pattern, left
            else:
                del self.open[serial]
        self._turn(None)

    def _turn(self, change: int | None) -> None:
        """Equal changes lead from equal states to equal states; a partial change (None) leads to no known one."""
        if not self.open and change is None:
            self.state = 0
        elif self.state is None or change is None:
            self.state = None
        else:
            self.state = self._states.setdefault((self.state, change), len(self._states) + 1)
