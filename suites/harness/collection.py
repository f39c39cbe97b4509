"""Checks of what was collected: against the registry, and against the ledger."""

from __future__ import annotations

from typing import Any

import pytest

from mla_conformance.suites.harness import plan
from mla_conformance.suites.harness.errors import BadUse, Mismatch
from mla_conformance.suites.harness.ledger import Expectation

CONFORMANCE_ARGUMENTS = ("subject", "compiler", "registered_op")
"""A test that asks for one of these is a conformance test: it needs a requirement, and may not be skipped."""


def conformance_argument(item: pytest.Item) -> str | None:
    """The argument that makes ``item`` a conformance test, or None."""
    names = getattr(item, "fixturenames", ())
    return next((name for name in CONFORMANCE_ARGUMENTS if name in names), None)


def operations_of(item: pytest.Item, made: plan.Plan) -> set[str]:
    """The operations that a conformance test is about: those of its requirements, as far as these are known."""
    ids = {i for mark in item.iter_markers("requirement") for i in mark.args}
    return {made.requirements[i].operation for i in ids if i in made.requirements}


def check(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check tests against the registry, mark what the ledger expects, and drop what no chosen lane runs.

    Raises:
        BadUse: a test without a requirement, with an unknown one, or with an xfail mark of its own; in a run over
            everything, also a requirement without a test, and a ledger entry that matches no test.
    """
    made = config.stash[plan.KEY]
    kept, dropped = [], []
    used: set[str] = set()
    considered: set[Expectation] = set()
    matched: set[Expectation] = set()
    for item in items:
        argument = conformance_argument(item)
        if argument is None:
            kept.append(item)
            continue
        ids = requirements_of(item, made)
        used |= ids
        subject = item.callspec.params[argument]  # type: ignore[attr-defined]
        if not hasattr(subject, "implementation"):
            dropped.append(item)  # pytest's placeholder for an empty parameter set: no chosen lane runs this
            continue
        kept.append(item)
        for expectation in made.ledger:
            applies = made.applies(expectation, subject.implementation, subject.lane)
            if not (applies and expectation.covers_test(ids, subject.target_name)):
                continue
            considered.add(expectation)
            if expectation.covers_case(_case_of(item, subject)):
                matched.add(expectation)
                reason = f"{expectation.reason} ({expectation.issue})"
                item.add_marker(pytest.mark.xfail(raises=Mismatch, strict=True, reason=reason))
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    if config.args_source != pytest.Config.ArgsSource.TESTPATHS:
        return
    untested = set(made.requirements) - used
    if untested:
        raise BadUse(f"suites/requirements.toml: no test checks {', '.join(sorted(untested))}")
    for expectation in considered - matched:
        raise BadUse(f"suites/expectations.toml: matches no test: {expectation}")


def requirements_of(item: pytest.Item, made: plan.Plan) -> set[str]:
    """The ids that the test's ``requirement`` marks name."""
    ids = {i for mark in item.iter_markers("requirement") for i in mark.args}
    if not ids:
        raise BadUse(f"{item.nodeid}: has no requirement mark; name the requirement that it checks")
    unknown = ids - set(made.requirements)
    if unknown:
        raise BadUse(f"{item.nodeid}: requirement {', '.join(sorted(unknown))} is not in suites/requirements.toml")
    operations = operations_of(item, made)
    if len(operations) > 1:
        raise BadUse(f"{item.nodeid}: its requirements are of different operations: {', '.join(sorted(operations))}")
    if any(item.iter_markers("xfail")):
        raise BadUse(f"{item.nodeid}: has an xfail mark; known failures belong in suites/expectations.toml")
    return ids


def _case_of(item: pytest.Item, subject: Any) -> str:
    case = item.callspec.id.removeprefix(subject.id).removeprefix("-")  # type: ignore[attr-defined]
    return f"{item.originalname}:{case}"  # type: ignore[attr-defined]
