"""Reads a GGUF header without trusting it: every count is held against the bytes that are there before anything is
allocated, and every tensor's place against the file's size.

Time and memory are linear in the header's bytes, whatever the file claims. Layout: the GGUF specification
(ggml-org/ggml, docs/gguf.md). Independent of gguf-py, which trusts what it reads: overlapping tensors pass, a damaged
file fails somewhere in numpy, and a large count keeps it busy.
"""

from __future__ import annotations

import itertools
import math
import struct
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from mla_conformance.kernels.gguf.file_types import (
    SCALAR_TYPES,
    STORED,
    GGUFError,
    Header,
    MetadataValue,
    TensorEntry,
    shown,
    why_not_stored,
)

# A header with a vocabulary of 262,144 tokens and twice as many merges takes about 25 MiB.
MAX_HEADER_BYTES = 128 * 2**20
# Kimi-K2 with one tensor an expert would have 70,000.
MAX_TENSORS = 2**18
MAX_KEYS = 2**16
# The specification's limits are 65,535 for a key and 64 for a name; converters of diffusion models write longer names.
MAX_KEY_BYTES = 2**16 - 1
MAX_NAME_BYTES = 255
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"

STRING, ARRAY = 8, 9
_DTYPES = {number: np.dtype(name).newbyteorder("<") for number, name in SCALAR_TYPES.items()}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def parse_header(buffer: memoryview, file: str) -> Header:
    """Read and check the header of the GGUF file whose bytes are ``buffer``; ``file`` is its name in errors.

    Raises:
        GGUFError: The file is not a valid GGUF file of version 2 or 3, or goes past one of this module's limits.
    """
    return HeaderParser(buffer, file).parse()


class HeaderParser:
    """One reading of one header; see ``parse_header``."""

    def __init__(self, buffer: memoryview, file: str) -> None:
        self.buffer, self.file = buffer, file
        self.position = 0
        self.alignment = DEFAULT_ALIGNMENT
        self.end = min(len(buffer), MAX_HEADER_BYTES)

    def parse(self) -> Header:
        """Read everything, in the file's order."""
        version = self.magic_and_version()
        # The least of each: a name of one byte, one dimension, type and offset; a key of one byte and a value of one.
        tensor_count = self.count("tensor count", 8 + 1 + 4 + 8 + 4 + 8, MAX_TENSORS)
        key_count = self.count("key count", 8 + 1 + 4 + 1, MAX_KEYS)
        metadata: dict[str, MetadataValue] = {}
        types: dict[str, str] = {}
        places: dict[str, int] = {}
        for index in range(key_count):
            start = self.position
            key = self.name(f"key {index}", MAX_KEY_BYTES)
            if key in metadata:
                self.fail(start, f"key {index}", "duplicate key", f"key {shown(key)} is there twice")
            places[key] = self.position
            types[key], metadata[key] = self.value(f"key {shown(key)}")
            if key == ALIGNMENT_KEY:
                self.take_alignment(places[key], types[key], metadata[key])
        tensors_start = self.position
        tensors: dict[str, TensorEntry] = {}
        fields: dict[str, int] = {}
        for index in range(tensor_count):
            start = self.position
            entry = self.tensor(index)
            if entry.name in tensors:
                self.fail(start, f"tensor {index}", "duplicate tensor", f"tensor {shown(entry.name)} is there twice")
            tensors[entry.name], fields[entry.name] = entry, self.position - _U64.size
        data_start = -(-self.position // self.alignment) * self.alignment
        tensors = {name: entry._replace(offset=data_start + entry.offset) for name, entry in tensors.items()}
        for name, entry in tensors.items():
            self.check_place(entry, fields[name], data_start)
        self.check_overlaps(tensors, fields)
        return Header(version, self.alignment, metadata, types, places, tensors, tensors_start, data_start)

    def fail(self, offset: int, field: str, kind: str, problem: str) -> NoReturn:
        """Refuse the file."""
        raise GGUFError(self.file, offset, field, kind, problem) from None

    def take(self, size: int, field: str) -> int:
        """Return the position of the next ``size`` bytes and step over them."""
        start = self.position
        if size > self.end - start:
            if size <= len(self.buffer) - start:
                self.fail(
                    start, field, "header too long", f"the header goes on past {MAX_HEADER_BYTES} bytes, the limit"
                )
            left = f"{size} bytes are claimed, {len(self.buffer) - start} are left; the file is cut or damaged"
            self.fail(start, field, "truncated", left)
        self.position = start + size
        return start

    def u32(self, field: str) -> int:
        """Read an unsigned 32-bit number."""
        return int(_U32.unpack_from(self.buffer, self.take(_U32.size, field))[0])

    def u64(self, field: str) -> int:
        """Read an unsigned 64-bit number."""
        return int(_U64.unpack_from(self.buffer, self.take(_U64.size, field))[0])

    def count(self, field: str, item_bytes: int, limit: int) -> int:
        """Read a count of things that take at least ``item_bytes`` each."""
        start = self.position
        count = self.u64(field)
        if count > limit:
            self.fail(start, field, "absurd count", f"{count} is more than {limit}, this reader's limit")
        if count * item_bytes > len(self.buffer) - self.position:
            left = f"{count} need {item_bytes} bytes each, {len(self.buffer) - self.position} are left"
            self.fail(start, field, "absurd count", left)
        return count

    def magic_and_version(self) -> int:
        """Read the first eight bytes."""
        magic = bytes(self.buffer[self.take(4, "magic") : self.position])
        if magic == b"FUGG":
            self.fail(0, "magic", "big-endian", "it is byte-swapped; convert the big-endian file first")
        if magic != b"GGUF":
            self.fail(0, "magic", "bad magic", f"{magic!r} is not b'GGUF'; this is no GGUF file")
        version = self.u32("version")
        if version and version % 2**16 == 0:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            self.fail(
                4, "version", "big-endian", f"version {swapped} is byte-swapped; convert the big-endian file first"
            )
        if version not in (2, 3):
            self.fail(4, "version", "bad version", f"version {version} is not one of 2 and 3; convert the file again")
        return version

    def text(self, field: str, limit: int) -> str:
        """Read a string of at most ``limit`` bytes."""
        start = self.position
        size = self.u64(f"{field} length")
        if size > limit:
            self.fail(start, f"{field} length", "absurd length", f"{size} bytes are more than {limit}")
        self.take(size, field)
        try:
            return str(self.buffer[self.position - size : self.position], "utf-8")
        except UnicodeDecodeError as error:
            bad = f"byte {error.start} of the string is no UTF-8 ({error.reason})"
            self.fail(start, field, "not UTF-8", bad)

    def texts(self, field: str, count: int) -> list[str]:
        """Read strings; in one loop, as a vocabulary and its merges are half a million."""
        buffer, end, unpack = self.buffer, self.end, _U64.unpack_from
        position = self.position
        found: list[str] = []
        try:
            for _ in range(count):
                after = position + 8 + unpack(buffer, position)[0]
                if after > end:
                    break
                found.append(str(buffer[position + 8 : after], "utf-8"))
                position = after
        except (struct.error, UnicodeDecodeError):
            pass
        self.position = position
        if len(found) < count:
            self.text(f"{field}, string {len(found)}", MAX_HEADER_BYTES)
        return found

    def name(self, field: str, limit: int) -> str:
        """Read a key or a tensor's name."""
        start = self.position
        name = self.text(field, limit)
        if not name or "\0" in name:
            self.fail(start, field, "bad name", f"{shown(name)} is empty or holds a NUL, at which other readers stop")
        return name

    def value(self, field: str) -> tuple[str, MetadataValue]:
        """Read a type and a value."""
        start = self.position
        kind = self.u32(f"{field} type")
        if kind == STRING:
            return "string", self.text(field, MAX_HEADER_BYTES)
        if kind == ARRAY:
            return self.array(field)
        if kind not in SCALAR_TYPES:
            self.fail(start, f"{field} type", "bad value type", f"{kind} is no GGUF value type (0 to 12)")
        number: bool | int | float = self.numbers(kind, 1, field)[0].item()
        return SCALAR_TYPES[kind], number

    def array(self, field: str) -> tuple[str, MetadataValue]:
        """Read an array's element type, length and elements."""
        start = self.position
        kind = self.u32(f"{field} element type")
        if kind == ARRAY:
            self.fail(
                start, f"{field} element type", "nested array", "an array of arrays, which ggml does not read either"
            )
        if kind != STRING and kind not in SCALAR_TYPES:
            self.fail(start, f"{field} element type", "bad value type", f"{kind} is no GGUF value type (0 to 12)")
        item_bytes = 8 if kind == STRING else _DTYPES[kind].itemsize
        count = self.count(f"{field} array length", item_bytes, MAX_HEADER_BYTES)
        if kind == STRING:
            return "array[string]", self.texts(field, count)
        return f"array[{SCALAR_TYPES[kind]}]", self.numbers(kind, count, field)

    def numbers(self, kind: int, count: int, field: str) -> npt.NDArray[np.generic]:
        """Read ``count`` numbers of a GGUF type as a read-only copy."""
        dtype = _DTYPES[kind]
        start = self.take(count * dtype.itemsize, field)
        if SCALAR_TYPES[kind] == "bool" and self.buffer[start : self.position].tobytes().translate(None, b"\0\1"):
            self.fail(start, field, "bad bool", "a bool is a byte other than 0 and 1")
        found = np.frombuffer(self.buffer, dtype, count, start) if count else np.empty(0, dtype)
        found = found.astype(dtype.newbyteorder("="))
        found.flags.writeable = False
        return found

    def take_alignment(self, start: int, value_type: str, alignment: MetadataValue) -> None:
        """Keep the alignment, if ggml and gguf-py would take it."""
        if value_type != "uint32" or not isinstance(alignment, int):
            self.fail(start, ALIGNMENT_KEY, "bad alignment", f"its type is {value_type}; it must be uint32")
        if alignment.bit_count() != 1:
            self.fail(start, ALIGNMENT_KEY, "bad alignment", f"{alignment} is no power of two")
        self.alignment = alignment

    def tensor(self, index: int) -> TensorEntry:
        """Read one entry of the list of tensors; its offset counts from the start of the data."""
        name = self.name(f"tensor {index} name", MAX_NAME_BYTES)
        field = f"tensor {shown(name)}"
        start = self.position
        dimensions = self.u32(f"{field} dimension count")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            count = f"{dimensions} dimensions; there must be 1 to {MAX_DIMENSIONS}"
            self.fail(start, f"{field} dimension count", "bad dimension count", count)
        shape = tuple(self.u64(f"{field} dimension {place}") for place in range(dimensions))[::-1]
        elements = math.prod(shape)
        if elements == 0:
            self.fail(start, f"{field} shape", "zero dimension", f"{list(shape)} has a dimension of 0")
        if elements >= 2**63:
            self.fail(start, f"{field} shape", "too many elements", f"{list(shape)} has more than 2^63 elements")
        start = self.position
        number = self.u32(f"{field} type")
        if number not in STORED:
            self.fail(start, f"{field} type", *why_not_stored(number))
        quant, block_elements, block_bytes = STORED[number]
        if shape[-1] % block_elements:
            cut = f"rows of {shape[-1]} elements are no whole number of {quant} blocks of {block_elements}"
            self.fail(start, f"{field} shape", "partial block", cut)
        return TensorEntry(name, quant, shape, self.u64(f"{field} offset"), elements // block_elements * block_bytes)

    def check_place(self, entry: TensorEntry, start: int, data_start: int) -> None:
        """Hold a tensor's data to the alignment and to the file."""
        field = f"tensor {shown(entry.name)} offset"
        offset = entry.offset - data_start
        if offset % self.alignment:
            self.fail(start, field, "misaligned", f"{offset} is no multiple of the alignment, {self.alignment}")
        if entry.offset + entry.nbytes > len(self.buffer):
            outside = f"bytes {entry.offset} to {entry.offset + entry.nbytes} of a file of {len(self.buffer)}"
            self.fail(start, field, "out of file", outside)

    def check_overlaps(self, tensors: dict[str, TensorEntry], fields: dict[str, int]) -> None:
        """Refuse tensors that share bytes."""
        placed = sorted(tensors.values(), key=lambda entry: entry.offset)
        for before, after in itertools.pairwise(placed):
            if before.offset + before.nbytes > after.offset:
                both = f"starts at byte {after.offset}, inside tensor {shown(before.name)}"
                self.fail(fields[after.name], f"tensor {shown(after.name)} offset", "overlap", both)
