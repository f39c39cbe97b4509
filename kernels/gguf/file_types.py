"""What reading a GGUF file gives, what it refuses with, and which types of tensors a file can hold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mla_conformance.kernels.gguf.formats import FORMATS

# Numbers by the specification's name; 8 is a string, 9 an array.
SCALAR_TYPES = {
    0: "uint8",
    1: "int8",
    2: "uint16",
    3: "int16",
    4: "uint32",
    5: "int32",
    6: "float32",
    7: "bool",
    10: "uint64",
    11: "int64",
    12: "float64",
}
_Q8_1 = 9
# Name, elements and bytes of a block by ggml's number, of every type that a file can hold.
STORED = {
    **{quant.type_id: (quant.name, quant.block_elements, quant.block_bytes) for quant in FORMATS.values()},
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
}
# How activations are quantised at run time; no file holds it, and gguf-py and ggml disagree on its size.
del STORED[_Q8_1]
_REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

MetadataValue = bool | int | float | str | list[str] | npt.NDArray[np.generic]


class GGUFError(ValueError):
    """A GGUF file is not as it must be.

    Attributes:
        file: The file's path.
        offset: Byte of the file at which the bad field starts.
        field: Which field, in words.
        kind: A short name for what is wrong, such as ``"truncated"``.
    """

    def __init__(self, file: str, offset: int, field: str, kind: str, problem: str) -> None:
        super().__init__(f"{file}: byte {offset}: {field}: {problem}")
        self.file, self.offset, self.field, self.kind = file, offset, field, kind


class TensorEntry(NamedTuple):
    """Where a tensor lies.

    Attributes:
        name: Its name in the file.
        quant: ggml's name of its type, such as ``"Q4_K"``; also the integer types and F64, which are no weights.
        shape: Elements by dimension in numpy order: rows before columns, experts before both.
        offset: First byte of the data in the file.
        nbytes: Bytes of the data.
    """

    name: str
    quant: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Header(NamedTuple):
    """What a GGUF header says.

    Attributes:
        version: 2 or 3.
        alignment: Bytes; every tensor's data starts at a multiple of it.
        metadata: Values by key, in the file's order; arrays of numbers are read-only numpy arrays.
        metadata_types: The value's type by key: ``"uint32"``, ``"string"``, ``"array[string]"``.
        metadata_places: Byte at which the value's type stands, by key.
        tensors: Entries by name, in the file's order.
        tensors_start: Byte at which the list of tensors starts.
        data_start: Byte from which the file counts the tensors' offsets.
    """

    version: int
    alignment: int
    metadata: dict[str, MetadataValue]
    metadata_types: dict[str, str]
    metadata_places: dict[str, int]
    tensors: dict[str, TensorEntry]
    tensors_start: int
    data_start: int


def shown(text: str) -> str:
    """Text from a file, quoted and cut, for a message."""
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}..."


def why_not_stored(number: int) -> tuple[str, str]:
    """Return the kind of refusal and the reason for a type that is not in ``STORED``."""
    if number == _Q8_1:
        return "removed type", f"{number} is Q8_1, which holds activations and is never stored"
    if number in _REMOVED:
        return "removed type", f"{number} was {_REMOVED[number]}, which ggml removed; convert the file again"
    return "unknown type", f"{number} is no ggml type that this reader knows"
