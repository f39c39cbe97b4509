"""The limits of a target that every kernel must keep."""

from __future__ import annotations

from collections.abc import Sequence

from mla_conformance.suites.harness.compiler import Compiler
from mla_conformance.suites.harness.cubin import CompiledKernel
from mla_conformance.suites.harness.errors import Mismatch


def over_shared_memory(compiler: Compiler, kernels: Sequence[CompiledKernel]) -> list[str]:
    """Say which kernels need more shared memory than a block of the target may have."""
    target, limit = compiler.target, compiler.target.shared_bytes
    return [
        f"{kernel} needs {kernel.shared_bytes:,} B of shared memory; {target.name} has {limit:,} B"
        for kernel in kernels
        if kernel.shared_bytes > limit
    ]


def spilling(compiler: Compiler, kernels: Sequence[CompiledKernel]) -> list[str]:
    """Say which kernels spill registers or use stack."""
    return [
        f"{kernel} on {compiler.target.name} uses {kernel.stack_bytes} B of stack, limit 0, at {kernel.registers} "
        f"registers: spill stores {kernel.spill_stores}, spill loads {kernel.spill_loads}"
        for kernel in kernels
        if kernel.stack_bytes or kernel.spill_loads or kernel.spill_stores
    ]


def check_budget(compiler: Compiler, kernels: Sequence[CompiledKernel]) -> None:
    """Every kernel fits the shared memory of the target and spills nothing."""
    __tracebackhide__ = True
    broken = over_shared_memory(compiler, kernels) + spilling(compiler, kernels)
    if broken:
        raise Mismatch("; ".join(broken))
