"""Matrix instructions of one warp: mma, ldmatrix, stmatrix (PTX ISA, 9.7.14.5).

Products are exact; their sum with the accumulator is taken in float64 and rounded once to the accumulator's type. A
tensor core aligns and truncates in an order that nobody documents, so agreement is to rounding, not to the bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mla_conformance.suites.emulator import formats
from mla_conformance.suites.emulator.accesses import WARP
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, Mask

ROWS, COLUMNS = 16, 8
"""Of one ``mma``: m16n8."""

# Operand type: values in one 32-bit register, and how they are read as numbers.
OPERANDS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "bf16": (2, lambda r: formats.f32_from_bf16(r.view("u2"))),
    "f16": (2, lambda r: r.view("f2")),
    "tf32": (1, lambda r: (r & np.uint32(0xFFFFE000)).view("f4")),
    "e4m3": (4, lambda r: formats.E4M3[r.view("u1")]),
    "e5m2": (4, lambda r: formats.E5M2[r.view("u1")]),
    "s8": (4, lambda r: r.view("i1")),
    "u8": (4, lambda r: r.view("u1")),
}
_SHAPE = re.compile(r"m16n8k(\d+)$")


@dataclass(frozen=True)
class Form:
    """One form of ``mma``."""

    k: int
    result: str
    a: str
    b: str
    saturate: bool


def _form(builder: Builder, ins: Instruction) -> Form:
    parts = ins.parts
    shape = _SHAPE.match(parts[3]) if parts[1:3] == ("sync", "aligned") and len(parts) > 9 - 1 else None
    known = {"row", "col", "satfinite", "kind:f8f6f4"}
    if shape is None or any(part not in known for part in parts[4:-4]):
        raise builder.unsupported()
    result, a, b, c = parts[-4:]
    k = int(shape[1])
    whole = result == "s32"
    if result != c or result not in ("f32", "f16", "s32") or a not in OPERANDS or b not in OPERANDS:
        raise builder.unsupported()
    if whole != (a in ("s8", "u8")) or OPERANDS[a][0] != OPERANDS[b][0]:
        raise builder.unsupported()
    return Form(k, result, a, b, "satfinite" in parts)


def runs(instructions: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """Cut a block into runs: unguarded ``mma`` of one form whose A and B none of them writes; the rest one by one."""
    run: list[Instruction] = []
    written: set[str] = set()
    for ins in instructions:
        operands = {name for text in ins.operands[1:3] for name in re.findall(r"%[\w.]+", text)}
        fits = ins.parts[0] == "mma" and ins.guard is None
        if run and not (fits and ins.opcode == run[0].opcode and not operands & written):
            yield run
            run, written = [], set()
        if fits:
            run.append(ins)
            written |= set(re.findall(r"%[\w.]+", ins.operands[0]))
        else:
            yield [ins]
    if run:
        yield run


@instruction("mma")
def multiply_accumulate(builder: Builder, ins: Instruction) -> Step:
    """One ``mma.sync.aligned.m16n8k*``."""
    return run(builder, [ins])


class _Fragments:
    """Distinct operands of a run, each converted to float64 once a pass.

    Args:
        rows: True for A (16 x k), False for B (k x 8).
    """

    def __init__(self, builder: Builder, form: Form, kind: str, *, rows: bool) -> None:
        self.builder, self.form, self.rows = builder, form, rows
        self.values, self.number = OPERANDS[kind]
        self.names: dict[str, int] = {}
        self.registers: list[list[Array]] = []
        self.buffers: list[Array] = []

    def index(self, text: str) -> int:
        """The place of an operand among the distinct ones."""
        if text not in self.names:
            registers = [self.builder.lanes(name, "b32") for name in self.builder.vector(text)]
            count = self.form.k // (4 * self.values) * (2 if self.rows else 1)
            if len(registers) != count:
                raise self.builder.unsupported(f"{len(registers)} registers, not {count}")
            shape = (ROWS, self.form.k) if self.rows else (self.form.k, COLUMNS)
            self.names[text] = len(self.registers)
            self.registers.append(registers)
            self.buffers.append(np.empty((self.builder.machine.warps, *shape)))
        return self.names[text]

    def convert(self) -> None:
        """Registers to matrices: lane 4 g + t holds row (of A) or column (of B) g, values of quarter t."""
        wide = 4 * self.values
        warps = self.builder.machine.warps
        for registers, buffer in zip(self.registers, self.buffers, strict=True):
            for i, register in enumerate(registers):
                block = self.number(register).reshape(warps, 8, wide)
                if self.rows:
                    top, left = 8 * (i % 2), wide * (i // 2)
                    buffer[:, top : top + 8, left : left + wide] = block
                else:
                    buffer[:, wide * i : wide * (i + 1), :] = block.swapaxes(1, 2)


def run(builder: Builder, group: Sequence[Instruction]) -> Step:
    """A step for a run of ``mma``: operands that they share are converted once."""
    form = _form(builder, group[0])
    left, right = _Fragments(builder, form, form.a, rows=True), _Fragments(builder, form, form.b, rows=False)
    work = []
    for ins in group:
        builder.start(ins)
        places = left.index(ins.operands[1]), right.index(ins.operands[2])
        accumulators = [builder.lanes(name, _accumulator(form)) for name in builder.vector(ins.operands[3])]
        targets = [builder.destination(name, _accumulator(form)) for name in builder.vector(ins.operands[0])]
        work.append((ins, *places, accumulators, targets))
    machine = builder.machine
    product = np.empty((machine.warps, ROWS, COLUMNS))

    def step(mask: Mask) -> None:
        if mask is not True:
            machine.whole_warps(group[0], mask)
        left.convert()
        right.convert()
        for _, a, b, accumulators, targets in work:
            np.matmul(left.buffers[a], right.buffers[b], out=product)
            _accumulate(form, product, accumulators, targets, mask)

    return step


def _accumulator(form: Form) -> str:
    return "b32" if form.result == "f16" else form.result


def _accumulate(form: Form, product: Array, accumulators: list[Array], targets: list[Array], mask: Mask) -> None:
    """``targets = round(product + accumulators)``: lane 4 g + t holds columns 2 t and 2 t + 1 of rows g and g + 8."""
    warps = len(product)
    if form.result == "f16":
        for i, (accumulator, target) in enumerate(zip(accumulators, targets, strict=True)):
            sums = product[:, 8 * i : 8 * i + 8].reshape(-1, 2) + accumulator.view("f2").reshape(-1, 2)
            np.copyto(target, formats.canonical_nan(sums.astype("f2")).view("u4").ravel(), where=mask)
        return
    # All sums first: a target may be another accumulator of the same instruction.
    sums = [
        product[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2] + accumulator.reshape(warps, 8, 4)
        for i, accumulator in enumerate(accumulators)
    ]
    for total, target in zip(sums, targets, strict=True):
        if form.result == "s32":
            whole = np.clip(total, -(2.0**31), 2.0**31 - 1) if form.saturate else total
            np.copyto(target, whole.astype("i8").astype("i4").ravel(), where=mask)
        else:
            np.copyto(target, formats.canonical_nan(total.astype("f4").ravel()), where=mask)


@instruction("ldmatrix")
def load_matrix(builder: Builder, ins: Instruction) -> Step:
    """``ldmatrix.sync.aligned.m8n8.x1|x2|x4{.trans}.shared.b16``: lane i of a warp names row i % 8 of matrix i / 8."""
    count = _matrices(builder, ins)
    targets = [builder.destination(name, "b32") for name in builder.vector(ins.operands[0])]
    address = builder.address(ins.operands[1])
    if len(targets) != count:
        raise builder.unsupported()
    machine, transposed = builder.machine, "trans" in ins.parts
    naming = machine.lane_in_warp < 8 * count
    everyone = naming if count < 4 else None

    def step(mask: Mask) -> None:
        chosen: Mask = True if everyone is None else everyone
        warps = slice(None)
        if mask is not True:
            warps = machine.whole_warps(ins, mask)
            chosen = naming & np.repeat(warps, WARP)
        pattern = machine.shared.pattern(ins, address.base, address.offset, 16, chosen)
        rows = machine.shared.read(pattern, "u2", 8)
        if len(rows) != 8 * count * machine.warps:
            spread = np.full((machine.lanes, 8), 0xFFFF, "u2")
            spread[pattern.lanes] = rows
            rows = spread[naming]
        matrices = rows.reshape(machine.warps, count, 8, 8)
        if transposed:
            matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
        words = matrices.view("u4").reshape(machine.warps, count, WARP)
        for i, target in enumerate(targets):
            np.copyto(target, words[:, i].ravel(), where=mask)

    return step


@instruction("stmatrix")
def store_matrix(builder: Builder, ins: Instruction) -> Step:
    """The reverse of ``ldmatrix``."""
    count = _matrices(builder, ins)
    sources = [builder.lanes(name, "b32") for name in builder.vector(ins.operands[1])]
    address = builder.address(ins.operands[0])
    if len(sources) != count:
        raise builder.unsupported()
    machine, transposed = builder.machine, "trans" in ins.parts
    naming = machine.lane_in_warp < 8 * count
    # The row that lane i of a warp names, among those of all lanes that name one.
    place = np.cumsum(naming) - 1

    def step(mask: Mask) -> None:
        chosen: Mask = True if count == 4 else naming
        if mask is not True:
            chosen = naming & np.repeat(machine.whole_warps(ins, mask), WARP)
        words = np.stack([source.reshape(machine.warps, 8, 4) for source in sources], 1)
        matrices = words.view("u2")
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        rows = np.ascontiguousarray(matrices).reshape(-1, 8)
        pattern = machine.shared.pattern(ins, address.base, address.offset, 16, chosen)
        machine.shared.write(pattern, rows[place[pattern.lanes]])

    return step


def _matrices(builder: Builder, ins: Instruction) -> int:
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared:cta", "b16"}
    if any(part not in known for part in ins.parts[1:]):
        raise builder.unsupported()
    return next(int(part[1]) for part in ins.parts if part in ("x1", "x2", "x4"))
