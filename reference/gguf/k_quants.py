"""The K formats: super-blocks of 256 numbers whose sub-blocks have small integer scales under one or two halves.

Source: the structs `block_q*_K` in ggml-common.h and `dequantize_row_q*_K` in ggml-quants.c. `half` is IEEE
float16. "Groups of 32 bytes" means that 32 neighbouring bytes hold the first 32 numbers in their lowest bits, the
next 32 in the bits above, and so on, before the next 32 bytes begin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.reference.gguf.format import (
    Format,
    ScaleField,
    bit_fields,
    float16,
    integers,
    signed_integers,
    spread,
)


class Q2_K(Format):  # noqa: N801 - ggml's name
    """block_q2_K: sixteen sub-blocks of 16.

    Bytes 0-15, one a sub-block: low nibble scale, high nibble minimum; 16-79 two bits q a number in groups of 32
    bytes; 80-81 half d; 82-83 half dmin. Value (d * scale) * q - (dmin * minimum).
    """

    name, type_id, block_elements, block_bytes = "Q2_K", 10, 256, 84
    scales = (ScaleField(80, "f16"), ScaleField(82, "f16"))

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        packed = integers(blocks, 0, 16)
        q = bit_fields(integers(blocks, 16, 64), 32, (0, 2, 4, 6), 3)
        d, dmin = float16(blocks, 80), float16(blocks, 82)
        return spread(d * (packed & 15).float(), 16) * q.float() - spread(dmin * (packed >> 4).float(), 16)


class Q3_K(Format):  # noqa: N801
    """block_q3_K: sixteen sub-blocks of 16.

    Bytes 0-31 the third bits, groups of 32 bytes with one bit a number; 32-95 two bits a number in groups of 32
    bytes; 96-107 the sixteen 6-bit scales; 108-109 half d. A third bit that is *not* set subtracts 4:
    q = two bits - (0 if third bit else 4). Value (d * (scale - 32)) * q.

    Scale i has its low four bits in byte i % 8 of the twelve (low nibble for i < 8), and its high two bits in byte
    8 + i % 4 at bit 2 * (i // 4).
    """

    name, type_id, block_elements, block_bytes = "Q3_K", 11, 256, 110
    scales = (ScaleField(108, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        high = bit_fields(integers(blocks, 0, 32), 32, range(8), 1)
        low = bit_fields(integers(blocks, 32, 64), 32, (0, 2, 4, 6), 3)
        d = float16(blocks, 108)
        return spread(d * self.sub_scales(blocks).float(), 16) * (low - 4 * (1 - high)).float()

    def sub_scales(self, blocks: Tensor) -> Tensor:
        """Unpack the scales, less 32: int32 [n, 16]."""
        low = bit_fields(integers(blocks, 96, 8), 8, (0, 4), 15)
        high = bit_fields(integers(blocks, 104, 4), 4, (0, 2, 4, 6), 3)
        return (low | high << 4) - 32


def six_bit_scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the twelve bytes that Q4_K and Q5_K share: scales and minima, int32 [n, 8] each.

    Bytes 0-3 hold scales 0-3 in their low six bits, bytes 4-7 minima 0-3. Bytes 8-11 hold the low four bits of
    scales 4-7 (low nibble) and of minima 4-7 (high nibble), whose upper two bits are the top bits of bytes 0-3 and
    4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return scales, minima


class Q4_K(Format):  # noqa: N801
    """block_q4_K: eight sub-blocks of 32.

    Bytes 0-1 half d; 2-3 half dmin; 4-15 scales and minima, see `six_bit_scales_and_minima`; 16-143 nibbles q in
    groups of 32 bytes. Value (d * scale) * q - (dmin * minimum).
    """

    name, type_id, block_elements, block_bytes = "Q4_K", 12, 256, 144
    scales = (ScaleField(0, "f16"), ScaleField(2, "f16"))

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        d, dmin = float16(blocks, 0), float16(blocks, 2)
        scales, minima = six_bit_scales_and_minima(integers(blocks, 4, 12))
        q = bit_fields(integers(blocks, 16, 128), 32, (0, 4), 15)
        return spread(d * scales.float(), 32) * q.float() - spread(dmin * minima.float(), 32)


class Q5_K(Format):  # noqa: N801
    """block_q5_K: eight sub-blocks of 32.

    Bytes 0-1 half d; 2-3 half dmin; 4-15 scales and minima as in Q4_K; 16-47 the fifth bits, groups of 32 bytes with
    one bit a number; 48-175 nibbles in groups of 32 bytes. Value (d * scale) * q - (dmin * minimum).
    """

    name, type_id, block_elements, block_bytes = "Q5_K", 13, 256, 176
    scales = (ScaleField(0, "f16"), ScaleField(2, "f16"))

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        d, dmin = float16(blocks, 0), float16(blocks, 2)
        scales, minima = six_bit_scales_and_minima(integers(blocks, 4, 12))
        high = bit_fields(integers(blocks, 16, 32), 32, range(8), 1)
        low = bit_fields(integers(blocks, 48, 128), 32, (0, 4), 15)
        return spread(d * scales.float(), 32) * (low | high << 4).float() - spread(dmin * minima.float(), 32)


class Q6_K(Format):  # noqa: N801
    """block_q6_K: sixteen sub-blocks of 16.

    Bytes 0-127 the low four bits, in groups of 64 bytes; 128-191 the high two bits, in groups of 32 bytes; 192-207
    sixteen int8 scales; 208-209 half d. Value (d * scale) * (q - 32).
    """

    name, type_id, block_elements, block_bytes = "Q6_K", 14, 256, 210
    scales = (ScaleField(208, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        low = bit_fields(integers(blocks, 0, 128), 64, (0, 4), 15)
        high = bit_fields(integers(blocks, 128, 64), 32, (0, 2, 4, 6), 3)
        scales = signed_integers(blocks, 192, 16)
        d = float16(blocks, 208)
        return spread(d * scales.float(), 16) * ((low | high << 4) - 32).float()
