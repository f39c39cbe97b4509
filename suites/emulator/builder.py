"""Operands: how an instruction's translator gets at registers, constants and addresses.

A translator turns one instruction into a *step*, a function of the mask of active lanes. It asks its
:class:`Builder` for sources and destinations once, when the kernel is translated; the step then works on those
arrays each time it is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mla_conformance.suites.emulator.errors import PTXError, UnsupportedInstruction
from mla_conformance.suites.emulator.ptx import Entry, Instruction, split_operands
from mla_conformance.suites.emulator.types import PACKED, Array, Mask, dtype_of, is_float

if TYPE_CHECKING:
    from mla_conformance.suites.emulator.machine import Machine

Step: TypeAlias = Callable[[Mask], None]
PARAMETER_ALIGNMENT = 128
_ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:([+-])\s*(-?\w+))?\s*\]$")
# Integers in four bases, bits of a float or a double, and decimal fractions (PTX ISA, 4.5 Constants).
_NUMBER = re.compile(
    r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+|\d+\.\d*([eE][-+]?\d+)?)[uU]?$"
)


@dataclass(frozen=True)
class Address:
    """``[base + offset]``: one base address a lane, in bytes."""

    base: Array
    offset: int

    def of(self, lanes: Array | slice) -> Array:
        """The 64-bit addresses of some lanes."""
        return np.asarray(self.base[lanes].astype("u8") + np.uint64(self.offset % 2**64))


class Builder:
    """Operands of one instruction at a time.

    Attributes:
        instruction: the one being translated.
        machine: what the steps run on.
        read: registers that the instruction reads; filled by the calls below.
        written: registers that it writes.
    """

    def __init__(self, entry: Entry, machine: Machine) -> None:
        self.entry = entry
        self.machine = machine
        self.registers: dict[str, Array] = {}
        self.parameters = {p.name: np.zeros(p.count, dtype_of(p.type)) for p in entry.parameters}
        self._place_arrays()
        self.instruction = Instruction("", "", ())
        self.read: set[str] = set()
        self.written: set[str] = set()

    def _place_arrays(self) -> None:
        """Arrays are passed by value and have addresses, side by side: a tensor map is one."""
        names = [parameter.name for parameter in self.entry.parameters if parameter.count > 1]
        sizes = [-(-self.parameters[name].nbytes // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT for name in names]
        if not names:
            return
        data = np.zeros(sum(sizes), "u1")
        for name, size, end in zip(names, sizes, np.cumsum(sizes).tolist(), strict=True):
            array = self.parameters[name]
            self.parameters[name] = data[end - size : end - size + array.nbytes].view(array.dtype)
            self.machine.addresses[name] = end - size
        self.machine.parameter_base = self.machine.memory.map_bytes(data, "the kernel's parameters")

    def start(self, instruction: Instruction) -> None:
        """Turn to the next instruction."""
        self.instruction = instruction
        self.read, self.written = set(), set()

    def unsupported(self, why: str = "") -> UnsupportedInstruction:
        """The exception to raise for a form that is not implemented."""
        place = f"PTX line {self.instruction.line}"
        return UnsupportedInstruction(
            f"{place}: not implemented: `{self.instruction.text}`{f' ({why})' if why else ''}"
        )

    # ---- registers

    def register(self, name: str) -> Array:
        """The whole array of a register: one value a lane, as wide as declared."""
        if name not in self.registers:
            declared = self.entry.register_type(name)
            if declared is None:
                raise PTXError(f"PTX line {self.instruction.line}: {name} is not declared: `{self.instruction.text}`")
            # A register starts with bits that are no plausible number, so that a use before a write shows.
            dtype = dtype_of(declared)
            wide = 2 if declared in PACKED else 1
            made = np.zeros(self.machine.lanes * wide, dtype)
            if dtype != np.bool_:
                made.view(f"u{dtype.itemsize}")[...] = np.iinfo(f"u{dtype.itemsize}").max
            if wide == 2:
                made = made.view(f"u{2 * dtype.itemsize}")
            self.registers[name] = made
        return self.registers[name]

    def source(self, text: str, type_: str) -> Array:
        """One value a lane of a source operand, seen as ``type_``; a constant gives a 0-d array.

        A packed type gives two values a lane, the low one first.
        """
        if _NUMBER.match(text):
            return self._constant(text, type_)
        special = self.machine.special.get(text)
        if special is not None:
            return special.astype(dtype_of(type_)) if special.dtype.itemsize != dtype_of(type_).itemsize else special
        if text in self.entry.variables:
            return np.array(self.machine.address_of(self.entry.variables[text]), "u8").astype(dtype_of(type_))
        if text in self.parameters:
            if text not in self.machine.addresses:
                raise self.unsupported("the address of a scalar parameter")
            return np.array(self.machine.addresses[text], "u8").astype(dtype_of(type_))
        if text.startswith("%") and self.entry.register_type(text) is None:
            raise self.unsupported(f"{text} is not declared, and no special register known here")
        self.read.add(text)
        array = self.register(text)
        dtype = dtype_of(type_)
        if (array.dtype == np.bool_) != (dtype == np.bool_):
            raise PTXError(f"PTX line {self.instruction.line}: {text} is no .{type_}: `{self.instruction.text}`")
        width = dtype.itemsize * (2 if type_ in PACKED else 1)
        if array.dtype.itemsize < width:
            raise PTXError(
                f"PTX line {self.instruction.line}: {text} is narrower than .{type_}: `{self.instruction.text}`"
            )
        if array.dtype.itemsize == width or type_ in PACKED:
            return array.view(dtype)
        return array.view(dtype)[:: array.dtype.itemsize // width]

    def lanes(self, text: str, type_: str) -> Array:
        """As :meth:`source`, with constants spread over the lanes."""
        found = self.source(text, type_)
        count = self.machine.lanes * (2 if type_ in PACKED else 1)
        return np.full(count, found) if found.ndim == 0 else found

    def destination(self, text: str, type_: str) -> Array:
        """The array to write results of ``type_`` to; as wide as the register, and signed if the type is.

        Writing narrower values extends them as PTX does (9.4.1, operand size exceeding instruction-type size).
        ``_`` gives an array that nobody reads.
        """
        dtype = dtype_of(type_)
        if text == "_":
            return np.zeros(self.machine.lanes * (2 if type_ in PACKED else 1), dtype)
        self.written.add(text)
        array = self.register(text)
        if (array.dtype == np.bool_) != (dtype == np.bool_):
            raise PTXError(f"PTX line {self.instruction.line}: {text} is no .{type_}: `{self.instruction.text}`")
        if array.dtype == dtype:
            return array
        width = dtype.itemsize * (2 if type_ in PACKED else 1)
        if array.dtype.itemsize == width:
            return array.view(dtype)
        if array.dtype.itemsize < width or is_float(type_) or type_ in PACKED:
            raise PTXError(f"PTX line {self.instruction.line}: {text} cannot hold .{type_}: `{self.instruction.text}`")
        return array.view(f"{dtype.kind}{array.dtype.itemsize}")

    def vector(self, text: str) -> tuple[str, ...]:
        """The elements of ``{a, b}``, or the operand alone."""
        return split_operands(text[1:-1]) if text.startswith("{") else (text,)

    # ---- constants and addresses

    def _constant(self, text: str, type_: str) -> Array:
        dtype = dtype_of(type_)
        lower = text.lower()
        if lower.startswith(("0f", "0d")) or "." in lower:
            return self._fraction(lower, type_)
        digits = lower.rstrip("u")
        octal = re.fullmatch(r"-?0[0-7]+", digits)
        number = int(digits, 8 if octal else 0)
        if is_float(type_) and dtype.itemsize > 2:
            raise PTXError(f"PTX line {self.instruction.line}: {text} is no .{type_}: `{self.instruction.text}`")
        if type_ == "pred":
            return np.array(number != 0)
        return self._integer(number, type_)

    def _fraction(self, text: str, type_: str) -> Array:
        """A float's bits: converted where the operand is a float of another width, and taken as bits elsewhere."""
        bits = None if "." in text else np.array(int(text[2:], 16), f"u{8 if text[1] == 'd' else 4}")
        value = np.array(float(text)) if bits is None else bits.view(f"f{bits.dtype.itemsize}")
        if type_ in ("f32", "f64"):
            return value.astype(dtype_of(type_))
        return self._integer(int(bits if bits is not None else value.view("u8")), type_)

    def _integer(self, number: int, type_: str) -> Array:
        dtype = dtype_of(type_)
        bits = 8 * dtype.itemsize
        if type_ in PACKED:
            halves = [(number >> shift) & (2**bits - 1) for shift in (0, bits)]
            return np.tile(np.array(halves, f"u{dtype.itemsize}").view(dtype), self.machine.lanes)
        return np.array(number & (2**bits - 1), f"u{dtype.itemsize}").view(dtype)

    def address(self, text: str) -> Address:
        """A memory operand ``[register]``, ``[register+4]``, ``[variable]``."""
        found = _ADDRESS.match(text)
        if found is None:
            raise self.unsupported(f"address {text}")
        base, sign, offset = found.groups()
        number = int(offset, 0) * (-1 if sign == "-" else 1) if offset else 0
        if base in self.entry.variables:
            return Address(self._everywhere(self.machine.address_of(self.entry.variables[base])), number)
        if _NUMBER.match(base):
            return Address(self._everywhere(int(base, 0)), number)
        self.read.add(base)
        return Address(self.register(base), number)

    def _everywhere(self, address: int) -> Array:
        return np.full(self.machine.lanes, address, "u8")
