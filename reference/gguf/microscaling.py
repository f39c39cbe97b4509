"""The microscaling formats: 4-bit floating-point numbers under 8-bit floating-point scales.

Source: `block_mxfp4` and `block_nvfp4` in ggml-common.h, `ggml_e8m0_to_fp32_half` and `ggml_ue4m3_to_fp32` in
ggml-impl.h; for the number formats the OCP Microscaling Formats specification 1.0. ggml keeps twice the value of an
E2M1 number, an integer, and halves the scale instead; the products are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.reference.gguf.format import Format, ScaleField, bit_fields, float_from_bits, integers, spread

DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of the sixteen E2M1 numbers, where -0 becomes 0: `kvalues_mxfp4`."""


def doubled_e2m1(codes: Tensor) -> Tensor:
    """Return twice the value of E2M1 codes, float32."""
    return torch.tensor(DOUBLED_E2M1, dtype=torch.float32, device=codes.device)[codes.long()]


def halved_e8m0(exponents: Tensor) -> Tensor:
    """Return 2^(x - 128) for bytes x as float32: half of what E8M0 means.

    Bytes 0 and 1 give the subnormal 2^-128 and 2^-127. Byte 255, NaN in the specification, gives 2^127 in ggml's
    C code and in gguf-py alike, and so here.
    """
    normal = (exponents.long() - 1).clamp(min=0) << 23
    return float_from_bits(torch.where(exponents < 2, (1 << 21) << exponents.long(), normal))


def halved_ue4m3(codes: Tensor) -> Tensor:
    """Return half of what E4M3 numbers mean, with their sign bit ignored, as float32.

    Code 0x7F, NaN in the specification, gives 0. With the sign bit set (0xFF) it gives 240 like any other code of
    its exponent and mantissa, since ggml compares the whole byte.
    """
    exponent, mantissa = codes >> 3 & 15, (codes & 7).float()
    subnormal = mantissa * 2.0**-10
    normal = (1.0 + mantissa / 8.0) * float_from_bits((exponent.long() - 8 + 127) << 23)
    return torch.where(codes == 0x7F, 0.0, torch.where(exponent == 0, subnormal, normal))


class MXFP4(Format):
    """block_mxfp4: byte 0 the E8M0 scale; 1-16 E2M1 nibbles, low nibbles the first sixteen numbers.

    Value halved scale * doubled E2M1.
    """

    name, type_id, block_elements, block_bytes = "MXFP4", 39, 32, 17
    scales = (ScaleField(0, "e8m0"),)

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 32]."""
        scale = halved_e8m0(integers(blocks, 0, 1))
        return doubled_e2m1(bit_fields(integers(blocks, 1, 16), 16, (0, 4), 15)) * scale


class NVFP4(Format):
    """block_nvfp4: four sub-blocks of 16.

    Bytes 0-3 a UE4M3 scale each; 4-35 eight bytes of E2M1 nibbles each, low nibbles the first eight numbers.
    Value halved scale * doubled E2M1. A model's second scale, one float32 a tensor, is a tensor of its own and is
    multiplied in by the layer, not here.
    """

    name, type_id, block_elements, block_bytes = "NVFP4", 40, 64, 36
    scales = (ScaleField(0, "ue4m3"), ScaleField(1, "ue4m3"), ScaleField(2, "ue4m3"), ScaleField(3, "ue4m3"))

    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        """Return the numbers, float32 [n, 64]."""
        scale = halved_ue4m3(integers(blocks, 0, 4))
        return doubled_e2m1(bit_fields(integers(blocks, 4, 32), 8, (0, 4), 15)) * spread(scale, 16)
