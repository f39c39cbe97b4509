"""Two runs agree, differ, or differ as the ledger expects."""

from mla_conformance.suites.harness.agreement import compare


def run(lane: str, target: str, **statuses: str) -> dict[str, object]:
    subject = f"kernels-{lane}" + (f"-{target}" if target else "")
    return {
        "results": [
            {"test": f"a.py::{test}[{subject}-heads=1]", "lane": lane, "target": target, "status": status}
            for test, status in statuses.items()
        ]
    }


def test_equal_verdicts_agree_whatever_the_lane_is_called() -> None:
    found = compare(run("interpreter", "", one="pass", two="fail"), run("emulate", "sm_120", one="pass", two="fail"))
    assert (found.judged, found.explained, found.different) == (2, [], [])


def test_a_pass_and_a_failure_differ_and_unsupported_does_not_count() -> None:
    ours = run("interpreter", "", one="pass", two="unsupported", three="no-result")
    found = compare(ours, run("emulate", "sm_120", one="fail", two="pass", three="pass"))
    assert found.judged == 1
    assert found.different == [("a.py::one[kernels-heads=1]", "pass", "fail")]


def test_a_failure_that_the_ledger_expects_in_one_lane_is_listed_apart() -> None:
    found = compare(run("interpreter", "", one="pass"), run("emulate", "sm_120", one="expected-fail"))
    assert (len(found.explained), found.different) == (1, [])
