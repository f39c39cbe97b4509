"""The same request gives the same bits: again, alone, in company, in any order."""

import pytest

from mla_conformance.suites.harness.cases import subset
from mla_conformance.suites.harness.drawing import listed
from mla_conformance.suites.harness.judge import check_equal_bits
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MLADecodeProblem(lengths=(37, 1, 70), heads=20)
VARIED = {
    "dtype": ["float16", "bfloat16"],
    "cache_dtype": ["float8_e4m3fn"],
    "num_splits": [1, 8],
    "heads": [1],
    "page_size": [1],
}


@pytest.mark.requirement("MLA-DEC-26")
@listed(BASE, **VARIED)
def test_repeated_runs_give_the_same_bits(subject: Subject, problem: MLADecodeProblem) -> None:
    """Fresh buffers, same numbers, several times."""
    problem = _consistent(problem)
    first = subject.mla_decode(problem)
    for repeat in range(1, subject.lane.repeats):
        again = subject.mla_decode(problem)
        check_equal_bits(again.out, first.out, f"out of repeat {repeat}")
        check_equal_bits(again.lse, first.lse, f"lse of repeat {repeat}")


@pytest.mark.requirement("MLA-DEC-27")
@listed(BASE, **VARIED)
def test_a_request_has_the_same_bits_alone_and_in_a_batch(subject: Subject, problem: MLADecodeProblem) -> None:
    """Each request of a batch of three, run alone."""
    case = subject.build(_consistent(problem))
    batch = subject.run(case)
    for row in range(len(problem.lengths)):
        alone = subject.run(subset(case, [row]))
        check_equal_bits(alone.out[0], batch.out[row], f"out of request {row} alone")
        check_equal_bits(alone.lse[0], batch.lse[row], f"lse of request {row} alone")


@pytest.mark.requirement("MLA-DEC-28")
@listed(BASE, **VARIED)
def test_order_and_neighbours_change_no_bit(subject: Subject, problem: MLADecodeProblem) -> None:
    """The batch in another order, then with its neighbours cut short."""
    case = subject.build(_consistent(problem))
    batch = subject.run(case)
    *others, last = range(len(problem.lengths))
    order = [last, *others]
    check_equal_bits(subject.run(subset(case, order)).out, batch.out[order], "out in another order")
    halved = [problem.lengths[row] // 2 for row in others]
    shorter = subject.run(subset(case, [*others, last], lengths=[*halved, problem.lengths[last]]))
    check_equal_bits(shorter.out[last], batch.out[last], "out of the last request beside shorter ones")


def _consistent(problem: MLADecodeProblem) -> MLADecodeProblem:
    return problem if problem.is_fp8 else problem.replace(cache_dtype=problem.dtype)
