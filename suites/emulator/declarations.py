"""Declarations of a module: variables, parameters, counts of registers (PTX ISA, 5.4 Variables)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mla_conformance.suites.emulator.errors import PTXError
from mla_conformance.suites.emulator.types import DTYPES, dtype_of

MAX_REGISTERS = 1_000_000
"""Of one kernel, as declared."""
MAX_PARAMETER_BYTES = 32_764
"""Of a kernel's parameters together (PTX ISA, 4.4.1)."""
MAX_BYTES = {"shared": 2**24, "local": 2**19, "const": 2**16, "global": 2**28}
"""Of one variable of a state space; what a card gives is checked elsewhere, this only keeps memory from running out."""
_DATA = re.compile(
    r"(?:\.visible\s+|\.extern\s+|\.weak\s+)?\.(global|const|shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"([\w$]+)(?:\[(\d*)\])?(?:\s*=\s*\{?(.*?)\}?)?;"
)
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.ptr\b[^,)]*?)?\s+([\w$]+)(?:\[(\d+)\])?\s*[,)]?$")
_THREADS = re.compile(r"\.reqntid\s+([\d,\s]+)")
_COUNTED = re.compile(r"([%\w$]+)(?:<\s*(\d+)\s*>)?$")


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: ``type`` is ``u64`` and so on; ``count`` elements for an array, else 1."""

    name: str
    type: str
    count: int = 1


@dataclass(frozen=True)
class Variable:
    """A variable of a state space: ``size`` bytes (0: as much as the launch gives), with initial bytes or None."""

    name: str
    space: str
    size: int
    align: int
    initial: bytes | None = None


def variable(statement: str, line: int) -> Variable | None:
    """The variable that a statement declares, None if it is none.

    Raises:
        PTXError: a type, a size, an alignment or an initial value that makes no sense, with the line.
    """
    found = _DATA.match(statement)
    if found is None:
        return None
    space, align, type_, name, count, initial = found.groups()
    if type_ not in DTYPES or type_ == "pred":
        raise PTXError(f"PTX line {line}: no variable has type .{type_}: {statement}")
    width = dtype_of(type_).itemsize
    size = width * int(count) if count else (0 if count == "" else width)
    alignment = int(align or width)
    if size > MAX_BYTES[space] or alignment < 1 or alignment & (alignment - 1):
        most = f"at most {MAX_BYTES[space]} bytes, aligned to a power of two"
        raise PTXError(f"PTX line {line}: a .{space} variable has {most}: {statement}")
    data = bytes(size) if space in ("global", "const") else None
    if initial is not None:
        data = _initial(initial, width, line)
        if len(data) > max(size, width):
            raise PTXError(f"PTX line {line}: {len(data)} initial bytes for {size}: {statement}")
        data = data.ljust(size, b"\0")
    return Variable(name, space, size, alignment, data)


def _initial(text: str, width: int, line: int) -> bytes:
    values = b""
    for value in (part.strip() for part in text.split(",")):
        bits = re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", value)
        try:
            number = int(bits[1], 16) if bits else int(value.rstrip("U"), 0)
        except ValueError:
            raise PTXError(f"PTX line {line}: an initial value that is no number: {value}") from None
        values += (number % 256**width).to_bytes(width, "little")
    return values


def parameter(text: str, line: int) -> Parameter | None:
    """The kernel parameter that a line declares, None if it declares none.

    Raises:
        PTXError: no such type, or too large.
    """
    found = _PARAM.search(text)
    if found is None:
        return None
    made = Parameter(found[2], found[1], int(found[3] or 1))
    if made.type not in DTYPES or made.count * dtype_of(made.type).itemsize > MAX_PARAMETER_BYTES:
        raise PTXError(f"PTX line {line}: no such type, or more than {MAX_PARAMETER_BYTES} bytes: {text}")
    return made


def threads(text: str, line: int) -> int | None:
    """The threads of a block that ``.reqntid`` asks for, None if the line has none.

    Raises:
        PTXError: blocks of more than one dimension.
    """
    found = _THREADS.search(text)
    if found is None:
        return None
    sizes = [int(size or 0) for size in found[1].split(",")]
    if any(size != 1 for size in sizes[1:]):
        raise PTXError(f"PTX line {line}: blocks of more than one dimension are not supported: {text}")
    return sizes[0]


def registers(name: str, line: int) -> tuple[str, int | None]:
    """A declared register's name, and its count for ``%r<8>``.

    Raises:
        PTXError: no name or no count.
    """
    found = _COUNTED.match(name)
    if found is None or int(found[2] or 0) > MAX_REGISTERS:
        raise PTXError(f"PTX line {line}: {name} is no register, or more than {MAX_REGISTERS} of them")
    return found[1], None if found[2] is None else int(found[2])
