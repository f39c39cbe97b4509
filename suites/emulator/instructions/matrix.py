"""Matrix products of one warp: mma (PTX ISA, 9.7.14.5).

Products are exact; their sum with the accumulator is taken in float64 and rounded once to the accumulator's type. A
tensor core aligns and truncates in an order that nobody documents, so agreement is to rounding, not to the bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mla_conformance.suites.emulator import formats
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
    shape = _SHAPE.match(parts[3]) if parts[1:3] == ("sync", "aligned") and len(parts) > 8 else None
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


_REGISTER = re.compile(r"%[\w.]+")
_OTHER_MODULES = frozenset(("block_scale", "f64"))
"""Suffixes of ``mma`` forms that have modules of their own."""


def runs(instructions: Sequence[Instruction]) -> Iterator[list[Instruction]]:
    """Cut a block into runs of ``mma`` that can be done together; every other instruction is a run of its own.

    Together can be done: one form, no guards, none writing another's A or B, and accumulators that are either the same
    registers or have none in common.
    """
    run: list[Instruction] = []
    read: set[str] = set()
    accumulators: dict[str, str] = {}
    for ins in instructions:
        if ins.parts[0] != "mma" or not _OTHER_MODULES.isdisjoint(ins.parts) or ins.guard is not None:
            if run:
                yield run
                run = []
            yield [ins]
            continue
        operands = set(_REGISTER.findall(" ".join(ins.operands[1:3])))
        sums = {name: text for text in (*ins.operands[:1], *ins.operands[3:4]) for name in _REGISTER.findall(text)}
        together = (
            run
            and ins.opcode == run[0].opcode
            and not operands & accumulators.keys()
            and not read & sums.keys()
            and all(accumulators.get(name, text) == text for name, text in sums.items())
        )
        if run and not together:
            yield run
            run = []
        if not run:
            read, accumulators = set(), {}
        run.append(ins)
        read |= operands
        accumulators |= sums
    if run:
        yield run


@instruction("mma")
def multiply_accumulate(builder: Builder, ins: Instruction) -> Step:
    """One ``mma.sync.aligned.m16n8k*``."""
    return run(builder, [ins])


class _Operands:
    """The distinct A or B operands of a run, side by side: A [warps, n * 16, k], B [warps, k, n * 8], float64.

    Lane 4 g + t of a warp holds row g (of A, and g + 8) or column g (of B), values of quarter t of each block of k.

    Args:
        kind: type of an element.
        rows: True for A.
    """

    def __init__(self, builder: Builder, form: Form, kind: str, texts: Sequence[str], *, rows: bool) -> None:
        self.values, self.number = OPERANDS[kind]
        self.index = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        self.rows, self.warps = rows, builder.machine.warps
        self.blocks = form.k // (4 * self.values)
        expected = self.blocks * (2 if rows else 1)
        self.registers: list[Array] = []
        for text in self.index:
            names = builder.vector(text)
            if len(names) != expected:
                raise builder.unsupported(f"{len(names)} registers, not {expected}")
            self.registers += [builder.lanes(name, "b32") for name in names]
        count = len(self.index)
        self.words = np.empty((len(self.registers), builder.machine.lanes), "u4")
        self.matrix = np.empty((self.warps, count * ROWS, form.k) if rows else (self.warps, form.k, count * COLUMNS))

    def convert(self) -> Array:
        """Read the registers."""
        for row, register in zip(self.words, self.registers, strict=True):
            row[...] = register
        wide, count = 4 * self.values, len(self.index)
        numbers = self.number(self.words.reshape(-1))
        if self.rows:
            numbers = numbers.reshape(count, self.blocks, 2, self.warps, 8, wide).transpose(3, 0, 2, 4, 1, 5)
            self.matrix.reshape(self.warps, count, 2, 8, self.blocks, wide)[...] = numbers
        else:
            numbers = numbers.reshape(count, self.blocks, self.warps, 8, wide).transpose(2, 1, 4, 0, 3)
            self.matrix.reshape(self.warps, self.blocks, wide, count, 8)[...] = numbers
        return self.matrix


class _Accumulator:
    """One accumulator of a run as a matrix [warps, 16, 8] of its own type.

    Lane 4 g + t holds columns 2 t and 2 t + 1 of rows g and g + 8, in two registers of f16x2 or in four.
    """

    def __init__(self, builder: Builder, form: Form, text: str, *, reads: bool) -> None:
        self.form, self.warps, self.text = form, builder.machine.warps, text
        self.type = "b32" if form.result == "f16" else form.result
        self.sources = [builder.lanes(name, self.type) for name in builder.vector(text)] if reads else []
        self.matrix = np.empty((self.warps, ROWS, COLUMNS), {"f16": "f2", "f32": "f4", "s32": "i4"}[form.result])

    def _places(self, index: int) -> Array:
        """The part of the matrix that register ``index`` holds."""
        if self.form.result == "f16":
            return self.matrix[:, 8 * index : 8 * index + 8, :]
        top = 8 * (index // 2)
        return self.matrix[:, top : top + 8, index % 2 :: 2]

    def load(self) -> None:
        """Registers to matrix."""
        for index, source in enumerate(self.sources):
            place = self._places(index)
            place[...] = source.view(self.matrix.dtype).reshape(place.shape)

    def store(self, targets: Sequence[Array], mask: Mask) -> None:
        """Matrix to registers."""
        if self.form.result != "s32":
            flat = self.matrix.reshape(-1)
            canonical = formats.canonical_nan(flat)
            if canonical is not flat:
                flat[...] = canonical
        where = mask if mask is True else mask.reshape(self.warps, 8, 4)
        if where is not True and self.form.result == "f16":
            where = np.repeat(where, 2, axis=2)
        for index, target in enumerate(targets):
            place = self._places(index)
            np.copyto(target.view(self.matrix.dtype).reshape(place.shape), place, where=where)

    def add(self, products: Array) -> None:
        """Exact products and the accumulator, summed in float64, rounded once."""
        total = products + self.matrix
        if self.form.result != "s32":
            self.matrix[...] = total
        elif self.form.saturate:
            self.matrix[...] = np.clip(total, -(2.0**31), 2.0**31 - 1)
        else:
            self.matrix[...] = total.astype("i8")


def run(builder: Builder, group: Sequence[Instruction]) -> Step:
    """A step for a run of ``mma``: operands converted once, products of a shared operand taken together."""
    form = _form(builder, group[0])
    left = _Operands(builder, form, form.a, [ins.operands[1] for ins in group], rows=True)
    right = _Operands(builder, form, form.b, [ins.operands[2] for ins in group], rows=False)
    written = {ins.operands[0] for ins in group}
    # Whether the run reads an accumulator before it writes it; going backwards, the first use decides last.
    reads = {}
    for ins in reversed(group):
        reads[ins.operands[0]] = False
        reads[ins.operands[3]] = True
    sums = {text: _Accumulator(builder, form, text, reads=reads[text]) for text in reads}
    targets = {text: [builder.destination(name, sums[text].type) for name in builder.vector(text)] for text in written}
    products = _Products(group, left, right)
    machine = builder.machine

    def step(mask: Mask) -> None:
        if mask is not True:
            machine.whole_warps(group[0], mask)
        made = products.take(left.convert(), right.convert())
        for accumulator in sums.values():
            accumulator.load()
        for ins, product in zip(group, made, strict=True):
            accumulator = sums[ins.operands[0]]
            if ins.operands[3] != ins.operands[0]:
                accumulator.matrix[...] = sums[ins.operands[3]].matrix
            accumulator.add(product)
        for text in written:
            sums[text].store(targets[text], mask)

    return step


class _Products:
    """The products of a run, with as few matrix multiplications as its order of operands allows."""

    def __init__(self, group: Sequence[Instruction], left: _Operands, right: _Operands) -> None:
        pairs = [(left.index[ins.operands[1]], right.index[ins.operands[2]]) for ins in group]
        # By A if several B follow each other under one A, else by B.
        self.by_rows = len(left.index) <= len(right.index)
        self.pieces: list[tuple[int, int, int]] = []
        for a, b in pairs:
            fixed, moving = (a, b) if self.by_rows else (b, a)
            if self.pieces and self.pieces[-1][0] == fixed and self.pieces[-1][2] == moving:
                self.pieces[-1] = fixed, self.pieces[-1][1], moving + 1
            else:
                self.pieces.append((fixed, moving, moving + 1))

    def take(self, left: Array, right: Array) -> Iterator[Array]:
        """A product [warps, 16, 8] for each instruction, in order."""
        for fixed, start, end in self.pieces:
            if self.by_rows:
                a = left[:, fixed * ROWS : (fixed + 1) * ROWS]
                wide = np.matmul(a, right[:, :, start * COLUMNS : end * COLUMNS])
                for place in range(end - start):
                    yield wide[:, :, place * COLUMNS : (place + 1) * COLUMNS]
            else:
                b = right[:, :, fixed * COLUMNS : (fixed + 1) * COLUMNS]
                tall = np.matmul(left[:, start * ROWS : end * ROWS], b)
                for place in range(end - start):
                    yield tall[:, place * ROWS : (place + 1) * ROWS]
