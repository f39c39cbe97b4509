"""The registry of translators, and the two shapes that most of them have.

Adding an instruction is one function in the module of its group (the groups of the PTX manual), decorated with
:func:`instruction`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import numpy as np

from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.errors import PTXError
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import PACKED, Array, Mask

Translator: TypeAlias = Callable[[Builder, Instruction], Step]
INTEGERS = frozenset(f"{kind}{bits}" for kind in "sub" for bits in (8, 16, 32, 64)) | {"s16x2", "u16x2"}
FLOATS = frozenset(("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"))
_TRANSLATORS: dict[str, list[tuple[Collection[str] | None, Translator]]] = {}
VARIABLE_ARGUMENTS = 0x04
_KINDS = ("bulk", "block_scale")
"""Suffixes that make another instruction of a mnemonic; it is registered as ``mnemonic.suffix``."""


def instruction(*mnemonics: str, types: Collection[str] | None = None) -> Callable[[Translator], Translator]:
    """Register the translator of these mnemonics (opcode up to its first dot), for these last suffixes if given."""

    def register(translator: Translator) -> Translator:
        for mnemonic in mnemonics:
            _TRANSLATORS.setdefault(mnemonic, []).append((types, translator))
        return translator

    return register


def mnemonics() -> list[str]:
    """Every mnemonic that has a translator."""
    return sorted(_TRANSLATORS)


def translate(builder: Builder, instruction: Instruction) -> Step:
    """The step of one instruction, its guard not yet applied.

    Raises:
        UnsupportedInstruction: no translator, or one that refuses this form.
        PTXError: operands that are too few, too many or of the wrong shape.
    """
    builder.start(instruction)
    parts = instruction.parts
    name = ".".join([parts[0], *(part for part in _KINDS if part in parts)])
    # A translator for certain types comes before one for all of them.
    for types, translator in sorted(_TRANSLATORS.get(name, ()), key=lambda entry: entry[0] is None):
        if types is None or parts[-1] in types:
            try:
                return translator(builder, instruction)
            except (IndexError, KeyError, ValueError) as error:
                message = f"PTX line {instruction.line}: operands that do not fit: `{instruction.text}`"
                raise PTXError(message) from error
    raise builder.unsupported()


def elementwise(builder: Builder, type_: str, function: Callable[..., Any], *sources: Array) -> Step:
    """A step that computes ``function(*sources)`` and writes it to the first operand, a register of ``type_``."""
    _check_count(builder, function, len(sources))
    target = builder.destination(builder.instruction.operands[0], type_)
    if type_ in PACKED:
        return lambda mask: np.copyto(
            target, function(*sources), where=mask if mask is True else np.repeat(mask, 2), casting="unsafe"
        )
    return lambda mask: np.copyto(target, function(*sources), where=mask, casting="unsafe")


def ufunc(builder: Builder, type_: str, function: np.ufunc, *sources: Array) -> Step:
    """As :func:`elementwise`, for a NumPy function that can write in place."""
    _check_count(builder, function, len(sources))
    target = builder.destination(builder.instruction.operands[0], type_)
    if all(source.dtype == target.dtype for source in sources) and type_ not in PACKED:

        def step(mask: Mask) -> None:
            function(*sources, out=target, where=mask)

        return step
    return elementwise(builder, type_, function, *sources)


def _check_count(builder: Builder, function: Callable[..., Any], count: int) -> None:
    """Refuse more or fewer sources than the function takes, where that can be told."""
    code = getattr(function, "__code__", None)
    if isinstance(function, np.ufunc):
        fits = count == function.nin
    elif code is None or code.co_flags & VARIABLE_ARGUMENTS:
        fits = True
    else:
        defaults = len(getattr(function, "__defaults__", None) or ())
        fits = code.co_argcount - defaults <= count <= code.co_argcount
    if not fits:
        raise builder.unsupported(f"{count} source operands")


def sources_of(builder: Builder, type_: str, first: int = 1) -> list[Array]:
    """The source operands from number ``first`` on, all of one type."""
    return [builder.source(text, type_) for text in builder.instruction.operands[first:]]


def allow(builder: Builder, *known: str) -> None:
    """Refuse an opcode with a suffix besides its mnemonic, its last type and those known.

    Raises:
        UnsupportedInstruction: naming the suffix.
    """
    for part in builder.instruction.parts[1:-1]:
        if part not in known:
            raise builder.unsupported(f".{part}")
