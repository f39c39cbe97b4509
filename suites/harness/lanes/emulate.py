"""The ``emulate`` lane: the PTX compiled for an absent GPU, run on the CPU by this project's emulator."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Self

from mla_conformance.suites.harness.errors import Mismatch, NoResult, Unsupported
from mla_conformance.suites.harness.lanes import base

if TYPE_CHECKING:
    from mla_conformance.suites.harness.implementation import Implementation
    from mla_conformance.suites.harness.problems import Problem

DEFAULT_TARGET = "sm_120"
MAX_PRODUCTS = 3e8
"""Score products of one call; about twenty seconds."""


class Lane(base.Lane):
    """Compiles each launch for ``target`` and runs its PTX, with records of races, early reads and wild accesses.

    A launch that asks for more shared memory than the target has is run all the same, so that its numbers can be
    judged; ``refusals`` then says that a card would refuse it, which a requirement of its own judges.
    """

    name: ClassVar[str] = "emulate"
    shows: ClassVar[str] = (
        "emulate: the PTX that Triton compiled for the target computed these numbers without a race, an early read or "
        "a wild access; this says nothing of ptxas, which turns PTX into machine code, and nothing of silicon"
    )
    target = DEFAULT_TARGET
    tells_refusals: ClassVar[bool] = True
    tells_faults: ClassVar[bool] = True

    def for_targets(self, targets: list[str]) -> list[Self]:
        """One lane for each target asked for; the default one if none was."""
        made = []
        for target in targets or [DEFAULT_TARGET]:
            lane = copy.copy(self)
            lane.target = target
            made.append(lane)
        return made

    def environment(self) -> dict[str, str]:
        """Kernels are compiled, not interpreted; vLLM accepts a missing driver; workers share the cores."""
        return {
            "TRITON_INTERPRET": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def declines(self, problem: Problem, implementation: Implementation) -> str | None:
        """Decline what would take minutes, and fp8 where the target has none."""
        if problem.products > MAX_PRODUCTS:
            return f"the emulator takes no problem of more than {MAX_PRODUCTS:.0e} products: run it on a GPU"
        if problem.rewrites and implementation.compiles_kernels:
            return "the emulator calls it a race when two programs write one address, also if they write the same"
        if "float8_e4m3fn" in problem.dtypes and self.target == "sm_80" and implementation.compiles_kernels:
            return "sm_80 has no e4m3 conversions: Triton compiles them from sm_89 on"
        return None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Emulate the launches inside; a finding fails the case, an instruction that is missing is unsupported."""
        from mla_conformance.suites.emulator import EmulationStopped, Kind, UnsupportedInstruction, emulate

        try:
            with emulate(self.target) as run:
                yield
        except UnsupportedInstruction as error:
            raise Unsupported(f"emulator: {error}") from error
        except EmulationStopped as error:
            raise NoResult(str(error)) from error
        except MemoryError as error:
            raise NoResult(f"out of memory: {error}") from error
        self.refusals = [str(finding) for finding in run.findings if finding.kind is Kind.SHARED_LIMIT]
        faults = [finding for finding in run.findings if finding.kind is not Kind.SHARED_LIMIT]
        if faults:
            raise Mismatch(f"{self.target}: {faults[0]}" + (f" and {len(faults) - 1} more" if len(faults) > 1 else ""))
