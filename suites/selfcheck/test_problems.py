"""Problems print as one line that rebuilds them, and bad lines are refused in words."""

import pytest
from hypothesis import given

from mla_conformance.suites.harness.drawing import decode_problems
from mla_conformance.suites.harness.problems import MLADecodeProblem, parse_problem


@given(problem=decode_problems())
def test_the_printed_line_rebuilds_the_problem(problem: MLADecodeProblem) -> None:
    """Printing and parsing are inverse, and the line holds no single quote, so that a shell can quote it."""
    assert parse_problem(str(problem)) == problem
    assert "'" not in str(problem)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "not of the form"),
        ("MLADecodeProblem", "not of the form"),
        ("MLADecodeProblem(lengths=(1,)", "not of the form"),
        ("MLADecodeProblem((1,))", "not of the form"),
        ("Other(heads=1)", "'Other' is unknown"),
        ("MLADecodeProblem(head=1)", "'head' is unknown"),
        ("MLADecodeProblem(heads=__import__('os').getpid())", "no literal value"),
        ("MLADecodeProblem(heads=0)", "heads=0"),
        ("MLADecodeProblem(heads=True)", "heads=True"),
        ("MLADecodeProblem(page_size=-1)", "page_size=-1"),
        ("MLADecodeProblem(lengths=[1])", "lengths="),
        ("MLADecodeProblem(lengths=(-1,))", "lengths="),
        ("MLADecodeProblem(lengths=(10**12,))", "no literal value"),
        ("MLADecodeProblem(lengths=(1000000000000,))", "cached elements"),
        ("MLADecodeProblem(dtype='int8')", "dtype='int8'"),
        ("MLADecodeProblem(num_splits=0)", "num_splits=0"),
        ("MLADecodeProblem(softmax_scale=float('nan'))", "no literal value"),
        ("MLADecodeProblem(softmax_scale=-1.0)", "softmax_scale=-1.0"),
        ("MLADecodeProblem(k_scale=0)", "k_scale=0"),
        ("MLADecodeProblem(pages='lost')", "pages='lost'"),
    ],
)
def test_a_bad_line_is_refused_in_words(line: str, message: str) -> None:
    """The message names the field and its value; nothing in the line is evaluated."""
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_problem(line)
