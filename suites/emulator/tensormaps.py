"""Tensor maps: the 128 opaque bytes that describe a tensor to the copy unit (PTX ISA, 5.5.8 and 9.7.9.28).

The hardware's encoding is not published and no kernel looks inside, so this module's own is used: every field that
``tensormap.replace`` names has a place of its own. A host descriptor is encoded when its launch is bound, because only
then is the tensor's address known.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mla_conformance.suites.emulator.types import Array

SIZE = 128
FIELDS = np.dtype(
    [
        ("global_address", "u8"),
        ("global_stride", "u8", 4),
        ("global_dim", "u4", 5),
        ("box_dim", "u4", 5),
        ("element_stride", "u4", 5),
        ("rank", "u4"),
        ("elemtype", "u4"),
        ("interleave_layout", "u4"),
        ("swizzle_mode", "u4"),
        ("fill_mode", "u4"),
        ("swizzle_atomicity", "u4"),
    ]
)
"""The fields of ``tensormap.replace``; ``rank`` holds the rank minus one, as that instruction sets it."""
ELEMENTS = {0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 9: "f64", 10: "bf16"}
"""PTX element types by their number; those left out convert or unpack while they copy."""
SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}
_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}
ADDRESS_ALIGNMENT = 16
MAX_BOX = 256


def field_place(name: str, index: int = 0) -> tuple[int, int]:
    """Offset and bytes of a field, or of one of its elements, in this module's encoding."""
    kind, offset = FIELDS.fields[name][:2]  # type: ignore[index]
    width = kind.base.itemsize
    return offset + index * width, width


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map; dimension 0 is the contiguous one.

    Args:
        address: of the tensor's first element, in bytes.
        element: PTX type of an element, "" for one that is not supported.
        dims: sizes, in elements.
        strides: in bytes, of dimensions 0, 1, ...
        box: elements of a tile.
        element_strides: steps within a tile.
        swizzle: bytes of the swizzle pattern's row, 0 for none, -1 for one that is not supported.
        nan_fill: elements outside are NaN, else 0.
        interleaved: the layout is interleaved.
    """

    address: int
    element: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    nan_fill: bool
    interleaved: bool

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return int("".join(filter(str.isdigit, self.element))) // 8

    @property
    def tile_bytes(self) -> int:
        """Bytes of a whole tile in shared memory; parts outside the tensor count too."""
        return int(np.prod(self.box)) * self.width

    @property
    def fill(self) -> int:
        """Bits of an element outside the tensor."""
        return _NAN.get(self.element, 0) if self.nan_fill else 0

    def unsupported(self) -> str:
        """What the emulator does not do with this map, or ""."""
        if not self.element:
            return "an element type that converts or unpacks"
        if self.interleaved or self.swizzle < 0:
            return "an interleaved layout or an unusual swizzle"
        if any(step != 1 for step in self.element_strides):
            return "element strides"
        if self.nan_fill and self.element not in _NAN:
            return "NaN fill of integers"
        if self.swizzle and self.box[0] * self.width != self.swizzle:
            return f"rows of {self.box[0] * self.width} bytes with a swizzle of {self.swizzle}"
        return ""

    def fault(self) -> str:
        """Why the hardware would refuse this map, or "" (CUDA driver API, cuTensorMapEncodeTiled)."""
        if self.address % ADDRESS_ALIGNMENT:
            return f"global address {self.address:#x} is no multiple of {ADDRESS_ALIGNMENT}"
        crooked = [stride for stride in self.strides[1:] if stride % ADDRESS_ALIGNMENT]
        if crooked:
            return f"stride {crooked[0]} bytes is no multiple of {ADDRESS_ALIGNMENT}"
        if not all(1 <= size <= MAX_BOX for size in self.box) or self.box[0] * self.width % ADDRESS_ALIGNMENT:
            return f"box {self.box} of {self.width}-byte elements"
        return ""

    def tile(self, start: tuple[int, ...]) -> tuple[Array, Array]:
        """Byte offsets from the tensor's first element [rows, box[0]] of a tile, and which are inside the tensor."""
        offsets: Array = np.zeros(1, "i8")
        inside: Array = np.ones(1, bool)
        for first, size, count, stride in reversed(list(zip(start, self.dims, self.box, self.strides, strict=True))):
            places = first + np.arange(count, dtype="i8")
            offsets = (offsets[:, None] + places * stride).ravel()
            inside = (inside[:, None] & (places >= 0) & (places < size)).ravel()
        return offsets.reshape(-1, self.box[0]), inside.reshape(-1, self.box[0])


@lru_cache(maxsize=256)
def decode(raw: bytes) -> TensorMap:
    """The map in 128 bytes of this module's encoding."""
    found = np.frombuffer(raw[: FIELDS.itemsize], FIELDS)[0]
    rank = min(int(found["rank"]) + 1, 5)
    element = ELEMENTS.get(int(found["elemtype"]), "")
    width = int("".join(filter(str.isdigit, element)) or 8) // 8
    swizzle = SWIZZLE_BYTES.get(int(found["swizzle_mode"]), -1) if not found["swizzle_atomicity"] else -1
    return TensorMap(
        address=int(found["global_address"]),
        element=element,
        dims=tuple(int(size) for size in found["global_dim"][:rank]),
        strides=(width, *(int(stride) for stride in found["global_stride"][: rank - 1])),
        box=tuple(int(size) for size in found["box_dim"][:rank]),
        element_strides=tuple(int(step) for step in found["element_stride"][:rank]),
        swizzle=swizzle,
        nan_fill=bool(found["fill_mode"]),
        interleaved=bool(found["interleave_layout"]),
    )


def swizzled(addresses: Array, span: int) -> Array:
    """Where the copy unit puts the 16 bytes that belong at shared ``addresses``; ``span`` 0, 32, 64 or 128 bytes."""
    # Bits 4 to 6 name a 16-byte piece of a 128-byte line; they are mixed with the number of the line.
    return np.asarray(addresses ^ ((addresses >> 3) & {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[span]))


@dataclass(frozen=True)
class HostTensorMap:
    """A kernel argument: what a launcher would let the driver encode. Sizes are given outermost first, as by Triton.

    Args:
        base: CPU tensor whose first element is the tensor's.
        shape, strides: in elements.
        box: elements of one tile.
        element: number of the PTX element type.
        element_bytes: bytes of an element.
        swizzle: 0 (none), 1 (32 bytes), 2 (64) or 3 (128).
        nan_fill: fill of elements outside.
    """

    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: int
    element_bytes: int
    swizzle: int = 0
    nan_fill: bool = False

    def encoded(self, address: int) -> bytes:
        """The 128 bytes, for the tensor at virtual ``address``."""
        made = np.zeros((), FIELDS)
        rank = len(self.shape)
        made["global_address"], made["rank"], made["elemtype"] = address, rank - 1, self.element
        made["global_dim"][:rank] = self.shape[::-1]
        made["global_stride"][: rank - 1] = [stride * self.element_bytes for stride in self.strides[:-1]][::-1]
        made["box_dim"][:rank], made["element_stride"][:rank] = self.box[::-1], 1
        made["swizzle_mode"], made["fill_mode"] = self.swizzle, int(self.nan_fill)
        return made.tobytes().ljust(SIZE, b"\0")
