"""Compiled kernels for the tests of the emulator's checks."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .builds import Build

SECONDS = 300


OPEN_IN_THE_MANUAL = {
    "test_product_of_random_operands_is_rounded_once": "in what order a tensor core sums, and how it rounds",
}
"""Tests that hold the emulator to more than the manual promises of a card."""


@pytest.fixture(autouse=True)
def on_the_card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--lane cuda`` an instruction test runs on the GPU of this machine: the card is held to the manual."""
    from mla_conformance.suites.harness import plan

    if "cuda" not in [lane.name for lane in request.config.stash[plan.KEY].lanes]:
        return
    if request.node.originalname in OPEN_IN_THE_MANUAL:
        pytest.skip(f"the manual leaves open {OPEN_IN_THE_MANUAL[request.node.originalname]}")
    from mla_conformance.suites.emulator import UnsupportedInstruction, hardware
    from mla_conformance.suites.emulator.execution import Run

    from . import one_instruction

    def run(*arguments: Any, **options: Any) -> Run:
        try:
            return hardware.run_ptx(*arguments, **options)
        except UnsupportedInstruction as error:
            pytest.skip(f"not an instruction of this card: {error}")

    monkeypatch.setattr(one_instruction, "run_ptx", run)


@pytest.fixture(scope="session")
def build_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Build]:
    """A build by its name; all are compiled once a test run, in a process that does not interpret."""
    # Not at the top: it imports Triton, for which the suite's plugin has to set the environment first.
    from .builds import read

    base = tmp_path_factory.getbasetemp()
    # xdist's workers have folders of their own, side by side.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "builds"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _capture(folder)
            (folder / "complete").touch()

    @cache
    def find(name: str) -> Build:
        path = folder / f"{name}.safetensors"
        if not path.exists():
            pytest.fail(f"{name}: the package of this kernel is not installed; tox.ini names it, section under-test")
        return read(path)

    return find


def _capture(folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "mla_conformance.suites.selfcheck.emulator.capture_builds", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
