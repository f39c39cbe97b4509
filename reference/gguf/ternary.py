"""The formats of three values, -1, 0 and 1, under one scale.

Source: the structs `block_tq*_0` in ggml-common.h and `dequantize_row_tq*_0` in ggml-quants.c. `half` is IEEE
float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.reference.gguf.format import Format, ScaleField, bit_fields, float16, integers


class TQ1_0(Format):  # noqa: N801 - ggml's name
    """block_tq1_0: five numbers a byte, base three.

    Bytes 0-47 five digits each; 48-51 four digits each; 52-53 half d. Value d * (digit - 1).

    A byte is a fraction of 256. Digit k of byte b is the whole part of 3 * f, f being the fraction of 256 that is
    left in the low eight bits of b * 3^k. Digits 0 of bytes 0-31 come first, then digits 1 of these, up to digit 4;
    then in the same way bytes 32-47; then bytes 48-51, which hold digits 0 to 3.
    """

    name, type_id, block_elements, block_bytes = "TQ1_0", 34, 256, 54
    scales = (ScaleField(52, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        parts = [(0, 32, 5), (32, 16, 5), (48, 4, 4)]
        digits = torch.cat([self.digits(integers(blocks, at, count), n) for at, count, n in parts], dim=1)
        return (digits - 1).float() * float16(blocks, 52)

    def digits(self, packed: Tensor, count: int) -> Tensor:
        """Return the first `count` base-three digits of bytes [n, bytes], place by place: [n, count * bytes]."""
        return torch.cat([((packed * 3**place & 255) * 3) >> 8 for place in range(count)], dim=1)


class TQ2_0(Format):  # noqa: N801
    """block_tq2_0: bytes 0-63 two bits q a number, in groups of 32 bytes; 64-65 half d. Value d * (q - 1).

    q = 3, which no quantiser writes, gives 2 * d.
    """

    name, type_id, block_elements, block_bytes = "TQ2_0", 35, 256, 66
    scales = (ScaleField(64, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        q = bit_fields(integers(blocks, 0, 64), 32, (0, 2, 4, 6), 3)
        return (q - 1).float() * float16(blocks, 64)
