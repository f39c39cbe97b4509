"""``python -m mla_conformance.suites.selfcheck.emulator.instruction_table`` writes docs/emulator-instructions.md.

Rows are what Triton was seen to emit (``suites/emulator/emitted.toml``) and every form that an instruction test covers
(``FORMS`` of the test modules); a test keeps the page as it is written here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from pathlib import Path

import mla_conformance.suites.selfcheck.emulator as package
from mla_conformance.suites.emulator.instructions.registry import mnemonics
from mla_conformance.suites.emulator.survey import load
from mla_conformance.suites.selfcheck.conftest import ROOT

PAGE = ROOT / "docs" / "emulator-instructions.md"
REFUSED = ("wgmma",)
NOT_TESTED = "-"
_HEAD = """# Instructions of the emulator

Written by `python -m mla_conformance.suites.selfcheck.emulator.instruction_table`; a test compares this page with it.

## What Triton emits

Seen in the PTX of this repository's kernels, vLLM's dense MLA decode and the GGUF plugin, compiled by Triton 3.6.0,
3.8.0 and 3.9.0 for sm_80, sm_89, sm_90, sm_100, sm_120 and sm_121. *Implemented*: a test translates an example of each.
*Tested*: an instruction test holds the form to the PTX manual in exact arithmetic; - means that only whole kernels
exercise it.

| instruction | Triton | targets | implemented | tested |
|---|---|---|---|---|
"""
_TAIL = """
## All forms that are tested, by mnemonic

| mnemonic | forms held to the manual |
|---|---|
"""


def tested_forms() -> set[str]:
    """The opcodes in the ``FORMS`` of all test modules: the text of a key up to its first space."""
    found: set[str] = set()
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("test_"):
            forms = getattr(importlib.import_module(f"{package.__name__}.{module.name}"), "FORMS", {})
            found |= {str(form).split()[0].rstrip(";") for form in forms}
    return found


def page() -> str:
    """The whole page."""
    tested = tested_forms()
    rows = []
    for opcode, entry in sorted(load().items()):
        versions = ", ".join(version.rsplit(".", 1)[0] for version in sorted(entry.versions))
        targets = ", ".join(name.removeprefix("sm_") for name in sorted(entry.targets, key=lambda n: int(n[3:])))
        targets = "all" if len(entry.targets) == 6 else targets
        implemented = "refused" if opcode.split(".")[0] in REFUSED else "yes"
        rows.append(
            f"| `{opcode}` | {versions} | {targets} | {implemented} | {'yes' if opcode in tested else NOT_TESTED} |"
        )
    forms: dict[str, list[str]] = defaultdict(list)
    for form in sorted(tested):
        forms[form.split(".")[0]].append(form)
    known = [f"| `{name}` | {len(forms[name]) or NOT_TESTED} |" for name in mnemonics()]
    return _HEAD + "\n".join(rows) + "\n" + _TAIL + "\n".join(known) + "\n"


def main() -> int:
    """Write the page."""
    Path(PAGE).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
