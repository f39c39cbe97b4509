"""The README's commands are those that CI runs."""

import re

from mla_conformance.suites.selfcheck.conftest import ROOT


def test_ci_runs_the_commands_of_the_readme_as_written() -> None:
    """Every command of ``.ci/run`` stands in a code block of the README, word for word, and there are two."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```$", readme, flags=re.DOTALL | re.MULTILINE)
    documented = {line for block in blocks for line in block.splitlines()}
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in script if "tox run" in line]
    assert len(commands) == 2
    assert set(commands) <= documented
