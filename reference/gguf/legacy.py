"""The formats of 32 numbers with one scale, and Q1_0 with 128.

Source: the structs `block_*` in ggml-common.h and `dequantize_row_*` in ggml-quants.c. `half` is IEEE float16.
Where two numbers share a byte, the low nibbles are the first half of the block and the high nibbles the second.
"""

from __future__ import annotations

from torch import Tensor

from mla_conformance.reference.gguf.format import (
    Format,
    ScaleField,
    bit_fields,
    float16,
    float32,
    integers,
    signed_integers,
)


class Q4_0(Format):  # noqa: N801 - ggml's name
    """block_q4_0: bytes 0-1 half d; 2-17 sixteen bytes of two nibbles q. Value d * (q - 8)."""

    name, type_id, block_elements, block_bytes = "Q4_0", 2, 32, 18
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 32]."""
        d = float16(blocks, 0)
        q = bit_fields(integers(blocks, 2, 16), 16, (0, 4), 15)
        return (q - 8).float() * d


class Q4_1(Format):  # noqa: N801
    """block_q4_1: bytes 0-1 half d; 2-3 half m; 4-19 sixteen bytes of two nibbles q. Value d * q + m."""

    name, type_id, block_elements, block_bytes = "Q4_1", 3, 32, 20
    scales = (ScaleField(0, "f16"), ScaleField(2, "f16"))

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 32]."""
        d, m = float16(blocks, 0), float16(blocks, 2)
        q = bit_fields(integers(blocks, 4, 16), 16, (0, 4), 15)
        return q.float() * d + m


class Q5_0(Format):  # noqa: N801
    """block_q5_0: bytes 0-1 half d; 2-5 the fifth bits, bit i for number i; 6-21 nibbles as in Q4_0.

    With the fifth bit on top of the nibble as q, the value is d * (q - 16).
    """

    name, type_id, block_elements, block_bytes = "Q5_0", 6, 32, 22
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 32]."""
        d = float16(blocks, 0)
        high = bit_fields(integers(blocks, 2, 4), 1, range(8), 1)
        low = bit_fields(integers(blocks, 6, 16), 16, (0, 4), 15)
        return ((low | high << 4) - 16).float() * d


class Q5_1(Format):  # noqa: N801
    """block_q5_1: bytes 0-1 half d; 2-3 half m; 4-7 the fifth bits; 8-23 nibbles, both as in Q5_0. Value d * q + m."""

    name, type_id, block_elements, block_bytes = "Q5_1", 7, 32, 24
    scales = (ScaleField(0, "f16"), ScaleField(2, "f16"))

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 32]."""
        d, m = float16(blocks, 0), float16(blocks, 2)
        high = bit_fields(integers(blocks, 4, 4), 1, range(8), 1)
        low = bit_fields(integers(blocks, 8, 16), 16, (0, 4), 15)
        return (low | high << 4).float() * d + m


class Q8_0(Format):  # noqa: N801
    """block_q8_0: bytes 0-1 half d; 2-33 thirty-two int8 q. Value d * q."""

    name, type_id, block_elements, block_bytes = "Q8_0", 8, 32, 34
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 32]."""
        return signed_integers(blocks, 2, 32).float() * float16(blocks, 0)


class Q8_1(Format):  # noqa: N801
    """block_q8_1: bytes 0-1 half d; 2-3 half s; 4-35 thirty-two int8 q. Value d * q.

    s is d times the sum of the q, there for dot products and no part of the values. ggml uses the format for
    activations only and has no function that dequantises it. Its struct has had 36 bytes since d and s became
    half; gguf-py 0.19.0 still states 40, the size with two float32.
    """

    name, type_id, block_elements, block_bytes = "Q8_1", 9, 32, 36
    scales = (ScaleField(0, "f16"), ScaleField(2, "f16"))

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 32]."""
        return signed_integers(blocks, 4, 32).float() * float16(blocks, 0)


class Q8_K(Format):  # noqa: N801
    """block_q8_K: bytes 0-3 float d; 4-259 int8 q; 260-291 sixteen int16, the sums of 16 q each. Value d * q.

    The sums are there for dot products and no part of the values. ggml uses the format for activations only.
    """

    name, type_id, block_elements, block_bytes = "Q8_K", 15, 256, 292
    scales = (ScaleField(0, "f32"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 256]."""
        return float32(blocks, 0) * signed_integers(blocks, 4, 256).float()


class Q1_0(Format):  # noqa: N801
    """block_q1_0: bytes 0-1 half d; 2-17 one bit a number, lowest first. Value d where the bit is set, else -d."""

    name, type_id, block_elements, block_bytes = "Q1_0", 41, 128, 18
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 128]."""
        bits = bit_fields(integers(blocks, 2, 16), 1, range(8), 1)
        return (2 * bits - 1).float() * float16(blocks, 0)
