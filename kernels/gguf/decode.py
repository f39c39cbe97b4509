"""Which function decodes which format, and how a matrix of bytes is handed to it.

A kernel takes the function as a ``tl.constexpr`` argument and calls it. Triton puts the source of such an argument in
the key of the compiled kernel, so two formats never share one and an edited function is compiled anew.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_conformance.kernels.gguf import decode_iq, decode_k, decode_legacy, decode_other
from mla_conformance.kernels.gguf.formats import QuantFormat
from mla_conformance.kernels.gguf.tables import TABLES

GROUP = 8
"""Elements a lane decodes at a time: 16 bytes of bfloat16, and no format's scale changes inside."""

# decode(ptr, block, group, tables, ALIGN) -> float32 [T, 8]; bytes.py says what the arguments are.
DECODE: dict[str, Any] = {
    "F32": decode_other.decode_f32,
    "F16": decode_other.decode_f16,
    "BF16": decode_other.decode_bf16,
    "Q4_0": decode_legacy.decode_q4_0,
    "Q4_1": decode_legacy.decode_q4_1,
    "Q5_0": decode_legacy.decode_q5_0,
    "Q5_1": decode_legacy.decode_q5_1,
    "Q8_0": decode_legacy.decode_q8_0,
    "Q8_1": decode_legacy.decode_q8_1,
    "Q1_0": decode_legacy.decode_q1_0,
    "Q2_K": decode_k.decode_q2_k,
    "Q3_K": decode_k.decode_q3_k,
    "Q4_K": decode_k.decode_q4_k,
    "Q5_K": decode_k.decode_q5_k,
    "Q6_K": decode_k.decode_q6_k,
    "Q8_K": decode_k.decode_q8_k,
    "IQ1_S": decode_iq.decode_iq1_s,
    "IQ1_M": decode_iq.decode_iq1_m,
    "IQ2_XXS": decode_iq.decode_iq2_xxs,
    "IQ2_XS": decode_iq.decode_iq2_xs,
    "IQ2_S": decode_iq.decode_iq2_s,
    "IQ3_XXS": decode_iq.decode_iq3_xxs,
    "IQ3_S": decode_iq.decode_iq3_s,
    "IQ4_NL": decode_iq.decode_iq4_nl,
    "IQ4_XS": decode_iq.decode_iq4_xs,
    "TQ1_0": decode_other.decode_tq1_0,
    "TQ2_0": decode_other.decode_tq2_0,
    "MXFP4": decode_other.decode_mxfp4,
    "NVFP4": decode_other.decode_nvfp4,
}

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Words(NamedTuple):
    """A matrix of bytes as the widest words that the address of every block allows.

    Attributes:
        words: The same memory as uint8, int16 or int32 [rows, row words].
        align: Power of two, 1 to 16, that divides every block's address, in bytes.
        row_units: Distance of two rows in units of ``align`` bytes, so that a kernel, which multiplies by ALIGN,
            knows how row addresses divide.
    """

    words: Tensor
    align: int
    row_units: int


def in_groups(quant: QuantFormat) -> QuantFormat:
    """The format as the decode functions see it: eight plain numbers count as a block."""
    if quant.block_elements >= GROUP:
        return quant
    return quant._replace(block_elements=GROUP, block_bytes=GROUP * quant.block_bytes)


def as_words(rows: Tensor, quant: QuantFormat) -> Words:
    """Reinterpret uint8 [rows, row_bytes] with inner stride 1, of at least one row and one block of ``in_groups``."""
    row_stride = rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
    # A tensor can be viewed as words only where its offset in its storage is a multiple of them, too.
    places = (rows.data_ptr(), rows.storage_offset(), row_stride, quant.block_bytes)
    align = 16
    while any(place % align for place in places):
        align //= 2
    words = rows.as_strided(rows.shape, (row_stride, 1)).view(_WORDS[min(align, 4)])
    return Words(words, align, row_stride // align)


def table_of(quant: QuantFormat, device: torch.device) -> Tensor | None:
    """The lookup table of a format that has one, on the device; tables.py says what it holds."""
    make = TABLES.get(quant.name)
    return None if make is None else make(device)
