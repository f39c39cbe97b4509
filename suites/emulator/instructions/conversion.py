"""Conversions (PTX ISA, 9.7.9.21 cvt)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mla_conformance.suites.emulator import floats, formats, integers
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.instructions.registry import elementwise, instruction
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import Array, Mask, dtype_of, is_float

_FLOAT_ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
_INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")
_SMALL_PAIRS = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2", "ue8m0x2")
_KNOWN = {*_FLOAT_ROUNDINGS, *_INTEGER_ROUNDINGS, "sat", "satfinite", "relu", "ftz"}


@instruction("cvt")
def convert(builder: Builder, ins: Instruction) -> Step:
    """Every scalar pair, pairs of small floats from and to pairs, and two f32 packed into one register."""
    target, source = ins.parts[-2:]
    unknown = [part for part in ins.parts[1:-2] if part not in _KNOWN]
    if unknown:
        raise builder.unsupported(f".{unknown[0]}")
    if target in _SMALL_PAIRS or source in _SMALL_PAIRS:
        return _small_pair(builder, ins, target, source)
    if target in ("f16x2", "bf16x2") and source == "f32":
        return _pack_two(builder, ins, target)
    if target == "tf32":
        return _to_tf32(builder, ins)
    return _scalar(builder, ins, target, source)


def _rounding(ins: Instruction, default: str = "rn") -> str:
    known = _FLOAT_ROUNDINGS + _INTEGER_ROUNDINGS
    return next((part for part in ins.parts if part in known), default)


# ---- scalars


def _scalar(builder: Builder, ins: Instruction, target: str, source: str) -> Step:
    value = builder.source(ins.operands[1], source)
    if is_float(source) and is_float(target):
        function = _float_to_float(builder, ins, target, source)
    elif is_float(source):
        function = _float_to_integer(ins, target, source)
    elif is_float(target):
        rounding = _rounding(ins)
        function = lambda a: formats.int_to_float(a, target, rounding)  # noqa: E731
        if "sat" in ins.parts:
            inner = function
            function = lambda a: floats.saturate01(inner(a))  # noqa: E731
    else:
        dtype = dtype_of(target)
        # Truncation is what NumPy's own cast does; the register's width then extends it.
        function = (lambda a: integers.saturate(a, dtype)) if "sat" in ins.parts else (lambda a: a.astype(dtype))
    return elementwise(builder, target, function, value)


def _float_to_float(builder: Builder, ins: Instruction, target: str, source: str) -> Callable[[Array], Any]:
    rounding = _rounding(ins, "")
    if rounding in _INTEGER_ROUNDINGS:
        if target != source:
            raise builder.unsupported()
        function: Callable[[Array], Any] = lambda a: formats.round_to_integral(a, rounding)  # noqa: E731
    else:
        function = _narrowing(target, source, rounding or "rn", saturate="satfinite" in ins.parts)
    if "ftz" in ins.parts:
        inner = function
        function = lambda a: inner(floats.flush(a) if a.dtype == np.float32 else a)  # noqa: E731
        if target == "f32":
            unflushed = function
            function = lambda a: floats.flush(unflushed(a))  # noqa: E731
    if "sat" in ins.parts:
        unclamped = function
        function = lambda a: floats.saturate01(unclamped(a))  # noqa: E731
    if "relu" in ins.parts:
        signed = function
        function = lambda a: _relu(signed(a), target)  # noqa: E731
    return function


def _narrowing(target: str, source: str, rounding: str, *, saturate: bool) -> Callable[[Array], Any]:
    if target == source:
        return lambda a: a
    if (source, target) == ("bf16", "f32"):
        return formats.f32_from_bf16
    if (source, target) == ("f32", "bf16") and rounding in ("rn", "rz") and not saturate:
        return lambda a: formats.bf16_from_f32(a, rounding)
    if (source, target) == ("f16", "f32"):
        return lambda a: _f32_of_f16().take(a.view("u2"))
    if (source, target) == ("f32", "f16") and rounding == "rn" and not saturate:
        return lambda a: formats.canonical_nan(a.astype("f2"))
    if target == "bf16" and source == "f16" and rounding == "rn" and not saturate:
        return lambda a: _bf16_of_f16().take(a.view("u2"))
    if target == "f64":
        return lambda a: formats.widen(a, source)
    return lambda a: formats.narrow(formats.widen(a, source), target, rounding, saturate)


@functools.cache
def _f32_of_f16() -> Array:
    """The float32 of each of the 65,536 float16 codes."""
    return formats.canonical_nan(np.arange(2**16, dtype="u2").view("f2").astype("f4"))


@functools.cache
def _bf16_of_f16() -> Array:
    """The bf16 of each of the 65,536 float16 codes; float16 to float32 is exact, so there is one rounding."""
    return formats.bf16_from_f32(_f32_of_f16())


def _float_to_integer(ins: Instruction, target: str, source: str) -> Callable[[Array], Any]:
    rounding, dtype, flush = _rounding(ins, "rzi"), dtype_of(target), "ftz" in ins.parts

    def function(a: Array) -> Array:
        wide = formats.f32_from_bf16(a) if source == "bf16" else a
        return formats.float_to_int(floats.flush(wide) if flush else wide, dtype, rounding)

    return function


def _relu(a: Array, kind: str) -> Array:
    zero = np.zeros((), a.dtype)
    return floats.maximum(a, zero, kind, nan=True)


# ---- pairs


def _to_tf32(builder: Builder, ins: Instruction) -> Step:
    if ins.parts[-1] != "f32":
        raise builder.unsupported()
    rounding, saturate, relu = _rounding(ins), "satfinite" in ins.parts, "relu" in ins.parts

    def narrow(a: Array) -> Array:
        found = formats.narrow(a, "tf32", rounding, True) if saturate else formats.tf32_from_f32(a, rounding)
        return np.asarray(_relu(found, "f32") if relu else found).view("u4")

    return elementwise(builder, "b32", narrow, builder.source(ins.operands[1], "f32"))


def _pack_two(builder: Builder, ins: Instruction, target: str) -> Step:
    """``cvt.rn.bf16x2.f32 d, a, b``: ``a`` becomes the upper half."""
    kind, rounding = target.removesuffix("x2"), _rounding(ins)
    narrow = _narrowing(kind, "f32", rounding, saturate="satfinite" in ins.parts)
    relu = "relu" in ins.parts
    halves = builder.destination(ins.operands[0], "b32").view(dtype_of(kind))
    upper, lower = (builder.source(text, "f32") for text in ins.operands[1:3])
    pairs = np.empty(len(halves), "f4")

    def step(mask: Mask) -> None:
        pairs[0::2], pairs[1::2] = lower, upper
        value = narrow(pairs)
        where = mask if mask is True else np.repeat(mask, 2)
        np.copyto(halves, _relu(value, kind) if relu else value, where=where)

    return step


def _small_pair(builder: Builder, ins: Instruction, target: str, source: str) -> Step:
    rounding, relu = _rounding(ins), "relu" in ins.parts
    if target in _SMALL_PAIRS and source in ("f32", "f16x2", "bf16x2"):
        kind = target.removesuffix("x2")
        if source == "f32":
            upper, lower = (builder.source(text, "f32") for text in ins.operands[1:3])
            pair: Callable[[], tuple[Any, Any]] = lambda: (upper, lower)  # noqa: E731
        else:
            halves, wide = builder.lanes(ins.operands[1], source), source.removesuffix("x2")
            pair = lambda: (formats.widen(halves[1::2], wide), formats.widen(halves[0::2], wide))  # noqa: E731
        # PTX's conversions to these formats saturate, .satfinite being mandatory.
        return _join(
            builder, kind, lambda x: formats.narrow(np.maximum(x, 0) if relu else x, kind, rounding, True), pair
        )
    if source in _SMALL_PAIRS and target in ("f16x2", "bf16x2"):
        return _widen_pair(builder, ins, source.removesuffix("x2"), target, relu)
    raise builder.unsupported()


def _join(builder: Builder, kind: str, code: Callable[[Any], Any], pair: Callable[[], tuple[Any, Any]]) -> Step:
    """Two codes into one register: of eight bits each, or four for e2m1."""
    bits = 4 if kind == "e2m1" else 8

    def join() -> Array:
        upper, lower = pair()
        joined: Array = (code(upper).astype("u2") << bits) | code(lower).astype("u2")
        return joined

    return elementwise(builder, f"u{2 * bits}", join)


def _widen_pair(builder: Builder, ins: Instruction, kind: str, target: str, relu: bool) -> Step:
    bits = 4 if kind == "e2m1" else 8
    codes = builder.source(ins.operands[1], f"u{2 * bits}")
    if target == "f16x2" and kind in ("e4m3", "e5m2") and not relu:
        return elementwise(builder, "u32", lambda pair: formats.f16x2_from_pair(pair, kind), codes)
    wide = target.removesuffix("x2")
    halves = builder.destination(ins.operands[0], "b32").view(dtype_of(wide))

    def step(mask: Any) -> None:
        for half in range(2):
            code = (codes >> (bits * half)) & (2**bits - 1)
            value = formats.narrow(formats.widen(code, kind), wide)
            np.copyto(halves[half::2], _relu(value, wide) if relu else value, where=mask)

    return step
