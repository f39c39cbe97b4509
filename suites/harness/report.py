"""Statuses, the table that a person reads, and the JSON that a machine reads."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.suites.harness import matrix, plan
from mla_conformance.suites.harness.errors import Mismatch, NoResult
from mla_conformance.suites.harness.lanes import Lane

UNSUPPORTED = "unsupported: "
BAD_USE = "mla_conformance_bad_use"
"""Where a pytest-xdist worker puts what makes the run impossible, for the controller to say once."""
STATUSES = ("pass", "fail", "expected-fail", "unexpected-pass", "unsupported", "no-result")
BAD = ("fail", "unexpected-pass", "no-result")
_PROPERTY = "conformance"


def annotate(made: pytest.TestReport, item: pytest.Item, call: pytest.CallInfo[None], subject: Any) -> None:
    """Put the conformance record of one phase on its report, and fail skips that nobody declared."""
    if made.when != "call" and made.outcome == "passed":
        return
    xfail = hasattr(made, "wasxfail")
    if made.outcome == "skipped" and not xfail and not _skip_reason(made).startswith(UNSUPPORTED):
        made.outcome = "failed"
        made.longrepr = f"a conformance test may not be skipped ({_skip_reason(made)})"
    made_plan = item.config.stash[plan.KEY]
    reasons = [mark.kwargs["reason"] for mark in item.iter_markers("xfail")]
    record = {
        "test": item.nodeid,
        "requirements": [i for mark in item.iter_markers("requirement") for i in mark.args],
        "implementation": subject.implementation.name,
        "version": made_plan.version_of(subject.implementation),
        "lane": subject.lane.name,
        "target": subject.target_name,
        "device": device_of(subject.lane, made_plan.device),
        "status": _status(made, call, xfail),
        "seconds": round(made.duration, 3),
        "reason": reasons[0] if xfail else _reason(made),
        "reproduce": _reproduce(item, subject),
        **subject.record.as_dict(),
    }
    if record["status"] in BAD:
        made.sections.append(("reproduce", record["reproduce"]))
    made.user_properties.append((_PROPERTY, record))


def device_of(lane: Lane, name: str) -> str:
    """The device of this worker: its name, and its number among the visible ones where workers are spread."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "") if lane.device == "cuda" else ""
    return f"{name} {chosen}".strip()


def _status(made: pytest.TestReport, call: pytest.CallInfo[None], xfail: bool) -> str:
    if made.outcome == "skipped":
        return "expected-fail" if xfail else "unsupported"
    if made.outcome == "passed":
        return "pass"
    if call.excinfo is None:
        return "unexpected-pass" if str(made.longrepr).startswith("[XPASS") else "fail"
    if call.excinfo.errisinstance((NoResult, MemoryError)) or made.when != "call":
        return "no-result"
    return "fail"


def _skip_reason(made: pytest.TestReport) -> str:
    text = made.longrepr[2] if isinstance(made.longrepr, tuple) else str(made.longrepr)
    return text.removeprefix("Skipped: ")


def _reason(made: pytest.TestReport) -> str:
    if made.outcome == "skipped":
        return _skip_reason(made).removeprefix(UNSUPPORTED)
    if made.outcome == "failed":
        crash = getattr(made.longrepr, "reprcrash", None)
        message = str(crash.message if crash is not None else made.longrepr).strip().splitlines()[0]
        return message.removeprefix(f"{Mismatch.__module__}.{Mismatch.__qualname__}: ")
    return ""


def _reproduce(item: pytest.Item, subject: Any) -> str:
    made = item.config.stash[plan.KEY]
    command = ["pytest", item.nodeid, *made.option_of(subject.implementation.name), "--lane", subject.lane.name]
    if subject.target_name:
        command += ["--target", subject.target_name]
    takes_problem = subject.record.problem and "problem" in _parameters(item)
    if takes_problem:
        command += ["--problem", subject.record.problem]
    return shlex.join(command)


def _parameters(item: pytest.Item) -> set[str]:
    drawn = {"problem"} if hasattr(item.obj, "hypothesis") else set()  # type: ignore[attr-defined]
    return drawn | set(item.callspec.params)  # type: ignore[attr-defined]


class Reporter:
    """Collects the records of a run, prints the table, writes the JSON. Lives in the controlling process."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.records: list[dict[str, Any]] = []
        self.crashed: list[str] = []
        self.bad_use: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect."""
        found: list[Any] = [value for name, value in report.user_properties if name == _PROPERTY]
        self.records += found

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        """A worker died in this test (pytest-xdist fails it): nothing can be said about it."""
        self.crashed.append(crashitem)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker ended, perhaps because the run is impossible."""
        self.bad_use = getattr(node, "workeroutput", {}).get(BAD_USE, self.bad_use)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail a run in which an implementation was asked for and ran nothing; write the JSON."""
        if self.bad_use is not None:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            return
        if not exitstatus and self._idle():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        path = self.config.getoption("--results")
        if path is not None:
            write(Path(path), self._document())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what passes where, then each thing that does not, with the line that shows it."""
        if self.bad_use is not None:
            terminalreporter.write_line(f"ERROR: {self.bad_use}", red=True)
        if not self.records and not self.crashed:
            return
        terminalreporter.section("conformance")
        for line in table(self.records, self.config.stash[plan.KEY].requirements):
            terminalreporter.write_line(line)
        for line in matrix.lines(self.records, self.config.stash[plan.KEY].requirements):
            terminalreporter.write_line(line)
        for lane in self.config.stash[plan.KEY].lanes:
            if lane.shows:
                terminalreporter.write_line(f"\n{lane.shows}")
        for line in self._details():
            terminalreporter.write_line(line)

    def _idle(self) -> list[str]:
        ran = {r["implementation"] for r in self.records if r["status"] != "unsupported"}
        asked = {r["implementation"] for r in self.records}
        return sorted(asked - ran)

    def _details(self) -> list[str]:
        lines = []
        ordered = sorted(self.records, key=lambda r: r["test"])
        known = [r for r in ordered if r["status"] == "expected-fail"]
        by_reason: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for r in known:
            by_reason[r["implementation"], r["reason"]].append(r)
        for (implementation, reason), records in by_reason.items():
            first = records[0]
            lines += [
                "",
                f"expected-fail {implementation} {first['version']}, {len(records)} case(s): {reason}",
            ]
            lines += [f"    {first['reproduce']}"]
        for r in ordered:
            if r["status"] in BAD:
                what = f"{', '.join(r['requirements'])} {r['implementation']} {r['lane']} {r['target']}".rstrip()
                lines += ["", f"{r['status']} {what}: {r['reason']}", f"    {r['reproduce']}"]
        lines += [f"\nno-result: a worker died in {test}" for test in self.crashed]
        lines += [f"\n{name}: ran nothing here, so nothing can be said about it" for name in self._idle()]
        return lines

    def _document(self) -> dict[str, Any]:
        from mla_conformance.suites.harness import environment

        made = self.config.stash[plan.KEY]
        return {
            "format": 1,
            "command": shlex.join(["pytest", *map(without_folder, sys.argv[1:])]),
            "environment": environment.record(made.lanes),
            "implementations": {impl.name: impl.version() for impl in made.implementations.values()},
            "shows": [lane.shows for lane in made.lanes if lane.shows],
            "counts": dict(Counter(r["status"] for r in self.records)),
            "crashed": self.crashed,
            "results": sorted(self.records, key=lambda r: r["test"]),
        }


def without_folder(argument: str) -> str:
    """A command-line argument without the folders of one machine."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def table(records: list[dict[str, Any]], requirements: dict[str, Any]) -> list[str]:
    """Lines of the table: requirement groups down, implementations and lanes across, each cell the counts by status.

    What was compiled for absent targets has a table of its own, turned on its side: targets down, groups across.
    """
    executed = [r for r in records if r["lane"] != "compile"]
    compiled = [r for r in records if r["lane"] == "compile"]
    lines = []
    for chosen, turned in ((executed, False), (compiled, True)):
        cells: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for r in chosen:
            lane = "" if turned else r["lane"]
            subject = " ".join(filter(None, (r["implementation"], lane, r["target"])))
            for group in {requirements[i].group for i in r["requirements"]}:
                cells[group, subject][r["status"]] += 1
        groups = [g for g in dict.fromkeys(q.group for q in requirements.values()) if any(k[0] == g for k in cells)]
        subjects = sorted({subject for _, subject in cells}, key=_by_number)
        corner = "compiled for" if turned else "requirement group"
        rows = [[corner, *subjects], *([g, *(_cell(cells.get((g, s))) for s in subjects)] for g in groups)]
        if turned:
            rows = [list(column) for column in zip(*rows, strict=True)]
        if cells:
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
            lines.append("")
    return lines[:-1]


def _by_number(text: str) -> list[int | str]:
    """Sort key that puts sm_90 before sm_100."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def _cell(counts: Counter[str] | None) -> str:
    if not counts:
        return "-"
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])


def write(path: Path, document: dict[str, Any]) -> None:
    """Write JSON so that an interrupted run never leaves half a file in place of a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
    partial.replace(path)
