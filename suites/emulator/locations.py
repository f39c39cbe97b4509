"""Lines of the kernel's source, as ``.file`` and ``.loc`` give them (PTX ISA, 11.5)."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)(?:\s+\d+)?(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_FILE = re.compile(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"')


class Locations:
    """The place that the last ``.loc`` named.

    Attributes:
        place: such as ``kernel.py:57``, "" before the first.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self._files = {int(m[1]): m[2].rsplit("/", 1)[-1] for line in lines for m in [_FILE.match(line.strip())] if m}
        self.place = ""

    def note(self, line: str) -> None:
        """Take a line of the text; one that is no ``.loc`` changes nothing."""
        found = _LOC.match(line)
        if found is None:
            return
        file, row, outer, outer_row = found.groups()
        place = f"{self._files.get(int(file), '?')}:{row}"
        if outer is not None and outer != file:
            place = f"{self._files.get(int(outer), '?')}:{outer_row} (in {place})"
        # Line 0 marks code without a line of its own; the last one is the better hint.
        if row != "0":
            self.place = place
