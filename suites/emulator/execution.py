"""Running a PTX text: arguments in, findings out."""

from __future__ import annotations

import hashlib
import math
import operator
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mla_conformance.suites.emulator.accesses import WARP
from mla_conformance.suites.emulator.errors import EmulationStopped, PTXError
from mla_conformance.suites.emulator.findings import Finding, Findings
from mla_conformance.suites.emulator.machine import Machine
from mla_conformance.suites.emulator.program import Program
from mla_conformance.suites.emulator.ptx import Entry, Instruction, parse
from mla_conformance.suites.emulator.shared import ROW, SharedMemory
from mla_conformance.suites.emulator.tensormaps import HostTensorMap
from mla_conformance.suites.emulator.types import Array, dtype_of

LANES = 2048
"""Threads of a batch: a NumPy call on so many costs hardly more than on a warp, and more gains nothing."""
BUDGET = 50_000_000
"""Vector instructions after which a run is given up."""
MAX_CTAS = 1 << 22
"""Of a grid: a card takes more, which would run for hours here."""
MAX_SHARED_BYTES = 1 << 24
_KEPT = 64
_SMALL = {"mbarrier": 8, "tensormap": 4}
"""Bytes of the smallest access of instructions that touch shared memory besides loads, stores and copies."""


@dataclass(frozen=True)
class Run:
    """What one launch did.

    Args:
        findings: every fault, each once.
        instructions: vector instructions executed.
        ctas: CTAs of the grid.
    """

    findings: list[Finding]
    instructions: int
    ctas: int


def run_ptx(
    ptx: str,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    *,
    shared_bytes: int = 0,
    threads: int | None = None,
    check: bool = True,
    budget: int = BUDGET,
) -> Run:
    """Run the one entry of a PTX text on the CPU.

    Args:
        ptx: the text, as ``compiled_kernel.asm["ptx"]`` of Triton has it.
        grid: one to three numbers of CTAs.
        arguments: one for each ``.param``: CPU torch tensors (passed as pointers, written in place), integers,
            floats, a :class:`~mla_conformance.suites.emulator.tensormaps.HostTensorMap` for a tensor map passed by
            value. Triton adds two scratch pointers to what a kernel declares; pass 0 for them.
        shared_bytes: dynamic shared memory of a CTA.
        threads: threads of a CTA, where the text has no ``.reqntid``.
        check: False leaves out the records of races and uninitialised reads; bounds are always checked.
        budget: vector instructions, of all batches of CTAs together, after which the run is given up.

    Raises:
        PTXError: the text or the arguments do not fit.
        UnsupportedInstruction: an instruction is not implemented.
        EmulationStopped: the budget is spent.
    """
    sizes = _grid(grid)
    kernel = _prepared(ptx, threads, shared_bytes, check, sizes[0] * sizes[1] * sizes[2])
    return kernel.launch(sizes, arguments, budget)


class Kernel:
    """An entry, translated for batches of ``ctas`` CTAs; may be launched again and again."""

    def __init__(self, entry: Entry, threads: int, shared_bytes: int, ctas: int, *, check: bool) -> None:
        self.entry = entry
        self.findings = Findings()
        addresses, shared_size, local_size = _layout(entry, shared_bytes)
        shared = SharedMemory(
            shared_size, threads, ctas, _grain(entry), self.findings, warp_barriers=_warp_barriers(entry), check=check
        )
        self.machine = Machine(threads, ctas, shared, self.findings)
        self.machine.addresses = addresses
        self.machine.local = np.zeros(local_size * self.machine.lanes, "u1")
        for variable in entry.variables.values():
            if variable.initial is not None:
                data = np.frombuffer(bytearray(variable.initial), np.uint8)
                addresses[variable.name] = self.machine.memory.map_bytes(data, f"variable {variable.name}")
        self.program = Program(entry, self.machine)
        self._constants = len(self.machine.memory)

    def launch(self, grid: tuple[int, int, int], arguments: Sequence[Any], budget: int = BUDGET) -> Run:
        """Run every CTA of the grid."""
        machine = self.machine
        self.findings.clear()
        machine.memory.forget(self._constants)
        machine.instructions = 0
        self._bind(arguments)
        for axis, size in zip("xyz", grid, strict=True):
            machine.special[f"%nctaid.{axis}"][:] = size
        total = grid[0] * grid[1] * grid[2]
        try:
            with np.errstate(all="ignore"):
                for start in range(0, total, machine.ctas):
                    batch = np.arange(start, min(start + machine.ctas, total))
                    machine.run(self.program.blocks, batch, grid, budget)
        except EmulationStopped as stopped:
            first = next(iter(self.findings), None)
            if first is None:
                raise
            raise EmulationStopped(f"{stopped}. Found before that: {first}") from None
        finally:
            # The kernel is kept for its next launch, the caller's tensors are not.
            machine.memory.forget(self._constants)
        return Run(list(self.findings), machine.instructions, total)

    def _bind(self, arguments: Sequence[Any]) -> None:
        parameters = self.entry.parameters
        if len(arguments) != len(parameters):
            raise PTXError(
                f"{self.entry.name} has {len(parameters)} parameters, {len(arguments)} arguments were given "
                "(Triton adds two scratch pointers to the kernel's own: pass 0, 0)"
            )
        for parameter, value in zip(parameters, arguments, strict=True):
            place = self.program.builder.parameters[parameter.name]
            if hasattr(value, "untyped_storage"):
                if value.device.type != "cpu":
                    raise PTXError(
                        f"argument {parameter.name}: a tensor on {value.device}; the emulator needs CPU tensors"
                    )
                value = self.machine.memory.map_tensor(value)
            elif isinstance(value, HostTensorMap):
                value = value.encoded(self.machine.memory.map_tensor(value.base))
            try:
                place[...] = _as_parameter(value, parameter.type, parameter.count)
            except (TypeError, ValueError, KeyError, OverflowError) as error:
                wanted = f".{parameter.type}" + (f"[{parameter.count}], as bytes" if parameter.count > 1 else "")
                raise PTXError(f"argument {parameter.name}={value!r}: the kernel takes {wanted}") from error


def _as_parameter(value: Any, type_: str, count: int) -> Array:
    dtype = dtype_of(type_)
    if count != 1:
        data = np.frombuffer(value, dtype)
        if len(data) != count:
            raise PTXError(f"an argument of {len(data)} bytes for a parameter of {count}")
        return data
    if dtype.kind == "f":
        return np.array(value, dtype)
    if isinstance(value, float):
        # Triton passes fp32 arguments as .f32 or, in newer versions, as their bits.
        return np.array(value, {4: "f4", 8: "f8", 2: "f2"}[dtype.itemsize]).view(dtype)
    return np.array(int(value) & (2 ** (8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").view(dtype)


def _grid(grid: tuple[int, ...]) -> tuple[int, int, int]:
    try:
        sizes = tuple(operator.index(size) for size in grid)
    except TypeError:
        sizes = ()
    if not 1 <= len(sizes) <= 3 or min(sizes) < 0 or math.prod(sizes) > MAX_CTAS:
        raise PTXError(f"grid={grid!r}: one to three non-negative whole numbers, at most {MAX_CTAS} CTAs")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


# ---- preparation

_prepared_kernels: OrderedDict[tuple[Any, ...], Kernel] = OrderedDict()


def _prepared(ptx: str, threads: int | None, shared_bytes: int, check: bool, total: int) -> Kernel:
    """The translated kernel, from this process's memory if it was launched before."""
    digest = hashlib.sha256(ptx.encode()).digest()
    entry_key = (digest, threads, shared_bytes, check)
    for key, kernel in _prepared_kernels.items():
        if key[:4] == entry_key and key[4] == _batch(kernel.machine.threads, total):
            _prepared_kernels.move_to_end(key)
            return kernel
    entry = parse(ptx)
    count = entry.threads or threads
    if count is None or count % WARP or not 0 < count <= 1024 or (threads is not None and threads != count):
        raise PTXError(
            f"{entry.name}: {count} threads (.reqntid {entry.threads}, threads={threads}); whole warps up to 1024"
        )
    ctas = _batch(count, total)
    kernel = Kernel(entry, count, shared_bytes, ctas, check=check)
    _prepared_kernels[*entry_key, ctas] = kernel
    if len(_prepared_kernels) > _KEPT:
        _prepared_kernels.popitem(last=False)
    return kernel


def _batch(threads: int, total: int) -> int:
    """CTAs of a batch: near LANES threads, and dividing the grid so that no lane idles, if that costs at most half."""
    most = max(1, min(LANES // threads, total))
    return next((count for count in range(most, most // 2, -1) if total % count == 0), most)


def _layout(entry: Entry, dynamic: int) -> tuple[dict[str, int], int, int]:
    """Addresses of shared and local variables; static shared memory comes before the dynamic one."""
    if not 0 <= dynamic <= MAX_SHARED_BYTES:
        raise PTXError(f"shared_bytes={dynamic}: a number from 0 to {MAX_SHARED_BYTES}")
    addresses: dict[str, int] = {}
    ends = {"shared": 0, "local": 0}
    # Variables without a size (.extern) get what the launch gives, after the sized ones.
    for variable in sorted(entry.variables.values(), key=lambda v: v.size == 0):
        if variable.space not in ends:
            continue
        start = -(-ends[variable.space] // variable.align) * variable.align
        addresses[variable.name] = start
        ends[variable.space] = start + variable.size
    return addresses, ends["shared"] + dynamic, -(-ends["local"] // ROW) * ROW


def _warp_barriers(entry: Entry) -> bool:
    return any(ins.parts[0] == "tensormap" or "warp" in ins.parts for block in entry.blocks for ins in block)


def _copied_bytes(ins: Instruction) -> int:
    sizes = {"0x4": 4, "4": 4, "0x8": 8, "8": 8, "0x10": 16, "16": 16}
    if ins.operands[2] not in sizes:
        raise PTXError(f"PTX line {ins.line}: a copy has 4, 8 or 16 bytes: `{ins.text}`")
    return sizes[ins.operands[2]]


def _grain(entry: Entry) -> int:
    """Bytes of the smallest access that may touch shared memory: the grain of the records."""
    sizes = [ROW]
    for ins in (ins for block in entry.blocks for ins in block):
        parts = ins.parts
        if parts[0] in _SMALL:
            sizes.append(_SMALL[parts[0]])
        if parts[0] in ("ld", "st", "atom", "red") and not {"global", "param", "local", "const"} & set(parts):
            vector = next((int(part[1]) for part in parts if part in ("v2", "v4", "v8")), 1)
            packed = 2 if parts[-1].endswith("x2") else 1
            sizes.append(dtype_of(parts[-1]).itemsize * vector * packed)
        if parts[:2] == ("cp", "async") and "bulk" not in parts and len(ins.operands) > 2:
            sizes.append(_copied_bytes(ins))
    return min(sizes)
