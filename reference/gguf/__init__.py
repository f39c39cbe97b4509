"""Dequantisation of every block format of GGUF, in plain PyTorch and readable beside ggml's structs.

The rule where implementations differ is ggml's C code, which defines the formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.reference.gguf import iq_quants, k_quants, legacy, microscaling, plain, ternary
from mla_conformance.reference.gguf.format import Format, ScaleField

__all__ = ["FORMATS", "Format", "ScaleField", "dequantize", "find"]

_CLASSES: tuple[type[Format], ...] = (
    plain.F32,
    plain.F16,
    plain.BF16,
    legacy.Q4_0,
    legacy.Q4_1,
    legacy.Q5_0,
    legacy.Q5_1,
    legacy.Q8_0,
    legacy.Q8_1,
    legacy.Q1_0,
    k_quants.Q2_K,
    k_quants.Q3_K,
    k_quants.Q4_K,
    k_quants.Q5_K,
    k_quants.Q6_K,
    legacy.Q8_K,
    iq_quants.IQ1_S,
    iq_quants.IQ1_M,
    iq_quants.IQ2_XXS,
    iq_quants.IQ2_XS,
    iq_quants.IQ2_S,
    iq_quants.IQ3_XXS,
    iq_quants.IQ3_S,
    iq_quants.IQ4_NL,
    iq_quants.IQ4_XS,
    ternary.TQ1_0,
    ternary.TQ2_0,
    microscaling.MXFP4,
    microscaling.NVFP4,
)
FORMATS: dict[str, Format] = {kind.name: kind() for kind in _CLASSES}
"""Every format by ggml's name. GGUF's F64 and integer types are not among them: they store no weights."""


def find(quant: str | int) -> Format:
    """Return the format with a name ("Q4_K") or ggml number (12).

    Raises:
        ValueError: if there is none; the message lists all.

    """
    for known in FORMATS.values():
        if quant in (known.name, known.type_id):
            return known
    listed = ", ".join(f"{known.name} ({known.type_id})" for known in FORMATS.values())
    raise ValueError(f"quant is {quant!r}, which is no format for weights; take one of {listed}")


def dequantize(data: Tensor, quant: str | int) -> Tensor:
    """Turn the bytes of a tensor into numbers.

    Args:
        data: uint8 [..., row_bytes], any strides; a row is a whole number of blocks.
        quant: ggml's name or number of the type.

    Returns:
        float32 [..., columns], columns = row_bytes // block_bytes * block_elements.

    Raises:
        ValueError: on an unknown type, another dtype, or a row that ends inside a block.

    """
    kind = find(quant)
    if data.dtype != torch.uint8:
        raise ValueError(f"data has dtype {data.dtype}; pass the stored bytes as torch.uint8")
    if data.dim() == 0 or data.shape[-1] % kind.block_bytes:
        raise ValueError(
            f"data has shape {list(data.shape)}; a row of {kind.name} is a multiple of {kind.block_bytes} bytes"
        )
    blocks_per_row = data.shape[-1] // kind.block_bytes
    # A copy begins at an address that floats can be read from, wherever the rows began.
    blocks = data.reshape(-1, kind.block_bytes).clone()
    numbers = kind.dequantize_blocks(blocks)
    return numbers.reshape(*data.shape[:-1], blocks_per_row * kind.block_elements)
