"""Nothing is green by not running: each way in which a test can end has its own status."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mla_conformance.suites.selfcheck.conftest import Run

PLUGIN = ["-p", "mla_conformance.suites.harness.plugin", "--impl", "reference", "--lane", "interpreter"]
HEAD = """
import os
import pytest
from hypothesis import given, strategies as st
from mla_conformance.suites.harness.drawing import drawn, decode_problems
from mla_conformance.suites.harness.errors import Mismatch, NoResult, Unsupported

pytestmark = pytest.mark.requirement("MLA-DEC-01")
"""
ENDINGS = """
def test_right(subject):
    subject.record.ran += 1

def test_wrong(subject):
    subject.record.ran += 1
    raise Mismatch("planted")

def test_crashing_with_an_error(subject):
    raise ImportError("planted")

def test_declared_unsupported(subject):
    raise Unsupported("planted")

@drawn(decode_problems())
def test_everything_declined(subject, problem):
    subject.record.declined["planted"] += 1
    raise Unsupported("planted")

def test_skipped(subject):
    pytest.skip("not today")

@pytest.mark.skip(reason="unconditional")
def test_marked_skip(subject):
    pass

def test_running_nothing(subject):
    pass

def test_out_of_memory(subject):
    raise MemoryError

def test_no_result(subject):
    raise NoResult("the device was lost")

@pytest.mark.xfail(reason="hidden")
def test_hidden_behind_an_xfail_of_its_own(subject):
    raise Mismatch("planted")
"""
EXPECTED = {
    "test_right": "pass",
    "test_wrong": "fail",
    "test_crashing_with_an_error": "fail",
    "test_declared_unsupported": "unsupported",
    "test_everything_declined": "unsupported",
    "test_skipped": "fail",
    "test_marked_skip": "no-result",
    "test_running_nothing": "fail",
    "test_out_of_memory": "no-result",
    "test_no_result": "no-result",
}


@pytest.fixture
def run_module(run_pytest: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """Run a test module made of this text."""

    def run(text: str, *arguments: str) -> Run:
        folder = tmp_path / "module"
        folder.mkdir()
        (folder / "test_planted.py").write_text(HEAD + text)
        return run_pytest(*PLUGIN, *arguments, "test_planted.py", cwd=folder)

    return run


def test_each_ending_has_its_status(run_module: Callable[..., Run]) -> None:
    """The JSON keeps them apart, and any of the bad ones fails the run."""
    endings, hidden = ENDINGS.split("@pytest.mark.xfail")
    run = run_module(endings)
    assert run.code == pytest.ExitCode.TESTS_FAILED
    assert run.statuses() == EXPECTED
    assert "hidden" in hidden


def test_an_expectation_outside_the_ledger_is_refused(run_module: Callable[..., Run]) -> None:
    """An xfail mark in a conformance test would be a second, unchecked ledger."""
    run = run_module(ENDINGS)
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert "test_hidden_behind_an_xfail_of_its_own" in run.output
    assert "suites/expectations.toml" in run.output


@pytest.mark.parametrize(
    ("mark", "message"),
    [("", "has no requirement mark"), ("MLA-DEC-99", "MLA-DEC-99 is not in suites/requirements.toml")],
)
def test_a_test_without_a_requirement_is_refused(run_module: Callable[..., Run], mark: str, message: str) -> None:
    """Unmarked, or marked with an id that does not exist."""
    arguments = f'"{mark}"' if mark else ""
    run = run_module(f"pytestmark = pytest.mark.requirement({arguments})\ndef test_unmarked(subject): ...\n")
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert message in run.output


def test_running_nothing_at_all_fails_the_run(run_module: Callable[..., Run]) -> None:
    """An implementation that declines everything has shown nothing."""
    run = run_module('def test_declined(subject):\n    raise Unsupported("planted")\n')
    assert run.code == pytest.ExitCode.TESTS_FAILED
    assert "reference: ran nothing here" in run.output


def test_the_ledger_is_strict_both_ways(run_module: Callable[..., Run], tmp_path: Path) -> None:
    """Listed and failing is expected-fail; listed and passing fails the run; a crash is never expected."""
    entry = f"""
[[expectation]]
requirement = "MLA-DEC-01"
implementation = "reference"
versions = "{torch.__version__}"
reason = "planted reason"
issue = "https://example.org/1"
reproduce = "pytest"
expires = 2099-01-01
cases = ["test_wrong:*", "test_right:*", "test_crashing_with_an_error:*"]
"""
    ledger = tmp_path / "ledger.toml"
    ledger.write_text(entry)
    run = run_module(ENDINGS.split("def test_declared_unsupported")[0], "--expectations", str(ledger))
    assert run.statuses() == {
        "test_right": "unexpected-pass",
        "test_wrong": "expected-fail",
        "test_crashing_with_an_error": "fail",
    }
    assert "planted reason (https://example.org/1)" in run.output
    assert run.code == pytest.ExitCode.TESTS_FAILED


def test_a_dead_worker_is_no_result(run_module: Callable[..., Run]) -> None:
    """The run goes on, names the test in which the worker died, and fails."""
    text = "def test_dying(subject):\n    os._exit(3)\n\ndef test_living(subject):\n    subject.record.ran += 1\n"
    run = run_module(text, "-n", "1")
    assert run.code == pytest.ExitCode.TESTS_FAILED
    assert run.statuses() == {"test_living": "pass"}
    assert len(run.results["crashed"]) == 1
    assert "no-result: a worker died in test_planted.py::test_dying" in run.output


def test_an_interrupted_write_leaves_the_old_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced as a whole or not at all."""
    from mla_conformance.suites.harness import report

    path = tmp_path / "results.json"
    report.write(path, {"format": 1})

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report.write(path, {"format": 2})
    assert path.read_text() == '{\n "format": 1\n}\n'
