"""Splitting the context changes rounding only."""

import pytest

from mla_conformance.suites.harness.drawing import listed
from mla_conformance.suites.harness.judge import check_lse, check_output
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MLADecodeProblem(lengths=(37, 1, 130))


@pytest.mark.requirement("MLA-DEC-05")
@listed(BASE.replace(lengths=(1, 3, 10)), num_splits=[4, 16, 33, 64])
def test_more_splits_than_tokens(subject: Subject, problem: MLADecodeProblem) -> None:
    """Most splits are empty, and their scratch holds poison."""
    outcome = subject.mla_decode(problem)
    check_output(outcome)
    check_lse(outcome)


@pytest.mark.requirement("MLA-DEC-25")
@listed(BASE, num_splits=[None, 1, 2, 3, 5, 8, 16])
def test_number_of_splits_changes_rounding_only(subject: Subject, problem: MLADecodeProblem) -> None:
    """Powers of two and others; ``None`` is the launcher's own choice."""
    outcome = subject.mla_decode(problem)
    check_output(outcome)
    check_lse(outcome)
