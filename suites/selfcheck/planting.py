"""What every list of planted faults does: run a requirement's test on the fault, and on nothing broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.subject import Subject
from mla_conformance.suites.selfcheck.broken import Broken
from mla_conformance.suites.selfcheck.test_planted_faults import AnySize, undecorated

Caught = tuple[type[Implementation], Any, dict[str, Any]]
"""A fault, the test that must catch it, and what the test is called with beside the subject."""


def each(caught: Sequence[Caught]) -> pytest.MarkDecorator:
    """Parametrise a test with every entry."""
    names = [f"{fault.name}-{test.__name__}" for fault, test, _ in caught]
    return pytest.mark.parametrize(("fault", "test", "arguments"), caught, ids=names)


def check_caught(fault: type[Implementation], test: Any, arguments: dict[str, Any]) -> None:
    """The fault is a mismatch there, and the same test passes with nothing broken."""
    undecorated(test)(subject=Subject(Broken(), AnySize()), **arguments)
    with pytest.raises(Mismatch):
        undecorated(test)(subject=Subject(fault(), AnySize()), **arguments)


def requirements_of(caught: Sequence[Caught]) -> set[str]:
    """Ids of the requirements whose tests catch something."""
    marks = [mark for _, test, _ in caught for mark in test.pytestmark if mark.name == "requirement"]
    return {name for mark in marks for name in mark.args}
