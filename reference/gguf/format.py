"""What a block format is, and the few ways in which all of them pack numbers into bytes.

Every format cuts a row into blocks of `block_elements` numbers, each stored in `block_bytes` bytes. Multi-byte
fields are little-endian. A class reads its fields in the order of the C struct, so that the two can be compared
line by line, and computes in float32 in the order of ggml's C code, so that the results are equal bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

ScaleKind = Literal["f16", "bf16", "f32", "e8m0", "ue4m3", "iq1_m"]


class ScaleField(NamedTuple):
    """Where a block keeps one floating-point factor.

    `kind` "iq1_m" is IQ1_M's float16, spread over the top four bits of four 16-bit words from `offset` on.
    """

    offset: int
    kind: ScaleKind


class Format(ABC):
    """One block format: its sizes, and how a block becomes numbers."""

    name: ClassVar[str]
    """ggml's name of the type, in capitals as in gguf-py's GGMLQuantizationType."""
    type_id: ClassVar[int]
    """The number of the type in `enum ggml_type` and in files."""
    block_elements: ClassVar[int]
    block_bytes: ClassVar[int]
    scales: ClassVar[tuple[ScaleField, ...]]
    """The floating-point fields of a block; every other byte pattern gives finite numbers if these are finite."""

    @abstractmethod
    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Turn blocks, uint8 [n, block_bytes], into numbers, float32 [n, block_elements]."""


def integers(blocks: Tensor, offset: int, count: int) -> Tensor:
    """Read `count` unsigned bytes of every block: int32 [n, count]."""
    return blocks[:, offset : offset + count].to(torch.int32)


def signed_integers(blocks: Tensor, offset: int, count: int) -> Tensor:
    """Read `count` two's complement bytes of every block: int32 [n, count]."""
    return blocks[:, offset : offset + count].contiguous().view(torch.int8).to(torch.int32)


def words(blocks: Tensor, offset: int, count: int, size: int) -> Tensor:
    """Read `count` unsigned little-endian words of `size` bytes of every block: int64 [n, count]."""
    digits = blocks[:, offset : offset + count * size].to(torch.int64).reshape(-1, count, size)
    return sum((digits[..., place] << 8 * place for place in range(size)), torch.zeros_like(digits[..., 0]))


def float16(blocks: Tensor, offset: int) -> Tensor:
    """Read one IEEE float16 of every block, exactly: float32 [n, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).to(torch.float32)


def float32(blocks: Tensor, offset: int) -> Tensor:
    """Read one IEEE float32 of every block: float32 [n, 1]."""
    return blocks[:, offset : offset + 4].contiguous().view(torch.float32)


def float_from_bits(bits: Tensor) -> Tensor:
    """Reinterpret non-negative integers below 2^32 as the bits of float32 numbers."""
    return torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)


def bit_fields(values: Tensor, group: int, shifts: Sequence[int], mask: int) -> Tensor:
    """Cut values into bit fields, all fields of one group of values before those of the next.

    Args:
        values: integers [n, count].
        group: how many neighbouring values are read at one shift before the next shift begins.
        shifts: positions of the fields in a value, in the order in which they are read.
        mask: the bits of a field, after shifting.

    Returns:
        Integers [n, count * len(shifts)].

    """
    count = values.shape[1]
    grouped = values.reshape(-1, count // group, 1, group)
    at_each_shift = grouped >> torch.tensor(shifts, dtype=values.dtype, device=values.device)[:, None]
    return (at_each_shift & mask).reshape(-1, count * len(shifts))


def spread(scales: Tensor, elements: int) -> Tensor:
    """Repeat each scale of [n, count] for the `elements` numbers that it applies to."""
    return scales.repeat_interleave(elements, dim=1)
