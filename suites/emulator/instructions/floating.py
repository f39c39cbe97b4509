"""Floating-point arithmetic, single, double and half precision (PTX ISA, 9.7.3 to 9.7.5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mla_conformance.suites.emulator import approximations, floats
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.instructions.registry import (
    FLOATS,
    allow,
    elementwise,
    instruction,
    sources_of,
)
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import PACKED, Array

_ROUNDINGS = ("rn", "rz", "rm", "rp")


def _kind(ins: Instruction) -> str:
    return PACKED.get(ins.parts[-1], ins.parts[-1])


def _rounding(ins: Instruction) -> str:
    return next((part for part in ins.parts if part in _ROUNDINGS), "rn")


def _modified(ins: Instruction, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with ``.ftz`` on its operands and result, and ``.sat`` or ``.relu`` on its result."""
    if "ftz" in ins.parts:
        inner = function
        function = lambda *sources: floats.flush(inner(*(floats.flush(source) for source in sources)))  # noqa: E731
    if "sat" in ins.parts:
        unclamped = function
        function = lambda *sources: floats.saturate01(unclamped(*sources))  # noqa: E731
    return function


@instruction("add", "sub", "mul", types=FLOATS)
def arithmetic(builder: Builder, ins: Instruction) -> Step:
    """Rounded once; the default rounding is to nearest even (ptxas may contract what has no ``.rn``)."""
    allow(builder, *_ROUNDINGS, "ftz", "sat")
    kind, rounding = _kind(ins), _rounding(ins)
    function = {"add": floats.add, "sub": floats.sub, "mul": floats.mul}[ins.parts[0]]
    step = _modified(ins, lambda a, b: function(a, b, kind, rounding))
    return elementwise(builder, ins.parts[-1], step, *sources_of(builder, ins.parts[-1]))


@instruction("fma", "mad", types=FLOATS)
def fused_multiply_add(builder: Builder, ins: Instruction) -> Step:
    """Exact product and sum, rounded once; ``mad`` of floats is the same on every target since sm_20."""
    allow(builder, *_ROUNDINGS, "ftz", "sat", "relu")
    kind, rounding = _kind(ins), _rounding(ins)
    step = _modified(ins, lambda a, b, c: floats.fma(a, b, c, kind, rounding))
    if "relu" in ins.parts:
        zero = np.zeros((), "u2" if kind == "bf16" else "f2")
        inner = step
        step = lambda a, b, c: floats.maximum(inner(a, b, c), zero, kind, nan=True)  # noqa: E731
    return elementwise(builder, ins.parts[-1], step, *sources_of(builder, ins.parts[-1]))


@instruction("neg", "abs", types=FLOATS)
def sign(builder: Builder, ins: Instruction) -> Step:
    """The sign bit alone changes, of NaN too; ``.ftz`` flushes."""
    allow(builder, "ftz")
    kind = _kind(ins)
    negate = ins.parts[0] == "neg"

    def change(a: Array) -> Array:
        bits = a.view(f"u{a.dtype.itemsize}")
        top = np.array(1 << (8 * a.dtype.itemsize - 1), bits.dtype)
        return np.asarray(bits ^ top if negate else bits & ~top).view(a.dtype)

    step = _modified(ins, change) if kind != "bf16" else change
    return elementwise(builder, ins.parts[-1], step, *sources_of(builder, ins.parts[-1]))


@instruction("min", "max", types=FLOATS)
def extremum(builder: Builder, ins: Instruction) -> Step:
    """Of two operands, or of three (sm_100 on); a number wins over NaN unless ``.NaN``; -0 is below +0.

    ``.abs`` alone takes magnitudes; with ``.xorsign`` the result's sign is that of both operands' product.
    """
    allow(builder, "ftz", "NaN", "xorsign", "abs")
    kind = _kind(ins)
    nan, xorsign = "NaN" in ins.parts, "xorsign" in ins.parts
    magnitudes = "abs" in ins.parts and not xorsign
    of_two = floats.minimum if ins.parts[0] == "min" else floats.maximum

    def fold(*sources: Array) -> Array:
        if magnitudes:
            sources = tuple(np.abs(source) for source in sources)
        found = sources[0]
        for source in sources[1:]:
            found = of_two(found, source, kind, nan, xorsign)
        return found

    return elementwise(builder, ins.parts[-1], _modified(ins, fold), *sources_of(builder, ins.parts[-1]))


@instruction("div", types=("f32", "f64"))
def divide(builder: Builder, ins: Instruction) -> Step:
    """``div.rn`` and other roundings are exact to the last bit; ``.full`` and ``.approx`` have documented errors."""
    allow(builder, *_ROUNDINGS, "ftz", "full", "approx")
    kind, rounding = _kind(ins), _rounding(ins)
    if "full" in ins.parts:
        function: Callable[..., Any] = approximations.divide_full
    elif "approx" in ins.parts:
        function = approximations.divide_approx
    else:
        function = lambda a, b: floats.divide(a, b, kind, rounding)  # noqa: E731
    return elementwise(builder, ins.parts[-1], _modified(ins, function), *sources_of(builder, ins.parts[-1]))


@instruction("rcp", "sqrt", types=("f32", "f64"))
def root_or_reciprocal(builder: Builder, ins: Instruction) -> Step:
    """Rounded forms to the last bit; ``.approx`` is rounded once too, which its documented error allows."""
    allow(builder, *_ROUNDINGS, "ftz", "approx")
    kind, rounding = _kind(ins), _rounding(ins)
    function = floats.reciprocal if ins.parts[0] == "rcp" else floats.sqrt
    step = _modified(ins, lambda a: function(a, kind, rounding))
    return elementwise(builder, ins.parts[-1], step, *sources_of(builder, ins.parts[-1]))


@instruction("ex2", "lg2", "rsqrt", "sin", "cos", "tanh", types=FLOATS)
def approximation(builder: Builder, ins: Instruction) -> Step:
    """``.approx`` functions: computed in float64 and rounded once, within the documented error."""
    allow(builder, "approx", "ftz")
    kind = _kind(ins)
    function = {
        "ex2": approximations.ex2,
        "lg2": approximations.lg2,
        "rsqrt": approximations.rsqrt,
        "sin": approximations.sin,
        "cos": approximations.cos,
        "tanh": approximations.tanh,
    }[ins.parts[0]]
    step = _modified(ins, lambda a: function(a, kind))
    return elementwise(builder, ins.parts[-1], step, *sources_of(builder, ins.parts[-1]))


@instruction("copysign", types=("f32", "f64"))
def copy_sign(builder: Builder, ins: Instruction) -> Step:
    """The magnitude of ``b`` with the sign of ``a``."""
    allow(builder)
    return elementwise(builder, ins.parts[-1], lambda a, b: np.copysign(b, a), *sources_of(builder, ins.parts[-1]))


@instruction("testp", types=("f32", "f64"))
def test_property(builder: Builder, ins: Instruction) -> Step:
    """``testp.finite`` and its like."""
    tests: dict[str, Callable[[Array], Any]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a: ~np.isnan(a),
        "notanumber": np.isnan,
        "normal": lambda a: np.isfinite(a) & ((a == 0) | (np.abs(a) >= np.finfo(a.dtype).tiny)),
        "subnormal": lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny),
    }
    test = tests.get(ins.parts[1])
    if test is None:
        raise builder.unsupported()
    return elementwise(builder, "pred", test, builder.source(ins.operands[1], ins.parts[-1]))
