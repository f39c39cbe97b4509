"""The ``interpreter`` lane: Triton's interpreter on the CPU; needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from mla_conformance.suites.harness.errors import NoResult, Unsupported
from mla_conformance.suites.harness.lanes import base

if TYPE_CHECKING:
    from mla_conformance.suites.harness.implementation import Implementation
    from mla_conformance.suites.harness.problems import Problem


MAX_PRODUCTS = 3e7
"""Score products of one call; about ten seconds."""


class Lane(base.Lane):
    """Runs a kernel's source with NumPy, one program at a time."""

    name: ClassVar[str] = "interpreter"

    def environment(self) -> dict[str, str]:
        """Triton reads the first when a kernel is decorated; vLLM accepts a missing driver with the second.

        One thread a worker: pytest-xdist's workers share the cores, and small NumPy calls gain nothing from threads.
        """
        return {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def prepare(self) -> None:
        """Repair the interpreter's bfloat16, and believe the repair only if the probe does."""
        from mla_conformance.suites.harness import interpreter_repair

        interpreter_repair.repair()
        self._bfloat16_fault = interpreter_repair.probe()

    def declines(self, problem: Problem, implementation: Implementation) -> str | None:
        """Decline what would take minutes, and bfloat16 where the interpreter computes it wrongly."""
        if problem.products > MAX_PRODUCTS:
            return f"the interpreter takes no problem of more than {MAX_PRODUCTS:.0e} products: run it on a GPU"
        if "bfloat16" in problem.dtypes and implementation.compiles_kernels:
            return self._bfloat16_fault
        return None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Map arithmetic that the repaired interpreter refuses, and exhausted memory."""
        from triton.runtime.errors import InterpreterError

        from mla_conformance.suites.harness.capture import posing_as_cuda
        from mla_conformance.suites.harness.interpreter_repair import refusal

        try:
            with posing_as_cuda():
                yield
        except MemoryError as error:
            raise NoResult(f"out of memory: {error}") from error
        except InterpreterError as error:
            refused = refusal(error)
            if refused is not None:
                raise Unsupported(str(refused)) from error
            raise
