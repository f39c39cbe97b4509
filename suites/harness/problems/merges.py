"""The problems of merging attention states: two of the same queries, or those of all context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.suites.harness.problems.base import (
    DTYPES,
    LAYOUTS,
    POISONS,
    Problem,
    check_integers,
    check_listed,
)

STATES_LAYOUTS = (*LAYOUTS, "unequal", "halves", "far")
SHARDS_LAYOUTS = (*LAYOUTS, "far")
LSE_LAYOUTS = ("rows", "transposed")
VALUES = ("normal", "constant", "extreme", "large")
EMPTY = ("none", "first", "second", "one", "all", "mixed")
EMPTY_LSES = ("-inf", "inf", "both")
EMPTY_OUTS = ("poison", "zero")
ROW_COST = 1000
"""Products that take as long as a program of one row, in lanes that run a program at a time."""


@dataclass(frozen=True, repr=False)
class _MergeProblem(Problem):
    """What both merges have.

    Args:
        tokens: query tokens; 0 is allowed.
        heads: heads of the outputs.
        width: elements of an output row.
        dtype: dtype of the outputs; log-sum-exps are float32.
        values: ``normal`` (log-sum-exps within a few units of each other); ``constant`` (state i stands for so many
            keys of one score and value that its log-sum-exp is ``score + ln(keys)``); ``extreme`` (log-sum-exps up to
            10,000 of both signs, 88 and more apart); ``large`` (outputs of three quarters of the largest number, about
            equally weighted).
        empty: which states are empty: ``none``, ``first``, ``second``; ``one`` (of each row another); ``all``;
            ``mixed`` (row by row: none, one, another, all).
        empty_lse: log-sum-exp of an empty state: ``-inf``, ``inf``, or either (``both``).
        empty_out: output of an empty state: ``poison``, as of a kernel that leaves it unwritten, or ``zero``.
        layout: ``dense``; ``gapped`` (odd strides and gaps in every tensor); ``far`` (tokens, or shards, more than
            2**30 elements apart); of two states also ``unequal`` (heads of the second lie further apart) and
            ``halves`` (both outputs are halves of one tensor).
        lse_layout: ``rows`` (heads are neighbours) or ``transposed`` (tokens are: a view of [heads, tokens]).
        poison: what fills memory that must not matter.
        seed: seed of every drawn number.
    """

    tokens: int = 5
    heads: int = 3
    width: int = 32
    dtype: str = "bfloat16"
    values: str = "normal"
    empty: str = "none"
    empty_lse: str = "-inf"
    empty_out: str = "poison"
    layout: str = "dense"
    lse_layout: str = "rows"
    poison: str = "nan"
    seed: int = 0

    layouts: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        check_listed(self, dtype=DTYPES, values=VALUES, empty=EMPTY, empty_lse=EMPTY_LSES)
        check_listed(self, empty_out=EMPTY_OUTS)
        check_listed(self, layout=self.layouts, lse_layout=LSE_LAYOUTS, poison=POISONS)
        check_integers(self, tokens=0, heads=1, width=1)

    @property
    def states(self) -> int:
        """How many states there are to merge."""
        raise NotImplementedError

    @property
    def products(self) -> int:
        """One product an element of each state; a row costs as much as many elements, however short it is."""
        return self.states * self.tokens * self.heads * max(self.width, ROW_COST)

    @property
    def dtypes(self) -> set[str]:
        """Dtypes that kernels compute with."""
        return {self.dtype, "float32"}


@dataclass(frozen=True, repr=False)
class MergeStatesProblem(_MergeProblem):
    """One merge of two states; fields as above.

    Args:
        in_place: the result goes where the first state is.
    """

    in_place: bool = False

    operation: ClassVar[str] = "merge_states"
    layouts: ClassVar[tuple[str, ...]] = STATES_LAYOUTS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.in_place, bool):
            raise ValueError(f"in_place={self.in_place!r} must be True or False")
        if self.in_place and self.layout == "halves":
            raise ValueError("in_place=True needs a first output with memory of its own, not layout='halves'")

    @property
    def states(self) -> int:
        """Two."""
        return 2


@dataclass(frozen=True, repr=False)
class MergeShardsProblem(_MergeProblem):
    """One merge of the states of all context-parallel ranks; fields as above.

    Args:
        shards: ranks, each with a state of its own.
    """

    shards: int = 4

    operation: ClassVar[str] = "merge_shards"
    layouts: ClassVar[tuple[str, ...]] = SHARDS_LAYOUTS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, shards=1)

    @property
    def states(self) -> int:
        """One a shard."""
        return self.shards
