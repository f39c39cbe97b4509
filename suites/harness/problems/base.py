"""What every problem is: fields with literal values, printable as one line that rebuilds it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

DTYPES = ("bfloat16", "float16", "float32")
POISONS = ("nan", "inf", "huge")
LAYOUTS = ("dense", "gapped")


@dataclass(frozen=True, repr=False)
class Problem:
    """One input of one operation.

    ``str()`` gives a line that :func:`parse_problem` turns back into an equal problem.
    """

    operation: ClassVar[str]
    """The operation that it is a problem of: the method of an implementation that takes its case."""

    @property
    def products(self) -> int:
        """About how many multiplications it takes: what a slow lane judges it by."""
        raise NotImplementedError

    @property
    def dtypes(self) -> set[str]:
        """Names of the dtypes that kernels compute with."""
        raise NotImplementedError

    @property
    def rewrites(self) -> bool:
        """Whether programs may write one address twice, with equal values, so that their order does not matter."""
        return False

    def replace(self, **changes: Any) -> Self:
        """Return a copy with ``changes`` applied."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        shown = [
            f"{field.name}={_literal(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    __repr__ = __str__


def check_listed(problem: Problem, **allowed: tuple[str, ...]) -> None:
    """Raise ValueError for a field whose value is not among those allowed."""
    for name, values in allowed.items():
        if getattr(problem, name) not in values:
            raise ValueError(f"{name}={getattr(problem, name)!r} is not one of {', '.join(values)}")


def check_integers(problem: Problem, **least: int) -> None:
    """Raise ValueError for a field that is no integer of at least so much."""
    for name, smallest in least.items():
        if not is_integer(getattr(problem, name), smallest):
            raise ValueError(f"{name}={getattr(problem, name)!r} must be an integer of at least {smallest}")


def is_integer(value: object, least: int) -> bool:
    """Whether it is an integer (no bool) of at least so much."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_positive(value: object) -> bool:
    """Whether it is a finite positive number (no bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and math.isfinite(value)


def _literal(value: object) -> str:
    """A Python literal with double quotes, so that a shell can hold the line in single ones."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"
    return f'"{value}"' if isinstance(value, str) else repr(value)
