"""Bad use gets one clear sentence and exit code 4; what a run says can be repeated by its own line."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from mla_conformance.suites.harness import requirements
from mla_conformance.suites.selfcheck.conftest import Run

BROKEN = "mla_conformance.suites.selfcheck.broken"
VERSION = version("mla-conformance")
ENTRY = f"""
[[expectation]]
requirement = "MLA-DEC-07"
implementation = "kernels"
versions = "{VERSION}"
reason = "planted"
issue = "https://example.org/1"
reproduce = "pytest"
expires = 2099-01-01
cases = ["no_such_test:*"]
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--impl", "nobody"],
            "--impl nobody: unknown; use ggml, gguf_plugin, gguf_py, kernels, reference, vllm, vllm_0_16, or package",
        ),
        (["--impl", "no.such.module:Adapter"], "--impl no.such.module:Adapter: cannot be imported"),
        (["--impl", f"{BROKEN}:Nothing"], "has no attribute 'Nothing'"),
        (["--impl", "json:JSONDecoder"], "does not derive from Implementation"),
        (["--impl", "reference", "--impl", f"{BROKEN}:Broken"], "have the same name: reference, reference"),
        (["--lane", "moon"], "--lane moon: unknown; use auto, compile, cuda, emulate, interpreter, proxy"),
        (["--lane", "proxy"], "--lane proxy: no GPU is visible here"),
        (["--lane", "cuda"], "--lane cuda: no GPU is visible here"),
        (["--target", "sm_42"], "--target sm_42: unknown; use sm_80, sm_89, sm_90, sm_100, sm_120, sm_121"),
        (["--problem", "heads=1"], "--problem: problem 'heads=1' is not of the form"),
        (["--expectations", "nowhere.toml"], "nowhere.toml: cannot be read: FileNotFoundError"),
    ],
)
def test_bad_use_is_one_sentence(run_pytest: Callable[..., Run], arguments: list[str], message: str) -> None:
    """Exit code 4, the sentence, and no traceback."""
    defaults = [] if "--impl" in arguments else ["--impl", "reference"]
    run = run_pytest(*defaults, *arguments, environ={"PATH": ""})
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert message in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[expectation", "cannot be read: TOMLDecodeError"),
        (ENTRY + ENTRY, "expectation 2 is a duplicate"),
        (ENTRY.replace("2099", "2001"), "expectation 1 expired on 2001-01-01"),
        (ENTRY.replace("MLA-DEC-07", "MLA-DEC-99"), "MLA-DEC-99 is no requirement"),
        (ENTRY.replace("https://example.org/1", "somebody said"), "issue='somebody said' must be a public link"),
        (ENTRY.replace("reason", "because"), "missing ['reason'], unknown ['because']"),
        (ENTRY.replace('"planted"', '""'), "must be non-empty texts"),
        (ENTRY.replace('["no_such_test:*"]', "[]"), "cases=[] must be a non-empty list"),
        (ENTRY, f"matches no test: MLA-DEC-07 kernels {VERSION} cases=['no_such_test:*']"),
    ],
)
def test_a_bad_ledger_is_refused(run_pytest: Callable[..., Run], tmp_path: Path, text: str, message: str) -> None:
    """The sentence names the entry; an entry that matches nothing is found in a run over everything."""
    ledger = tmp_path / "ledger.toml"
    ledger.write_text(text)
    run = run_pytest("--collect-only", "-q", "--impl", "kernels", "--expectations", str(ledger))
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert message in run.output


def test_workers_leave_the_complaint_to_the_controller(run_pytest: Callable[..., Run], tmp_path: Path) -> None:
    """What workers find wrong with the collection is one sentence and exit code 4 as well."""
    ledger = tmp_path / "ledger.toml"
    ledger.write_text(ENTRY)
    run = run_pytest("-n", "2", "-q", "--impl", "kernels", "--lane", "interpreter", "--expectations", str(ledger))
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert run.output.count("ERROR: suites/expectations.toml: matches no test") == 1
    assert "INTERNALERROR" not in run.output


@pytest.mark.parametrize("lane", ["interpreter", "compile"])
def test_the_ledger_fits_a_run_of_one_lane(run_pytest: Callable[..., Run], lane: str) -> None:
    """Entries about tests that another lane runs are no complaint."""
    assert run_pytest("--collect-only", "-q", "--lane", lane).code == 0


def test_a_missing_vllm_is_one_sentence(run_pytest: Callable[..., Run], tmp_path: Path) -> None:
    """It says how to install it, and how to do without."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['vllm'] = None\n")
    run = run_pytest("--impl", "vllm", environ={"PYTHONPATH": str(tmp_path)})
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert "--impl vllm: cannot be imported" in run.output
    assert "pip install --no-deps vllm" in run.output


def test_requirements_are_listed(run_pytest: Callable[..., Run]) -> None:
    """Every id with its statement and source, without collecting or importing anything heavy."""
    run = run_pytest("--list-requirements")
    assert run.code == 0
    for requirement in requirements.load().values():
        assert f"{requirement.id}  [{requirement.group}] {requirement.statement}" in run.output
    assert len(requirements.load()) >= 24


def test_every_requirement_has_a_test(run_pytest: Callable[..., Run]) -> None:
    """Collecting everything is where an entry without a test, or a test without an entry, is found."""
    assert run_pytest("--collect-only", "-q", "--impl", "kernels").code == 0


def test_the_reproduction_line_reproduces(run_pytest: Callable[..., Run]) -> None:
    """A drawn failure names its shrunk problem; run as printed, that one problem fails in the same words."""
    drawn = "suites/attention/test_decode_values.py::test_output_is_within_the_derived_bound"
    first = run_pytest(drawn, "--impl", f"{BROKEN}:DropsLastToken", "--lane", "interpreter")
    assert first.code == pytest.ExitCode.TESTS_FAILED
    (result,) = first.results["results"]
    assert result["status"] == "fail"
    assert "--problem" in result["reproduce"]
    assert result["reproduce"] in first.output
    again = run_pytest(*shlex.split(result["reproduce"])[1:])
    assert again.code == pytest.ExitCode.TESTS_FAILED
    assert again.results["results"][0]["reason"] == result["reason"]


def test_workers_and_order_change_no_verdict(run_pytest: Callable[..., Run]) -> None:
    """No worker, two, eight, and a random order: the same statuses."""
    chosen = ["suites/attention/test_decode_empty.py"]
    chosen += ["--impl", f"{BROKEN}:NanInEmptyRows", "--lane", "interpreter"]
    plain = run_pytest(*chosen, "-n", "0", "-p", "no:randomly")
    assert set(plain.results["counts"]) == {"pass", "fail"}
    verdicts = {result["test"]: result["status"] for result in plain.results["results"]}
    for options in (["-n", "2"], ["-n", "8"], ["-p", "randomly"]):
        other = run_pytest(*chosen, *options)
        assert {result["test"]: result["status"] for result in other.results["results"]} == verdicts
