"""The requirement registry: every claim of the suite, with its source, in ``suites/requirements.toml``."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from mla_conformance.suites.harness.errors import BadUse

PATH = Path(__file__).parents[1] / "requirements.toml"
_ID = re.compile(r"[A-Z]+(-[A-Z]+)*-\d{2}")


@dataclass(frozen=True)
class Requirement:
    """One numbered claim about one operation.

    Args:
        id: such as ``MLA-DEC-07``; never reused.
        operation: what it is about: a method of an implementation (:data:`operations.OPERATIONS`).
        group: the row of the final table that it counts in.
        statement: the claim, one sentence.
        source: where it comes from: a paper, a specification, a public report (``org/repo#number``).
        since: the version of this suite that first had it.
    """

    id: str
    operation: str
    group: str
    statement: str
    source: str
    since: str


def load(path: Path = PATH) -> dict[str, Requirement]:
    """Read the registry.

    Raises:
        BadUse: the file cannot be read, or an entry is malformed or given twice; the message names it.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["requirement"]
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError) as error:
        raise BadUse(f"{path.name}: cannot be read: {type(error).__name__}: {error}") from error
    names = {field.name for field in fields(Requirement)}
    found: dict[str, Requirement] = {}
    for number, entry in enumerate(entries, start=1):
        label = f"{path.name}: requirement {number} ({entry.get('id', 'no id')})"
        if set(entry) != names or not all(isinstance(value, str) and value for value in entry.values()):
            raise BadUse(f"{label}: needs exactly the non-empty texts {', '.join(sorted(names))}")
        if not _ID.fullmatch(entry["id"]):
            raise BadUse(f"{label}: the id must look like MLA-DEC-07")
        if entry["id"] in found:
            raise BadUse(f"{label}: the id is given twice")
        found[entry["id"]] = Requirement(**entry)
    return found


def listing(requirements: dict[str, Requirement]) -> str:
    """The registry as text, for ``--list-requirements``."""
    return "\n".join(
        f"{r.id}  [{r.group}] {r.statement}\n{'':{len(r.id)}}  source: {r.source}; since {r.since}"
        for r in requirements.values()
    )
