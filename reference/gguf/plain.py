"""The formats that are no quantisation: one number a block.

Source: ggml.h `enum ggml_type`; ggml-impl.h for bfloat16.
"""

from __future__ import annotations

from torch import Tensor

from mla_conformance.reference.gguf.format import Format, ScaleField, float16, float32, float_from_bits, words


class F32(Format):
    """IEEE float32, kept as it is."""

    name, type_id, block_elements, block_bytes = "F32", 0, 1, 4
    scales = (ScaleField(0, "f32"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 1]."""
        return float32(blocks, 0).clone()


class F16(Format):
    """IEEE float16."""

    name, type_id, block_elements, block_bytes = "F16", 1, 1, 2
    scales = (ScaleField(0, "f16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 1]."""
        return float16(blocks, 0)


class BF16(Format):
    """The upper half of an IEEE float32."""

    name, type_id, block_elements, block_bytes = "BF16", 30, 1, 2
    scales = (ScaleField(0, "bf16"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 1]."""
        return float_from_bits(words(blocks, 0, 1, 2) << 16)
