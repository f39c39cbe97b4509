"""Capturing Triton launches: every ``kernel[grid](...)`` is compiled for an absent GPU and run in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from mla_conformance.suites.emulator.descriptors import global_scratch, kernel_arguments
from mla_conformance.suites.emulator.execution import BUDGET, run_ptx
from mla_conformance.suites.emulator.findings import Finding, Kind
from mla_conformance.suites.emulator.ptx_only import without_assembler
from mla_conformance.suites.harness.capture import bound_arguments, standing_in
from mla_conformance.suites.harness.targets import TARGETS, Target

WARP_SIZE = 32


@dataclass(frozen=True)
class Launch:
    """One launch that was emulated.

    Args:
        function: name of the ``@triton.jit`` function.
        grid: the CTAs.
        kernel: Triton's compiled kernel, with its ``asm`` and ``metadata``.
        findings: its faults.
        instructions: vector instructions executed.
    """

    function: str
    grid: tuple[int, ...]
    kernel: Any
    findings: list[Finding]
    instructions: int


@dataclass
class Emulation:
    """What happened inside ``with emulate(...)``, in order."""

    target: Target
    launches: list[Launch] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """Of all launches."""
        return [finding for launch in self.launches for finding in launch.findings]

    def report(self) -> str:
        """One paragraph a finding, with the function it is in; "" if there is none."""
        lines = [f"{launch.function}: {finding}" for launch in self.launches for finding in launch.findings]
        return "\n".join(dict.fromkeys(lines))


@contextmanager
def emulate(target: str = "sm_120", *, check: bool = True, budget: int = BUDGET) -> Iterator[Emulation]:
    """Compile every Triton launch inside for ``target`` and run its PTX on the CPU, on CPU tensors, in place.

    CPU tensors say ``is_cuda`` inside, for launchers that insist on it. An autotuned kernel runs in the first
    configuration that its pruning leaves.

    Args:
        target: ``sm_80``, ``sm_89``, ``sm_90``, ``sm_100``, ``sm_120`` or ``sm_121``.
        check: False leaves out the records of races and uninitialised reads.
        budget: vector instructions of a launch after which it is given up.

    Yields:
        the launches so far.

    Raises:
        ValueError: no such target.
        RuntimeError: this process decorates kernels for Triton's interpreter, so there is nothing to compile.
        UnsupportedInstruction: the PTX holds an instruction that the emulator does not implement.
    """
    if target not in TARGETS:
        raise ValueError(f"target={target!r}: unknown; use {', '.join(TARGETS)}")
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set, so kernels are interpreted and not compiled: unset it")
    made = Emulation(TARGETS[target])
    with ExitStack() as stack:
        compile_only = stack.enter_context(standing_in(made.target))
        stack.enter_context(without_assembler())

        def run(fn: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = compile_only(fn, *args, grid=grid, warmup=True, **kwargs)
            if not warmup:
                bound = bound_arguments(fn, args, kwargs)
                sizes = tuple(grid(bound) if callable(grid) else grid)
                _run(made, fn.__name__, kernel, sizes, bound, check, budget)
            return kernel

        stack.enter_context(patch.object(JITFunction, "run", run))
        stack.enter_context(patch.object(Autotuner, "_bench", lambda *args, **kwargs: [1.0, 1.0, 1.0]))
        yield made


def _run(
    made: Emulation, name: str, kernel: Any, grid: tuple[int, ...], bound: dict[str, Any], check: bool, budget: int
) -> None:
    arguments = kernel_arguments(kernel, bound)
    shared = kernel.metadata.shared
    scratch = [global_scratch(kernel, int(np.prod(grid))), 0]
    ran = run_ptx(
        kernel.asm["ptx"],
        grid,
        [*arguments, *scratch],
        shared_bytes=shared,
        threads=kernel.metadata.num_warps * WARP_SIZE,
        check=check,
        budget=budget,
    )
    findings = list(ran.findings)
    if shared > made.target.shared_bytes:
        detail = f"{made.target.name} gives a CTA at most {made.target.shared_bytes} bytes: a card refuses this launch"
        findings.append(Finding(Kind.SHARED_LIMIT, 0, f"{shared} bytes", "", detail, int(np.prod(grid))))
    made.launches.append(Launch(name, grid, kernel, findings, ran.instructions))
