"""The table of block formats: types down, implementations and lanes across."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from mla_conformance.suites.harness.requirements import Requirement

_QUANT = re.compile(r"\bquant=(\w+)")
_WORST_FIRST = ("fail", "unexpected-pass", "no-result", "expected-fail", "pass", "unsupported")


def lines(records: list[dict[str, Any]], requirements: dict[str, Requirement]) -> list[str]:
    """Lines of one table an operation, from the tests that name a type: ``quant=Q4_K``.

    A cell holds the worst status of the type's tests; a type that passes some and declares others unsupported passes.
    """
    statuses: dict[str, dict[tuple[str, str], set[str]]] = defaultdict(lambda: defaultdict(set))
    for record in records:
        found = _QUANT.search(record["test"])
        if found and record["lane"] != "compile":
            operation = requirements[record["requirements"][0]].operation
            subject = f"{record['implementation']} {record['lane']} {record['target']}".strip()
            statuses[operation][found[1], subject].add(record["status"])
    printed: list[str] = []
    for operation, cells in statuses.items():
        quants = list(dict.fromkeys(quant for quant, _ in cells))
        if len(quants) < 2:
            continue
        subjects = sorted({subject for _, subject in cells})
        rows = [[operation, *subjects]]
        rows += [[quant, *(_worst(cells.get((quant, subject), set())) for subject in subjects)] for quant in quants]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        printed += ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
        printed.append("")
    return printed


def _worst(statuses: set[str]) -> str:
    return next((status for status in _WORST_FIRST if status in statuses), "-")
