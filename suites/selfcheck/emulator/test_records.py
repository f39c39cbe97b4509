"""The records of races, early reads and uninitialised reads against the oracle, on random programs."""

from __future__ import annotations

import random

import pytest

from mla_conformance.suites.emulator import run_ptx

from .oracle import Found
from .random_programs import SHARED_BYTES, Program, random_program

PROGRAMS = 40


def emulated(program: Program) -> Found:
    """What the emulator finds: kinds and PTX lines."""
    run = run_ptx(program.ptx(), (len(program.iterations),), program.arguments(), shared_bytes=SHARED_BYTES)
    return {(finding.kind, finding.line) for finding in run.findings}


@pytest.mark.parametrize("seed", range(12))
def test_findings_are_those_of_the_definition(seed: int) -> None:
    """On random programs the same kinds are found at the same instructions: no miss, and no false alarm."""
    draw = random.Random(seed)
    for _ in range(PROGRAMS):
        program = random_program(draw)
        text = program.ptx()
        found, expected = emulated(program), program.judged()
        assert found == expected, (
            f"missed {expected - found}, too many {found - expected}\n{program.iterations}\n{text}"
        )
