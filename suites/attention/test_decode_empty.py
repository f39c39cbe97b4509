"""Requests without tokens: padding rows of a captured graph are such."""

import pytest

from mla_conformance.suites.harness.cases import subset
from mla_conformance.suites.harness.drawing import listed
from mla_conformance.suites.harness.judge import check_empty_rows, check_equal_bits, check_output
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MLADecodeProblem(lengths=(5, 0, 37, 0))


@pytest.mark.requirement("MLA-DEC-07")
@listed(
    BASE,
    num_splits=[1, 4],
    heads=[1, 20],
    dtype=["float16", "bfloat16"],
    cache_dtype=["float8_e4m3fn"],
    lengths=[(0,), (0, 0, 9)],
)
def test_length_zero_gives_zero_and_minus_infinity(subject: Subject, problem: MLADecodeProblem) -> None:
    """The identity of a merge: anything else poisons the batch through a later per-tensor maximum."""
    if not problem.is_fp8:
        problem = problem.replace(cache_dtype=problem.dtype)
    check_empty_rows(subject.mla_decode(problem))


@pytest.mark.requirement("MLA-DEC-07")
@listed(BASE, num_splits=[1, 4])
def test_neighbours_of_empty_requests_are_right(subject: Subject, problem: MLADecodeProblem) -> None:
    """The rows that do have tokens have the bits that they have without the empty ones."""
    case = subject.build(problem)
    mixed = subject.run(case)
    alone = subject.run(subset(case, [0, 2]))
    check_output(alone)
    check_equal_bits(mixed.out[[0, 2]], alone.out, "out beside empty requests")
