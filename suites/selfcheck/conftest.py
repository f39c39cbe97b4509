"""What the project's own tests share: pytest run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 300


@dataclass(frozen=True)
class Run:
    """How a pytest run ended."""

    code: int
    output: str
    results: dict[str, Any]

    def statuses(self) -> dict[str, str]:
        """Status by test, the part in brackets left out where it names the subject only."""
        return {result["test"].split("::")[-1].split("[")[0]: result["status"] for result in self.results["results"]}


@pytest.fixture
def run_pytest(tmp_path: Path) -> Callable[..., Run]:
    """Run pytest in a process of its own, at the top of the checkout unless told otherwise."""

    def run(*arguments: str, cwd: Path = ROOT, environ: Mapping[str, str] | None = None) -> Run:
        results = tmp_path / "results.json"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_", "CUDA_"))}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--results", str(results), *arguments],
            cwd=cwd,
            env=environment | dict(environ or {}),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        found = json.loads(results.read_text()) if results.exists() else {}
        return Run(done.returncode, done.stdout + done.stderr, found)

    return run
