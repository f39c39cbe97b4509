"""``mma`` of float64 (PTX ISA, 9.7.14.5.1, .9 to .11): every sum in float64, in no particular order."""

from __future__ import annotations

import re

import numpy as np

from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.instructions.registry import instruction
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Mask

_SHAPES = {"m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"}
_QUAD = 4


@instruction("mma", types={"f64"})
def multiply_accumulate(builder: Builder, ins: Instruction) -> Step:
    """Lane 4 g + t holds A at rows g (and g + 8), columns t, t + 4, ..., and B at the same rows of column g."""
    shape = next((part for part in ins.parts if part in _SHAPES), "")
    if (
        not shape
        or ins.parts[1:3] != ("sync", "aligned")
        or ins.parts[4:] != ("row", "col", "f64", "f64", "f64", "f64")
    ):
        raise builder.unsupported()
    m, n, k = (int(size) for size in re.findall(r"\d+", shape))
    machine, halves, steps = builder.machine, m // 8, k // _QUAD
    a, b, c = ([builder.lanes(name, "f64") for name in builder.vector(text)] for text in ins.operands[1:4])
    targets = [builder.destination(name, "f64") for name in builder.vector(ins.operands[0])]
    if (len(a), len(b), len(c), len(targets)) != (halves * steps, steps, 2 * halves, 2 * halves):
        raise builder.unsupported()
    left, right = np.empty((machine.warps, m, k)), np.empty((machine.warps, n, k))

    def step(mask: Mask) -> None:
        if mask is not True:
            machine.whole_warps(ins, mask)
        for index, values in enumerate(a):
            top, start = 8 * (index % halves), _QUAD * (index // halves)
            left[:, top : top + 8, start : start + _QUAD] = values.reshape(-1, 8, _QUAD)
        for index, values in enumerate(b):
            right[:, :, _QUAD * index : _QUAD * (index + 1)] = values.reshape(-1, 8, _QUAD)
        product = np.matmul(left, right.swapaxes(1, 2))
        sums = [
            product[:, 8 * (i // 2) : 8 * (i // 2) + 8, i % 2 :: 2] + values.reshape(-1, 8, _QUAD)
            for i, values in enumerate(c)
        ]
        for total, target in zip(sums, targets, strict=True):
            np.copyto(target, total.ravel(), where=mask)

    return step
