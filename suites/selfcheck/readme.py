"""The code blocks of the README, for the tests that run them as written."""

import re

from mla_conformance.suites.selfcheck.conftest import ROOT


def code_blocks(language: str = r"\w*") -> list[str]:
    """Every block, in order; of one language, named as after the fence, if it is given."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", readme, flags=re.DOTALL | re.MULTILINE)


def example_with(mark: str) -> str:
    """The one Python block that contains ``mark``.

    Raises:
        ValueError: none does, or several do.
    """
    found = [block for block in code_blocks("python") if mark in block]
    if len(found) != 1:
        raise ValueError(f"mark={mark!r}: in {len(found)} Python blocks of the README; name what stands in one")
    return found[0]
