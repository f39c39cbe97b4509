"""What the documents say of the emulator is all of it."""

import re

from mla_conformance.suites.emulator import Kind
from mla_conformance.suites.selfcheck.conftest import ROOT
from mla_conformance.suites.selfcheck.emulator import instruction_table


def test_every_kind_of_finding_is_explained() -> None:
    """A row of the table for each, and no row for what cannot be found."""
    page = (ROOT / "docs" / "emulator.md").read_text(encoding="utf-8")
    table = page.split("| report |")[1].split("\n\n")[0]
    rows = set(re.findall(r"^\| ([^|]+?) \|", table, flags=re.MULTILINE)) - {"---"}
    assert rows - {"what happened"} == {str(kind) for kind in Kind}


def test_the_table_of_instructions_is_up_to_date() -> None:
    """If not: ``python -m mla_conformance.suites.selfcheck.emulator.instruction_table``."""
    assert instruction_table.PAGE.read_text(encoding="utf-8") == instruction_table.page()
