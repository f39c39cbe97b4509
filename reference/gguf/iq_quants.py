"""The IQ formats: numbers taken from a code book, with signs and scales packed around the indices.

Source: the structs `block_iq*` in ggml-common.h and `dequantize_row_iq*` in ggml-quants.c. `half` is IEEE float16.
A super-block has 256 numbers. "sub-block" is the run of numbers under one integer scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.reference.gguf import grids
from mla_conformance.reference.gguf.format import (
    Format,
    ScaleField,
    bit_fields,
    float16,
    integers,
    spread,
    words,
)

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the sixteen codes of IQ4_NL and IQ4_XS stand for: `kvalues_iq4nl`."""
IQ1_DELTA = 0.125
"""What IQ1_S and IQ1_M add to the code book's -1, 0, 1, or subtract: `IQ1S_DELTA`."""


def look_up(grid: grids.Grid, indices: Tensor) -> Tensor:
    """Take rows of a code book by their indices [n, count]: float32 [n, count * width]."""
    return grids.unpack(grid).to(indices.device)[indices.long()].flatten(1)


def plus_or_minus(bits: Tensor) -> Tensor:
    """Return -1.0 where a bit is set and 1.0 where not."""
    return (1 - 2 * bits).float()


def signs_of_bytes(packed: Tensor) -> Tensor:
    """Turn bytes [n, count] into eight signs each, lowest bit first: float32 [n, 8 * count]."""
    return plus_or_minus(bit_fields(packed, 1, range(8), 1))


def complete_signs(seven: Tensor) -> Tensor:
    """Put the eighth sign on top of seven, so that an even number is negative: `ksigns_iq2xs`."""
    parity = bit_fields(seven.reshape(-1, 1), 1, range(7), 1).sum(dim=1).reshape(seven.shape) & 1
    return seven | parity << 7


class SevenSigns(Format):
    """What IQ2_XXS, IQ2_XS and IQ3_XXS share: eight signs stored as seven bits."""

    def signs(self, seven: Tensor) -> Tensor:
        """Turn seven-bit words [n, count] into eight signs each: float32 [n, 8 * count]."""
        return signs_of_bytes(complete_signs(seven))


class IQ2_XXS(SevenSigns):  # noqa: N801 - ggml's name
    """block_iq2_xxs: eight sub-blocks of 32.

    Bytes 0-1 half d; 2-65 eight bytes a sub-block: four indices of one byte into 256 rows of eight, then a 32-bit
    word with four times seven sign bits from below and the scale in its top four bits.
    Value d * (0.5 + scale) * 0.25 * grid * sign.
    """

    name, type_id, block_elements, block_bytes = "IQ2_XXS", 16, 256, 66
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        d = float16(blocks, 0)
        indices = integers(blocks, 2, 64).reshape(-1, 8, 8)[..., :4].flatten(1)
        signs_and_scale = words(blocks, 2, 16, 4)[:, 1::2]
        scale = d * (0.5 + (signs_and_scale >> 28).float()) * 0.25
        signs = self.signs(bit_fields(signs_and_scale, 1, (0, 7, 14, 21), 127))
        return spread(scale, 32) * look_up(grids.IQ2_XXS, indices) * signs


class IQ2_XS(SevenSigns):  # noqa: N801
    """block_iq2_xs: sixteen sub-blocks of 16.

    Bytes 0-1 half d; 2-65 thirty-two 16-bit words, nine bits index into 512 rows of eight and above them seven sign
    bits; 66-73 sixteen nibbles, the scales, low nibble first. Value d * (0.5 + scale) * 0.25 * grid * sign.
    """

    name, type_id, block_elements, block_bytes = "IQ2_XS", 17, 256, 74
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        d = float16(blocks, 0)
        index_and_signs = words(blocks, 2, 32, 2)
        scale = d * (0.5 + bit_fields(integers(blocks, 66, 8), 1, (0, 4), 15).float()) * 0.25
        return spread(scale, 16) * look_up(grids.IQ2_XS, index_and_signs & 511) * self.signs(index_and_signs >> 9)


class IQ2_S(Format):  # noqa: N801
    """block_iq2_s: sixteen sub-blocks of 16.

    Bytes 0-1 half d; 2-33 the low eight bits of thirty-two indices into 1024 rows of eight; 34-65 sign bytes, one
    a row; 66-73 the indices' top two bits, four indices a byte; 74-81 sixteen nibbles, the scales, low nibble first.
    Value d * (0.5 + scale) * 0.25 * grid * sign.
    """

    name, type_id, block_elements, block_bytes = "IQ2_S", 22, 256, 82
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        d = float16(blocks, 0)
        indices = integers(blocks, 2, 32) | bit_fields(integers(blocks, 66, 8), 1, (0, 2, 4, 6), 3) << 8
        signs = signs_of_bytes(integers(blocks, 34, 32))
        scale = d * (0.5 + bit_fields(integers(blocks, 74, 8), 1, (0, 4), 15).float()) * 0.25
        return spread(scale, 16) * look_up(grids.IQ2_S, indices) * signs


class IQ3_XXS(SevenSigns):  # noqa: N801
    """block_iq3_xxs: eight sub-blocks of 32.

    Bytes 0-1 half d; 2-65 sixty-four indices of one byte into 256 rows of four; 66-97 eight 32-bit words, each four
    times seven sign bits from below and a scale in the top four bits. Value d * (0.5 + scale) * 0.5 * grid * sign.
    """

    name, type_id, block_elements, block_bytes = "IQ3_XXS", 18, 256, 98
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        d = float16(blocks, 0)
        signs_and_scale = words(blocks, 66, 8, 4)
        scale = d * (0.5 + (signs_and_scale >> 28).float()) * 0.5
        signs = self.signs(bit_fields(signs_and_scale, 1, (0, 7, 14, 21), 127))
        return spread(scale, 32) * look_up(grids.IQ3_XXS, integers(blocks, 2, 64)) * signs


class IQ3_S(Format):  # noqa: N801
    """block_iq3_s: eight sub-blocks of 32.

    Bytes 0-1 half d; 2-65 the low eight bits of sixty-four indices into 512 rows of four; 66-73 their ninth bits,
    lowest first; 74-105 sign bytes, one for eight numbers; 106-109 eight nibbles, the scales, low nibble first.
    Value d * (1 + 2 * scale) * grid * sign.
    """

    name, type_id, block_elements, block_bytes = "IQ3_S", 21, 256, 110
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        d = float16(blocks, 0)
        indices = integers(blocks, 2, 64) | bit_fields(integers(blocks, 66, 8), 1, range(8), 1) << 8
        signs = signs_of_bytes(integers(blocks, 74, 32))
        scale = d * (1 + 2 * bit_fields(integers(blocks, 106, 4), 1, (0, 4), 15)).float()
        return spread(scale, 32) * look_up(grids.IQ3_S, indices) * signs


class IQ1_S(Format):  # noqa: N801
    """block_iq1_s: eight sub-blocks of 32.

    Bytes 0-1 half d; 2-33 the low eight bits of thirty-two indices into 2048 rows of eight; 34-49 a 16-bit word a
    sub-block: four times three high index bits from below, three bits scale, one bit that makes delta -0.125
    instead of 0.125. Value d * (2 * scale + 1) * (grid + delta).
    """

    name, type_id, block_elements, block_bytes = "IQ1_S", 19, 256, 50
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        d = float16(blocks, 0)
        packed = words(blocks, 34, 8, 2)
        indices = integers(blocks, 2, 32) | bit_fields(packed, 1, (0, 3, 6, 9), 7) << 8
        scale = d * (2 * (packed >> 12 & 7) + 1).float()
        delta = IQ1_DELTA * plus_or_minus(packed >> 15)
        return spread(scale, 32) * (look_up(grids.IQ1, indices) + spread(delta, 32))


class IQ1_M(Format):  # noqa: N801
    """block_iq1_m: sixteen sub-blocks of 16; the only format whose half lies in pieces.

    Bytes 0-31 the low eight bits of thirty-two indices into 2048 rows of eight; 32-47 a nibble a row, low nibble
    first: three high index bits, and one bit that makes delta -0.125 instead of 0.125; 48-55 four 16-bit words, each
    four times three bits scale from below and four bits of the half d, lowest bits of d in the first word.
    Value d * (2 * scale + 1) * (grid + delta).
    """

    name, type_id, block_elements, block_bytes = "IQ1_M", 29, 256, 56
    scales = (ScaleField(48, "iq1_m"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        high = bit_fields(integers(blocks, 32, 16), 1, (0, 4), 15)
        indices = integers(blocks, 0, 32) | (high & 7) << 8
        packed = words(blocks, 48, 4, 2)
        d = self.super_scale(packed >> 12)
        scale = d * (2 * bit_fields(packed, 1, (0, 3, 6, 9), 7) + 1).float()
        delta = IQ1_DELTA * plus_or_minus(high >> 3)
        return spread(scale, 16) * (look_up(grids.IQ1, indices) + spread(delta, 8))

    def super_scale(self, nibbles: Tensor) -> Tensor:
        """Join four nibbles [n, 4], lowest first, to a half: float32 [n, 1]."""
        low, high = nibbles[:, 0] | nibbles[:, 1] << 4, nibbles[:, 2] | nibbles[:, 3] << 4
        return float16(torch.stack([low, high], dim=1).to(torch.uint8), 0)


class IQ4_NL(Format):  # noqa: N801
    """block_iq4_nl: bytes 0-1 half d; 2-17 nibbles as in Q4_0, indices into `IQ4_VALUES`. Value d * IQ4_VALUES[i]."""

    name, type_id, block_elements, block_bytes = "IQ4_NL", 20, 32, 18
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 32]."""
        codes = bit_fields(integers(blocks, 2, 16), 16, (0, 4), 15)
        return float16(blocks, 0) * torch.tensor(IQ4_VALUES, device=blocks.device)[codes.long()].float()


class IQ4_XS(Format):  # noqa: N801
    """block_iq4_xs: eight sub-blocks of 32.

    Bytes 0-1 half d; 2-3 the high two bits of eight scales, from below; 4-7 their low four bits, low nibble first;
    8-135 sixteen bytes a sub-block, nibbles as in IQ4_NL. Value d * (scale - 32) * IQ4_VALUES[i].
    """

    name, type_id, block_elements, block_bytes = "IQ4_XS", 23, 256, 136
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        high = bit_fields(integers(blocks, 2, 2), 1, (0, 2, 4, 6), 3)
        low = bit_fields(integers(blocks, 4, 4), 1, (0, 4), 15)
        scale = float16(blocks, 0) * ((low | high << 4) - 32).float()
        codes = bit_fields(integers(blocks, 8, 128), 16, (0, 4), 15)
        return spread(scale, 32) * torch.tensor(IQ4_VALUES, device=blocks.device)[codes.long()].float()
