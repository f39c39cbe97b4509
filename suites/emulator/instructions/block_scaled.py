"""Matrix products with scaled blocks, and of 4- and 6-bit numbers (PTX ISA, 9.7.14.5.14 and 9.7.14.3).

A block of k values of one row of A, or of one column of B, shares a scale. Products are exact, and their scaled sum
with the accumulator is taken in float64 and rounded once, as in ``matrix.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mla_conformance.suites.emulator import formats
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.instructions import matrix
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, Mask

ROWS, COLUMNS, QUAD = 16, 8, 4
# In 8-bit containers (kind::f8f6f4) a 6-bit code fills the low bits; a 4-bit code has two zero bits below it.
CONTAINED = {
    "e4m3": formats.E4M3,
    "e5m2": formats.E5M2,
    "e3m2": formats.E3M2,
    "e2m3": formats.E2M3,
    "e2m1": formats.E2M1[np.arange(256) >> 2 & 15],
}


def _contained(name: str) -> Callable[[Array], Array]:
    return lambda registers: np.asarray(CONTAINED[name][registers.view("u1")])


matrix.OPERANDS.update({name: (4, _contained(name)) for name in ("e3m2", "e2m3", "e2m1")})
SCALES = {"ue8m0": formats.UE8M0, "ue4m3": formats.E4M3[np.arange(256) & 127]}
# By kind: k of the shape, values in a register, and blocks with their scale types.
_KINDS: dict[str, tuple[int, int, dict[int, tuple[str, ...]]]] = {
    "kind:mxf8f6f4": (32, 4, {1: ("ue8m0",)}),
    "kind:mxf4": (64, 8, {2: ("ue8m0",)}),
    "kind:mxf4nvf4": (64, 8, {2: ("ue8m0",), 4: ("ue4m3", "ue8m0")}),
}


@dataclass(frozen=True)
class _Form:
    k: int
    values: int
    blocks: int
    a: str
    b: str
    scale: str


def _form(builder: Builder, ins: Instruction) -> _Form:
    parts = ins.parts
    kind = next((part for part in parts if part in _KINDS), "")
    vector = next((part for part in parts if part.startswith("scale_vec:")), "")
    if not kind or parts[1:3] != ("sync", "aligned") or len(parts) < 13:
        raise builder.unsupported()
    k, values, allowed = _KINDS[kind]
    default = "scale_vec:1X" if kind == "kind:mxf8f6f4" else "scale_vec:2X" if kind == "kind:mxf4" else ""
    blocks = int((vector or default or "scale_vec:0X")[-2])
    result, a, b, c, scale = parts[-5:]
    known = {"row", "col", kind, "block_scale", vector, f"m16n8k{k}"}
    if any(part not in known for part in parts[3:-5]) or (result, c) != ("f32", "f32") or f"m16n8k{k}" != parts[3]:
        raise builder.unsupported()
    if scale not in allowed.get(blocks, ()) or not {a, b} <= (CONTAINED.keys() if values == 4 else {"e2m1"}):
        raise builder.unsupported()
    return _Form(k, values, blocks, a, b, scale)


def _numbers(registers: list[Array], form: _Form, kind: str) -> Array:
    """Registers of a fragment as float64 values [registers, warps, 8, 4 * values]."""
    words = np.stack(registers)
    if form.values == 8:
        codes = np.stack([words >> np.uint32(4 * i) & np.uint32(15) for i in range(8)], -1)
        numbers = formats.E2M1[codes.astype("u1")]
    else:
        numbers = CONTAINED[kind][np.ascontiguousarray(words).view("u1")]
    return np.asarray(numbers.reshape(len(registers), -1, 8, QUAD * form.values))


class _Scales:
    """One scale operand: register, {byte, thread}. ``rows`` are of A, else columns of B."""

    def __init__(self, builder: Builder, form: _Form, register: str, selector: str, *, rows: bool) -> None:
        names = builder.vector(selector)
        if len(names) != 2 or not all(name.isdigit() for name in names):
            raise builder.unsupported("a scale selector in a register")
        self.byte, self.thread = (int(name) for name in names)
        self.data, self.form, self.rows = builder.lanes(register, "b32"), form, rows
        # Of a quad of threads one holds the scale of a column of B; a pair holds those of rows g and g + 8 of A.
        if self.thread >= (QUAD // 2 if rows else QUAD) or self.byte not in range(0, 4, form.blocks):
            raise builder.unsupported(f"scale selector {selector}")

    def numbers(self) -> Array:
        """[warps, 16 or 8, blocks]."""
        quads = self.data.reshape(-1, 8, QUAD)
        if self.rows:
            words = np.concatenate([quads[:, :, 2 * self.thread], quads[:, :, 2 * self.thread + 1]], 1)
        else:
            words = quads[:, :, self.thread]
        codes = np.ascontiguousarray(words).view("u1").reshape(*words.shape, 4)
        return np.asarray(SCALES[self.form.scale][codes[..., self.byte : self.byte + self.form.blocks]])


@instruction("mma.block_scale")
def scaled(builder: Builder, ins: Instruction) -> Step:
    """``mma ... .block_scale.scale_vec::nX d, a, b, c, scale-a, {byte, thread}, scale-b, {byte, thread}``."""
    form, machine = _form(builder, ins), builder.machine
    if len(ins.operands) != 8:
        raise builder.unsupported()
    count = form.k // (QUAD * form.values)
    a, b, c = ([builder.lanes(name, "b32") for name in builder.vector(text)] for text in ins.operands[1:4])
    targets = [builder.destination(name, "f32") for name in builder.vector(ins.operands[0])]
    if (len(a), len(b), len(c), len(targets)) != (2 * count, count, 4, 4):
        raise builder.unsupported()
    scale_a = _Scales(builder, form, ins.operands[4], ins.operands[5], rows=True)
    scale_b = _Scales(builder, form, ins.operands[6], ins.operands[7], rows=False)
    wide = QUAD * form.values
    left, right = np.empty((machine.warps, ROWS, form.k)), np.empty((machine.warps, COLUMNS, form.k))

    def step(mask: Mask) -> None:
        if mask is not True:
            machine.whole_warps(ins, mask)
        for index, block in enumerate(_numbers(a, form, form.a)):
            top, start = 8 * (index % 2), wide * (index // 2)
            left[:, top : top + 8, start : start + wide] = block
        for index, block in enumerate(_numbers(b, form, form.b)):
            right[:, :, wide * index : wide * (index + 1)] = block
        size = form.k // form.blocks
        product = np.matmul(
            left * np.repeat(scale_a.numbers(), size, 2), (right * np.repeat(scale_b.numbers(), size, 2)).swapaxes(1, 2)
        )
        # All sums before any target, which may be an operand.
        sums = [
            product[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2] + accumulator.view("f4").reshape(-1, 8, QUAD)
            for i, accumulator in enumerate(c)
        ]
        for total, target in zip(sums, targets, strict=True):
            np.copyto(target, formats.canonical_nan(total.astype("f4").ravel()), where=mask)

    return step
