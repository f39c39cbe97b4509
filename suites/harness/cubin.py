"""What a compiled kernel uses: from Triton's metadata, the PTX, and the cubin by the tools in its wheel."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from mla_conformance.suites.harness.capture import WARP_SIZE, Launch
from mla_conformance.suites.harness.targets import Target

TENSOR_CORE_FAMILIES = {
    "mma": r"\b(?:mma\.sync|mma\.sp\S*\.sync|wmma\.mma\.sync)\.",
    "wgmma": r"\bwgmma\.",
    "tcgen05": r"\btcgen05\.",
}
"""PTX instructions by family (PTX ISA, warp-level, asynchronous warpgroup-level and fifth-generation matrix
instructions). Of the last two every instruction counts, fences included: none of them exists elsewhere."""

ASYNC_COPIES = {"cp.async": r"\bcp\.async\.c[ag]\.", "tma": r"\bcp\.async\.bulk\."}
_GLOBAL_LOAD = r"\bld\.global\."
_FRAME = re.compile(r"\bREG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class CompiledKernel:
    """What one kernel, compiled for one target, uses.

    Args:
        name: the ``@triton.jit`` function.
        target: such as ``sm_120``.
        shared_bytes: shared memory that the launch asks for, per block.
        registers: per thread.
        stack_bytes: stack frame and local memory, per thread.
        spill_loads: loads from local memory (``LDL``) in the machine code; None if the disassembler that comes
            with this Triton does not know the target (3.6.0 and sm_121).
        spill_stores: stores to local memory (``STL``), likewise.
        tensor_core_instructions: count in the PTX, by family of ``TENSOR_CORE_FAMILIES``.
        async_copies: count in the PTX, by kind of ``ASYNC_COPIES``.
        global_loads: load instructions from global memory in the PTX, whatever their width.
        programs: blocks of the launch.
        num_warps: warps of a block.
        num_stages: pipeline depth asked for.
        constants: compile-time constants by argument name, as text.
        triton: version of Triton.
        ptxas: version of the assembler used.
        hash: Triton's; equal for equal source, specialisation, options and compiler.
    """

    name: str
    target: str
    shared_bytes: int
    registers: int
    stack_bytes: int
    spill_loads: int | None
    spill_stores: int | None
    tensor_core_instructions: dict[str, int]
    async_copies: dict[str, int]
    global_loads: int
    programs: int
    num_warps: int
    num_stages: int
    constants: dict[str, str]
    triton: str
    ptxas: str
    hash: str

    def __str__(self) -> str:
        """Name and configuration, for messages."""
        chosen = [f"{name}={value}" for name, value in self.constants.items()]
        return f"{self.name} ({', '.join([*chosen, f'{self.num_warps} warps', f'{self.num_stages} stages'])})"

    @property
    def threads(self) -> int:
        """Threads of the whole launch."""
        return self.programs * self.num_warps * WARP_SIZE

    def as_dict(self) -> dict[str, Any]:
        """Plain data, from which ``CompiledKernel(**data)`` rebuilds it."""
        return dataclasses.asdict(self)


def measure(launch: Launch, target: Target) -> CompiledKernel:
    """Read what ``launch``'s kernel uses.

    Raises:
        RuntimeError: a tool of Triton's wheel failed, or printed something else than it does today.
    """
    metadata, asm = launch.kernel.metadata, launch.kernel.asm
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(asm["cubin"])
        usage = _tool(knobs.nvidia.cuobjdump, "-res-usage", str(cubin))
        frames = _FRAME.findall(usage)
        if not frames:
            raise RuntimeError(f"cuobjdump -res-usage printed no REG, STACK and LOCAL: {usage!r}")
        registers, stack, local = (max(map(int, column)) for column in zip(*frames, strict=True))
        # Without a frame there is nowhere to spill to, and disassembling takes longer than all the rest.
        loads, stores = local_memory_accesses(cubin) if stack + local else (0, 0)
    return CompiledKernel(
        name=launch.function,
        target=target.name,
        shared_bytes=metadata.shared,
        registers=registers,
        stack_bytes=stack + local,
        spill_loads=loads,
        spill_stores=stores,
        tensor_core_instructions=_count(TENSOR_CORE_FAMILIES, asm["ptx"]),
        async_copies=_count(ASYNC_COPIES, asm["ptx"]),
        global_loads=len(re.findall(_GLOBAL_LOAD, asm["ptx"])),
        programs=math.prod(launch.grid),
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        constants=launch.constants,
        triton=triton.__version__,
        ptxas=get_ptxas(target.capability).version,
        hash=launch.kernel.hash,
    )


def local_memory_accesses(cubin: Path) -> tuple[int, int] | tuple[None, None]:
    """Count the loads from and the stores to local memory in the machine code, if it can be disassembled."""
    try:
        code = _tool(knobs.nvidia.nvdisasm, "--no-dataflow", "--print-code", str(cubin))
    except RuntimeError as error:
        if "Cannot decode architecture" in str(error):
            return None, None
        raise
    found = Counter(re.findall(r"\b(LDL|STL)\b", code))
    return found["LDL"], found["STL"]


def _count(patterns: dict[str, str], text: str) -> dict[str, int]:
    return {name: len(re.findall(pattern, text)) for name, pattern in patterns.items()}


def _tool(tool: Any, *arguments: str) -> str:
    path = tool.path
    environment = os.environ | {"PATH": os.pathsep.join([os.path.dirname(path), os.environ.get("PATH", "")])}
    done = subprocess.run([path, *arguments], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{os.path.basename(path)} {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout
