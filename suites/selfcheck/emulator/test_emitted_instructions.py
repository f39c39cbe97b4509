"""Every instruction that Triton was seen to emit is implemented, or refused by its text for a stated reason."""

from __future__ import annotations

import pytest

from mla_conformance.suites.emulator import UnsupportedInstruction
from mla_conformance.suites.emulator.execution import Kernel
from mla_conformance.suites.emulator.ptx import parse
from mla_conformance.suites.emulator.survey import load

EMITTED = load()
REFUSED = {
    "wgmma": "sm_90's own matrix path, which no other target has; mma.sync is what the emulator has of matrix products",
}


def refused(opcode: str) -> bool:
    return opcode.split(".")[0] in REFUSED


@pytest.mark.parametrize("opcode", sorted(opcode for opcode in EMITTED if not refused(opcode)))
def test_an_emitted_instruction_is_translated(opcode: str) -> None:
    """In an entry of its own, with the operands that Triton gave it."""
    entry = parse(EMITTED[opcode].module())
    assert any(ins.opcode == opcode for block in entry.blocks for ins in block)
    Kernel(entry, 32, 1024, 1, check=True)


@pytest.mark.parametrize("opcode", sorted(opcode for opcode in EMITTED if refused(opcode)))
def test_a_refused_instruction_is_named(opcode: str) -> None:
    """By its whole text, and on no target but sm_90."""
    assert EMITTED[opcode].targets == {"sm_90"}
    with pytest.raises(UnsupportedInstruction, match=opcode.split(".")[0]):
        Kernel(parse(EMITTED[opcode].module()), 32, 1024, 1, check=True)


def test_the_survey_covers_three_versions_and_six_targets() -> None:
    """What the table in the documents says."""
    assert {version.rsplit(".", 1)[0] for entry in EMITTED.values() for version in entry.versions} == {
        "3.6",
        "3.8",
        "3.9",
    }
    targets = {target for entry in EMITTED.values() for target in entry.targets}
    assert targets == {"sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121"}
