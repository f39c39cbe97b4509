"""Compare two runs of the suite test by test: ``python -m mla_conformance.suites.harness.agreement A.json B.json``.

Two lanes that run the same kernels must come to the same verdict wherever both come to one. A known failure that the
ledger expects in one lane only is listed and explained by its entry; any other difference fails.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JUDGED = ("pass", "fail", "expected-fail", "unexpected-pass")


@dataclass(frozen=True)
class Comparison:
    """Tests that both runs judged, and those on which they differ: (test, first status, second status)."""

    judged: int
    explained: list[tuple[str, str, str]]
    different: list[tuple[str, str, str]]


def compare(first: dict[str, Any], second: dict[str, Any]) -> Comparison:
    """Compare the ``--results`` documents of two runs; what only one of them judged does not count."""
    ours, theirs = _verdicts(first), _verdicts(second)
    both = sorted(ours.keys() & theirs.keys())
    differ = [(test, ours[test], theirs[test]) for test in both if ours[test] != theirs[test]]
    explained = [entry for entry in differ if set(entry[1:]) == {"pass", "expected-fail"}]
    return Comparison(len(both), explained, [entry for entry in differ if entry not in explained])


def _verdicts(document: dict[str, Any]) -> dict[str, str]:
    """Status by test id, without the lane and target in it."""
    found = {}
    for result in document["results"]:
        if result["status"] in JUDGED:
            lane = "-".join(filter(None, (result["lane"], result["target"])))
            found[re.sub(rf"-{re.escape(lane)}(?=[-\]])", "", result["test"])] = result["status"]
    return found


def main() -> int:
    """Print the comparison; 1 if the runs differ or have nothing in common."""
    parser = argparse.ArgumentParser(prog="python -m mla_conformance.suites.harness.agreement", description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    options = parser.parse_args()
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in (options.first, options.second)]
    found = compare(*documents)
    for title, entries in (("expected in one only", found.explained), ("DIFFERENT", found.different)):
        for test, ours, theirs in entries:
            print(f"{title}: {test}: {ours} and {theirs}")
    print(
        f"{found.judged} tests judged by both, {len(found.explained)} differ as the ledger expects, "
        f"{len(found.different)} differ"
    )
    return 1 if found.different or not found.judged else 0


if __name__ == "__main__":
    raise SystemExit(main())
