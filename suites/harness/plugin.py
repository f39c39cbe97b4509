"""The pytest hooks of the suite, in the order in which pytest calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from mla_conformance.suites.harness import collection, ledger, plan, report, requirements
from mla_conformance.suites.harness.errors import BadUse, Unsupported

# Derandomised, so that a run says the same everywhere; `nightly` draws fresh problems and prints what fails.
_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "print_blob": False,
    # One failure at a time: a group of them would be none that the ledger can expect.
    "report_multiple_bugs": False,
}
# The gate of a pull request says that something fails; the longer profiles look for the smallest problem that does.
_NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("pr", max_examples=6, derandomize=True, database=None, phases=_NO_SHRINKING, **_COMMON)
settings.register_profile("main", max_examples=20, derandomize=True, database=None, **_COMMON)
settings.register_profile("nightly", max_examples=200, **(_COMMON | {"print_blob": True}))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("mla-conformance", "MLA conformance")
    group.addoption(
        "--impl",
        action="append",
        metavar="NAME",
        help="implementation under test: package.module:Class, or one that comes with the suite; may be repeated "
        f"(default: {', '.join(plan.DEFAULT_IMPLEMENTATIONS)})",
    )
    group.addoption(
        "--op",
        action="append",
        metavar="MODULE:NAME",
        help="hold an operator of your own to its contract: an OpCall, see docs/contracts.md; may be repeated "
        "(without --impl, nothing else is under test)",
    )
    group.addoption(
        "--lane",
        action="append",
        metavar="LANE",
        help="where to run: auto, emulate, interpreter, cuda, proxy, compile; may be repeated (default: auto)",
    )
    group.addoption(
        "--target",
        action="append",
        metavar="ARCH",
        help="absent GPU: sm_80, sm_89, sm_90, sm_100, sm_120, sm_121; may be repeated "
        "(default: sm_120 for the emulate lane, the last four for the compile lane)",
    )
    group.addoption("--problem", metavar="LINE", help="run the selected tests on this problem only")
    group.addoption(
        "--expectations", metavar="PATH", default=str(ledger.PATH), help="the ledger of known failures to use"
    )
    group.addoption("--results", metavar="PATH", help="write the results as JSON")
    group.addoption("--list-requirements", action="store_true", help="list the requirements and exit")


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Answer ``--list-requirements`` without collecting anything."""
    if not config.getoption("--list-requirements"):
        return None
    print(requirements.listing(requirements.load()))
    return 0


def pytest_configure(config: pytest.Config) -> None:
    """Set the process up before anything imports torch."""
    config.addinivalue_line("markers", "requirement(*ids): the requirements that a test checks")
    if config.getoption("--help") or config.getoption("--list-requirements"):
        return
    config.stash[plan.KEY] = plan.make(config)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(report.Reporter(config), "mla-conformance-report")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is under test, and what would be if it were installed."""
    made = config.stash[plan.KEY]
    under_test = ", ".join(f"{impl.name} {impl.version()}" for impl in made.implementations.values())
    lanes = ", ".join(lane.name for lane in made.lanes)
    return [
        f"conformance: {under_test}; lanes: {lanes}; device: {made.device}",
        *(f"conformance: not part of this run: {reason}" for reason in made.absent),
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each conformance test the implementations that offer its operation."""
    made = metafunc.config.stash[plan.KEY]
    choices: dict[str, Callable[[set[str]], list[Any]]] = {
        "subject": made.subjects,
        "compiler": made.compilers,
        "registered_op": made.registered_ops,
    }
    for name in collection.CONFORMANCE_ARGUMENTS:
        if name in metafunc.fixturenames:
            values = choices[name](collection.operations_of(metafunc.definition, made))
            metafunc.parametrize(name, values, ids=[value.id for value in values])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check tests against the registry and the ledger; a pytest-xdist worker leaves the complaint to the controller."""
    try:
        collection.check(config, items)
    except BadUse as error:
        if not hasattr(config, "workeroutput"):
            raise
        config.workeroutput[report.BAD_USE] = str(error)
        items.clear()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give the test a fresh record."""
    argument = collection.conformance_argument(item)
    if argument is not None:
        item.callspec.params[argument].start_record()  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """With ``--problem``, call the test on that problem instead of those drawn or listed."""
    problem = pyfuncitem.config.stash[plan.KEY].problem
    function = pyfuncitem.obj
    function = function.hypothesis.inner_test if hasattr(function, "hypothesis") else function
    names = inspect.signature(function).parameters
    if problem is None or "problem" not in names:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name in pyfuncitem.funcargs}
    function(**(arguments | {"problem": problem}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """A declared ``Unsupported`` ends the test as such; drawn tests declare it by having run nothing."""
    argument = collection.conformance_argument(item)
    try:
        yield
    except Unsupported as declared:
        if argument is None:
            raise
        pytest.skip(f"{report.UNSUPPORTED}{declared}")
    if argument is None:
        return
    record = item.callspec.params[argument].record  # type: ignore[attr-defined]
    if record.ran == 0 and record.declined:
        pytest.skip(f"{report.UNSUPPORTED}{record.declined.most_common(1)[0][0]}")
    if record.ran == 0:
        raise AssertionError("the test passed without running anything: a conformance test must run its subject")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the conformance record; a skip that is not a declared ``unsupported`` becomes a failure."""
    made = yield
    argument = collection.conformance_argument(item)
    if argument is not None:
        report.annotate(made, item, call, item.callspec.params[argument])  # type: ignore[attr-defined]
    return made
