"""The ledger of expectations, ``suites/expectations.toml``: which failures are known, and why.

Strict both ways: a listed failure that passes fails the run (pytest's strict xfail), and in a full run so does an
entry that matches no test. Only a broken requirement counts: a crash or an import error is never expected.
"""

from __future__ import annotations

import datetime
import fnmatch
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_conformance.suites.harness.errors import BadUse

PATH = Path(__file__).parents[1] / "expectations.toml"
_REQUIRED = {"requirement", "implementation", "versions", "reason", "issue", "reproduce", "expires"}
_OPTIONAL = {"cases", "lanes", "targets", "devices", "triton"}
_ISSUE = re.compile(r"https://\S+|docs/findings\.md#\S+")


@dataclass(frozen=True)
class Expectation:
    """One known failure.

    Args:
        requirement: id of the requirement that is broken.
        implementation: name of the implementation that breaks it.
        versions: the versions of it that do, comma-separated.
        reason: what is wrong, one sentence.
        issue: the public report, or a section of docs/findings.md where there is none.
        reproduce: one command that shows it.
        expires: the date after which the entry must be looked at again.
        cases: patterns (``fnmatch``) of ``test_name:case``, where ``case`` is the bracketed part of the test id
            without implementation, lane and target; any of them; all by default.
        lanes: lanes in which it shows; all by default.
        targets: absent targets for which it shows (compile lane); all by default.
        devices: patterns of device names on which it shows; all by default.
        triton: patterns of Triton versions with which it shows; all by default.
    """

    requirement: str
    implementation: str
    versions: str
    reason: str
    issue: str
    reproduce: str
    expires: datetime.date
    cases: tuple[str, ...] = ("*",)
    lanes: tuple[str, ...] = ("*",)
    targets: tuple[str, ...] = ("*",)
    devices: tuple[str, ...] = ("*",)
    triton: tuple[str, ...] = ("*",)

    def covers(self, implementation: str, version: str, lane: str, device: str, triton: str) -> bool:
        """Whether it speaks of this implementation under these conditions."""
        return (
            self.implementation == implementation
            and version in (v.strip() for v in self.versions.split(","))
            and _any_match(lane, self.lanes)
            and _any_match(device, self.devices)
            and _any_match(triton, self.triton)
        )

    def covers_test(self, requirements: set[str], target: str) -> bool:
        """Whether it speaks of some case of a test of these requirements, for this target."""
        return self.requirement in requirements and _any_match(target, self.targets)

    def covers_case(self, case: str) -> bool:
        """Whether it speaks of this case: ``test_name:case``."""
        return _any_match(case, self.cases)

    def __str__(self) -> str:
        return f"{self.requirement} {self.implementation} {self.versions} cases={list(self.cases)}"


def load(path: Path = PATH, today: datetime.date | None = None) -> list[Expectation]:
    """Read the ledger.

    Raises:
        BadUse: the file cannot be read, or an entry is malformed, duplicate or expired; the message names it.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("expectation", [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadUse(f"{path.name}: cannot be read: {type(error).__name__}: {error}") from error
    found: list[Expectation] = []
    for number, entry in enumerate(entries, start=1):
        expectation = _parse(entry, f"{path.name}: expectation {number} ({entry.get('requirement', 'no requirement')})")
        if expectation in found:
            raise BadUse(f"{path.name}: expectation {number} is a duplicate of an earlier one: {expectation}")
        if expectation.expires < (today or datetime.date.today()):
            raise BadUse(f"{path.name}: expectation {number} expired on {expectation.expires}: {expectation}")
        found.append(expectation)
    return found


def _parse(entry: dict[str, Any], label: str) -> Expectation:
    missing, unknown = _REQUIRED - set(entry), set(entry) - _REQUIRED - _OPTIONAL
    if missing or unknown:
        raise BadUse(f"{label}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    texts = {name: entry[name] for name in _REQUIRED - {"expires"}}
    if not all(isinstance(value, str) and value for value in texts.values()):
        raise BadUse(f"{label}: {', '.join(sorted(texts))} must be non-empty texts")
    if not isinstance(entry["expires"], datetime.date):
        raise BadUse(f"{label}: expires={entry['expires']!r} must be a date such as 2027-06-30")
    if not _ISSUE.fullmatch(entry["issue"]):
        raise BadUse(f"{label}: issue={entry['issue']!r} must be a public link, or docs/findings.md#section")
    lists: dict[str, Any] = {name: entry[name] for name in _OPTIONAL & set(entry)}
    for name, value in lists.items():
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise BadUse(f"{label}: {name}={value!r} must be a non-empty list of texts")
    patterns: dict[str, Any] = {name: tuple(value) for name, value in lists.items()}
    return Expectation(**texts, expires=entry["expires"], **patterns)


def _any_match(value: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns)
