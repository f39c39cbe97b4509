"""Writes small GGUF files for tests, and *shape-only* ones of any size whose tensor data is a hole in a sparse file.

A test tool: it writes whatever it is told, so that tests can also write files that a reader must refuse. Layout from
the GGUF specification (ggml-org/ggml, docs/gguf.md); block sizes from gguf-py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

VALUE_TYPES = {kind.name.lower(): int(kind) for kind in gguf.GGUFValueType}
PACKING = {
    "uint8": "<B",
    "int8": "<b",
    "uint16": "<H",
    "int16": "<h",
    "uint32": "<I",
    "int32": "<i",
    "float32": "<f",
    "bool": "<?",
    "uint64": "<Q",
    "int64": "<q",
    "float64": "<d",
}
DEFAULT_ALIGNMENT = 32
# Longer arrays are one field, so that a whole vocabulary is written fast.
SPANNED_ELEMENTS = 64


class Typed(NamedTuple):
    """A metadata value with its GGUF type: ``"uint16"``, ``"string"``, ``"array[int32]"``."""

    type: str
    value: Any


class TensorSpec(NamedTuple):
    """One tensor of a file: shape in numpy order (columns last), data None for a hole."""

    name: str
    quant: str
    shape: tuple[int, ...]
    data: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.quant]]
        return int(math.prod(self.shape) // block_elements * block_bytes)


class Span(NamedTuple):
    """Where a field of a header lies: its kind, first byte and bytes."""

    kind: str
    start: int
    size: int


class Encoded(NamedTuple):
    """A header's bytes without the padding, where its fields lie, and where all data and each tensor's starts."""

    header: bytes
    spans: tuple[Span, ...]
    data_start: int
    starts: tuple[int, ...]


class _Encoder:
    """Appends fields and remembers where each lies."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.spans: list[Span] = []

    def raw(self, kind: str, data: bytes) -> None:
        self.spans.append(Span(kind, len(self.data), len(data)))
        self.data += data

    def number(self, kind: str, packing: str, value: float) -> None:
        self.raw(kind, struct.pack(packing, value))

    def text(self, kind: str, text: str) -> None:
        data = text.encode()
        self.number(f"{kind} length", "<Q", len(data))
        self.raw(kind, data)

    def scalar(self, kind: str, value_type: str, value: Any) -> None:
        if value_type == "string":
            self.text(kind, value)
        else:
            self.number(kind, PACKING[value_type], value)

    def value(self, typed: Typed) -> None:
        if not typed.type.startswith("array["):
            self.number("value type", "<I", VALUE_TYPES[typed.type])
            self.scalar("value", typed.type, typed.value)
            return
        element = typed.type[len("array[") : -1]
        self.number("value type", "<I", VALUE_TYPES["array"])
        self.number("element type", "<I", VALUE_TYPES[element])
        self.number("array length", "<Q", len(typed.value))
        if len(typed.value) <= SPANNED_ELEMENTS:
            for item in typed.value:
                self.scalar("element", element, item)
        elif element == "string":
            texts = [text.encode() for text in typed.value]
            self.raw("elements", b"".join(struct.pack("<Q", len(text)) + text for text in texts))
        else:
            packing = f"<{len(typed.value)}{PACKING[element][1]}"
            self.raw("elements", struct.pack(packing, *typed.value))

    def entry(self, kind: str, start: int) -> None:
        self.spans.append(Span(kind, start, len(self.data) - start))


def typed(value: Any) -> Typed:
    """Return a value with the type that gguf-py's writer would usually give it."""
    if isinstance(value, Typed):
        return value
    if isinstance(value, np.ndarray):
        return Typed(f"array[{value.dtype.name}]", value.tolist())
    if isinstance(value, list | tuple):
        element = "int32" if isinstance(value[0], int) and not isinstance(value[0], bool) else typed(value[0]).type
        return Typed(f"array[{element}]", value)
    if isinstance(value, bool):
        return Typed("bool", value)
    if isinstance(value, int):
        if value < 0:
            return Typed("int32" if value >= -(2**31) else "int64", value)
        return Typed("uint32" if value < 2**32 else "uint64", value)
    if isinstance(value, float):
        return Typed("float32", value)
    if isinstance(value, str):
        return Typed("string", value)
    raise TypeError(f"a metadata value of type {type(value).__name__} cannot be written; wrap it in Typed")


def aligned(position: int, alignment: int) -> int:
    """Return the first multiple of ``alignment`` from ``position`` on."""
    return -(-position // alignment) * alignment


def encode(
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorSpec],
    *,
    version: int = 3,
    offsets: Sequence[int] | None = None,
) -> Encoded:
    """Encode a header: from the magic to the last tensor's entry.

    ``metadata``: plain values, or ``Typed`` ones; ``general.alignment`` is honoured. ``offsets``: where each tensor's
    data starts from the start of the data, in bytes; one behind the other unless given.
    """
    alignment = typed(metadata.get("general.alignment", DEFAULT_ALIGNMENT)).value
    encoder = _Encoder()
    encoder.raw("magic", b"GGUF")
    encoder.number("version", "<I", version)
    encoder.number("tensor count", "<Q", len(tensors))
    encoder.number("key count", "<Q", len(metadata))
    for key, value in metadata.items():
        start = len(encoder.data)
        encoder.text("key", key)
        encoder.value(typed(value))
        encoder.entry("key entry", start)
    if offsets is None:
        offsets = []
        end = 0
        for tensor in tensors:
            offsets.append(end)
            end = aligned(end + tensor.nbytes, alignment)
    for tensor, offset in zip(tensors, offsets, strict=True):
        start = len(encoder.data)
        encoder.text("name", tensor.name)
        encoder.number("dimension count", "<I", len(tensor.shape))
        for dimension in reversed(tensor.shape):
            encoder.number("dimension", "<Q", dimension)
        encoder.number("tensor type", "<I", int(gguf.GGMLQuantizationType[tensor.quant]))
        encoder.number("offset", "<Q", offset)
        encoder.entry("tensor entry", start)
    data_start = aligned(len(encoder.data), alignment)
    starts = tuple(data_start + offset for offset in offsets)
    return Encoded(bytes(encoder.data), tuple(encoder.spans), data_start, starts)


def write(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Iterable[TensorSpec],
    *,
    shape_only: bool = False,
    version: int = 3,
) -> None:
    """Write a GGUF file; the same bytes as gguf-py's writer for the same keys, types and tensors.

    ``shape_only``: tensors without data are holes that read as zeros and take no disk space, so a file of the size of
    a real model is written in milliseconds; otherwise every tensor needs its data.

    Raises:
        ValueError: A tensor's data is missing or has the wrong size.
    """
    tensors = list(tensors)
    for tensor in tensors:
        if tensor.data is None and not shape_only:
            raise ValueError(f"tensor {tensor.name!r} has no data; pass data, or shape_only=True for a hole")
        if tensor.data is not None and len(tensor.data) != tensor.nbytes:
            raise ValueError(f"tensor {tensor.name!r} has {len(tensor.data)} bytes of data; it needs {tensor.nbytes}")
    encoded = encode(metadata, tensors, version=version)
    alignment = typed(metadata.get("general.alignment", DEFAULT_ALIGNMENT)).value
    with open(path, "wb") as file:
        file.write(encoded.header)
        end = encoded.data_start
        for tensor, start in zip(tensors, encoded.starts, strict=True):
            if tensor.data is not None:
                file.seek(start)
                file.write(tensor.data)
            end = aligned(start + tensor.nbytes, alignment)
        file.truncate(end)
