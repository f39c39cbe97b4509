"""Scopes of a PTX body: inline assembly opens them with braces, and repeats names in each (PTX ISA, 4.1 and 5.3)."""

from __future__ import annotations

import re
from collections.abc import Iterator

_WORD = re.compile(r"[%$A-Za-z_][\w$]*")
Path = tuple[int, ...]
"""The numbers of the open scopes inside the entry's own, outermost first."""


class Scopes:
    """The open scopes; a name declared in one hides the outer one."""

    def __init__(self) -> None:
        self._names: list[dict[str, str]] = [{}]
        self._opened = 0
        self.path: Path = ()

    def brace(self, brace: str) -> bool:
        """Open or close a scope; whether the entry's own is still open."""
        if brace == "{":
            self._names.append({})
            self._opened += 1
            self.path = (*self.path, self._opened)
        else:
            self._names.pop()
            self.path = self.path[:-1]
        return bool(self._names)

    def declare(self, name: str) -> str:
        """The name, unique in the entry, of a register declared in the innermost scope."""
        inner = f"{name}.{self.path[-1]}."
        self._names[-1][name] = inner
        return inner

    def rename(self, operand: str) -> str:
        """An operand with the unique names of registers."""
        if not self.path:
            return operand
        names = {name: inner for scope in self._names for name, inner in scope.items()}
        return _WORD.sub(lambda word: names.get(word[0], word[0]), operand) if names else operand

    @staticmethod
    def label(name: str, path: Path) -> str:
        """The unique name of a label that stands in the scope ``path``."""
        return f"{name}.{path[-1]}" if path else name

    @classmethod
    def meanings(cls, name: str, path: Path) -> Iterator[str]:
        """What a branch in the scope ``path`` may mean by a label, innermost first."""
        return (cls.label(name, path[:depth]) for depth in range(len(path), -1, -1))
