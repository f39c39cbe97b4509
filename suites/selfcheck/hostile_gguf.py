"""GGUF files that claim what they do not hold, written byte by byte, and valid ones that cost a reader most memory."""

from __future__ import annotations

import struct
from collections.abc import Callable

from mla_conformance.kernels.gguf.file_types import SCALAR_TYPES
from mla_conformance.suites.gguf.writing import Typed, encode

KEY = b"\1\0\0\0\0\0\0\0k"
U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack


def header(keys: int, tensors: int, *rest: bytes) -> bytes:
    """Return a header of these counts."""
    return b"GGUF" + U32(3) + U64(tensors) + U64(keys) + b"".join(rest)


def entry(name: bytes = b"t", dimensions: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    """Return one tensor's entry; dimensions fastest first."""
    sizes = U32(len(dimensions)) + b"".join(map(U64, dimensions))
    return U64(len(name)) + name + sizes + U32(kind) + U64(offset)


# By what is wrong: the file, and the kind of its refusal.
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated"),
    "magic": (b"GGML" + bytes(60), "bad magic"),
    "swapped magic": (b"FUGG" + bytes(60), "big-endian"),
    "swapped version": (b"GGUF\0\0\0\3" + bytes(60), "big-endian"),
    **{f"version {v}": (b"GGUF" + U32(v) + bytes(60), "bad version") for v in (0, 1, 4, 2**32 - 1)},
    "tensor count": (header(0, 2**60, bytes(1000)), "absurd count"),
    "tensor count of the limit": (header(0, 2**18, bytes(1000)), "absurd count"),
    "key count": (header(2**60, 0, bytes(1000)), "absurd count"),
    "key count of the limit": (header(2**16, 0, bytes(1000)), "absurd count"),
    "key length": (header(1, 0, U64(2**60), bytes(1000)), "absurd length"),
    "key length past the end": (header(1, 0, U64(900), bytes(500)), "truncated"),
    "string length": (header(1, 0, KEY, U32(8), U64(2**60), bytes(1000)), "absurd length"),
    "name length": (header(0, 1, U64(2**60), bytes(1000)), "absurd length"),
    **{
        f"array length of type {kind}": (header(1, 0, KEY, U32(9), U32(kind), U64(2**60), bytes(1000)), "absurd count")
        for kind in (*SCALAR_TYPES, 8)
    },
    "array of 2^26 bytes": (header(1, 0, KEY, U32(9), U32(0), U64(2**26), bytes(1000)), "absurd count"),
    "string in an array": (header(1, 0, KEY, U32(9), U32(8), U64(2), U64(2**63), bytes(99)), "absurd length"),
    "nested arrays": (header(1, 0, KEY, U32(9), (U32(9) + U64(1)) * 80, bytes(99)), "nested array"),
    "key not UTF-8": (header(1, 0, U64(2), b"\xc3(", bytes(99)), "not UTF-8"),
    "name not UTF-8": (header(0, 1, entry(b"\xff\xfe"), bytes(199)), "not UTF-8"),
    "string not UTF-8": (header(1, 0, KEY, U32(8), U64(1), b"\x80", bytes(9)), "not UTF-8"),
    "token not UTF-8": (
        header(1, 0, KEY, U32(9), U32(8), U64(2), U64(1), b"a", U64(1), b"\x80", bytes(9)),
        "not UTF-8",
    ),
    "empty key": (header(1, 0, U64(0), bytes(99)), "bad name"),
    "NUL in a name": (header(0, 1, entry(b"a\0b"), bytes(199)), "bad name"),
    "duplicate key": (header(2, 0, (KEY + U32(0) + b"\1") * 2, bytes(9)), "duplicate key"),
    "duplicate tensor": (header(0, 2, entry(), entry(offset=128), bytes(399)), "duplicate tensor"),
    "value type": (header(1, 0, KEY, U32(13), bytes(99)), "bad value type"),
    "element type": (header(1, 0, KEY, U32(9), U32(13), bytes(99)), "bad value type"),
    "bool of 2": (header(1, 0, KEY, U32(7), b"\2", bytes(99)), "bad bool"),
    "bools of 2": (header(1, 0, KEY, U32(9), U32(7), U64(2), b"\1\2", bytes(99)), "bad bool"),
    "unknown type": (header(0, 1, entry(kind=42), bytes(199)), "unknown type"),
    "largest type": (header(0, 1, entry(kind=2**32 - 1), bytes(199)), "unknown type"),
    **{f"removed type {k}": (header(0, 1, entry(kind=k), bytes(199)), "removed type") for k in (4, 5, 9, 31, 36, 38)},
    "no dimensions": (header(0, 1, entry(dimensions=()), bytes(199)), "bad dimension count"),
    "five dimensions": (header(0, 1, entry(dimensions=(1,) * 5), bytes(199)), "bad dimension count"),
    "zero dimension": (header(0, 1, entry(dimensions=(4, 0)), bytes(199)), "zero dimension"),
    "wrapping product": (header(0, 1, entry(dimensions=(2**32, 2**32)), bytes(199)), "too many elements"),
    "product of 2^63": (header(0, 1, entry(dimensions=(2**62, 2)), bytes(199)), "too many elements"),
    "large tensor": (header(0, 1, entry(dimensions=(2**61,)), bytes(199)), "out of file"),
    "partial block": (header(0, 1, entry(dimensions=(33, 32), kind=8), bytes(2000)), "partial block"),
    "misaligned": (header(0, 1, entry(offset=16), bytes(299)), "misaligned"),
    "offset": (header(0, 1, entry(offset=2**64 - 32), bytes(299)), "out of file"),
    "tensor past the end": (header(0, 1, entry(), bytes(24 + 100)), "out of file"),
    "header past the end": (header(0, 1, entry()), "out of file"),
    "overlap": (header(0, 2, entry(b"a"), entry(b"b", offset=96), bytes(399)), "overlap"),
    "same place": (header(0, 2, entry(b"a"), entry(b"b"), bytes(399)), "overlap"),
    **{
        f"alignment {a}": (encode({"general.alignment": Typed("uint32", a or 1)}, []).header, "bad alignment")
        for a in (3, 24, 2**32 - 1)
    },
    "alignment of 0": (
        encode({"general.alignment": 32}, []).header.replace(U32(4) + U32(32), U32(4) + U32(0)),
        "bad alignment",
    ),
    "alignment of another type": (encode({"general.alignment": Typed("uint64", 32)}, []).header, "bad alignment"),
}


COSTLY: dict[str, Callable[[], bytes]] = {
    "short keys": lambda: header(10_000, 0, *(U64(3) + int_name(i) + U32(0) + b"\1" for i in range(10_000))),
    "short words": lambda: header(1, 0, KEY, U32(9), U32(8), U64(40_000), (U64(2) + b"ab") * 40_000),
    "bytes": lambda: header(1, 0, KEY, U32(9), U32(0), U64(400_000), bytes(400_000)),
    "empty arrays": lambda: header(5_000, 0, *(U64(3) + int_name(i) + U32(9) + U32(0) + U64(0) for i in range(5_000))),
    "tensors": lambda: many_tensors(5_000),
}


def int_name(number: int) -> bytes:
    """Return three letters that differ from number to number."""
    return bytes(33 + number // 90**place % 90 for place in range(3))


def many_tensors(count: int) -> bytes:
    """Return a file of tensors of one byte each."""
    alignment = U64(17) + b"general.alignment" + U32(4) + U32(1)
    entries = (entry(int_name(i), (1,), 24, i) for i in range(count))
    return header(1, count, alignment, *entries, bytes(count))
