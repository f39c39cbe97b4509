"""A functional PTX emulator: runs the PTX that Triton compiles for an absent GPU, on the CPU, with checks.

    from mla_conformance.suites.emulator import emulate

    with emulate(target="sm_120") as run:
        kernel[grid](x, y, n, BLOCK=128)  # CPU tensors
    assert not run.findings, run.report()

:func:`emulate` captures Triton launches; :func:`run_ptx` runs a PTX text with arguments. ``docs/emulator.md`` says what
is modelled, what each finding means, and what a run does not show (nothing of ptxas, nothing of silicon).
"""

from mla_conformance.suites.emulator.emulate import Emulation, Launch, emulate
from mla_conformance.suites.emulator.errors import EmulationStopped, EmulatorError, PTXError, UnsupportedInstruction
from mla_conformance.suites.emulator.execution import Run, run_ptx
from mla_conformance.suites.emulator.findings import Finding, Kind

__all__ = [
    "Emulation",
    "EmulationStopped",
    "EmulatorError",
    "Finding",
    "Kind",
    "Launch",
    "PTXError",
    "Run",
    "UnsupportedInstruction",
    "emulate",
    "run_ptx",
]
