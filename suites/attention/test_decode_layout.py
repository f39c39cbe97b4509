"""MLA decode reads the paged cache as it is laid out."""

import pytest

from mla_conformance.suites.harness.drawing import decode_problems, drawn, listed
from mla_conformance.suites.harness.judge import check_equal_bits, check_lse, check_output
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MLADecodeProblem(lengths=(37, 1, 70))


@pytest.mark.requirement("MLA-DEC-13")
@drawn(decode_problems(pages="shuffled"))
def test_where_pages_lie_changes_no_bit(subject: Subject, problem: MLADecodeProblem) -> None:
    """The same rows in shuffled pages and in consecutive ones."""
    shuffled = subject.mla_decode(problem)
    in_order = subject.mla_decode(problem.replace(pages="in_order"))
    check_equal_bits(shuffled.out, in_order.out, "out")
    check_equal_bits(shuffled.lse, in_order.lse, "lse")


@pytest.mark.requirement("MLA-DEC-14")
@listed(BASE.replace(pages="shared", lengths=(40, 37, 64)), page_size=[1, 16, 32], num_splits=[1, 4])
def test_requests_may_share_pages(subject: Subject, problem: MLADecodeProblem) -> None:
    """A common prefix lies in one page that three block tables name."""
    check_output(subject.mla_decode(problem))


@pytest.mark.requirement("MLA-DEC-15")
@drawn(decode_problems(layout="gapped"))
def test_odd_strides_and_gaps(subject: Subject, problem: MLADecodeProblem) -> None:
    """Every tensor has odd strides; what lies between its rows is poison and must stay as it is."""
    outcome = subject.mla_decode(problem)
    check_output(outcome)
    check_lse(outcome)


@pytest.mark.requirement("MLA-DEC-16")
@listed(BASE.replace(layout="layers"), page_size=[1, 16, 64], dtype=["float16", "bfloat16"], heads=[5, 20])
def test_cache_may_be_one_layer_of_a_larger_allocation(subject: Subject, problem: MLADecodeProblem) -> None:
    """Another layer's page lies between any two pages."""
    check_output(subject.mla_decode(problem.replace(cache_dtype=problem.dtype)))


@pytest.mark.requirement("MLA-DEC-17")
@listed(BASE, page_size=[1, 2, 5, 16, 32, 48, 64, 128])
def test_any_page_size(subject: Subject, problem: MLADecodeProblem) -> None:
    """Lengths that fill no page, one page, and a page and a bit."""
    check_output(subject.mla_decode(problem))
