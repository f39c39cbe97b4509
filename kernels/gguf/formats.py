"""The block formats of ggml, as sizes: what a matrix of bytes holds is decided by these two numbers a format.

Sizes and type ids are those of ggml-common.h and ggml.h; gguf-py gives Q8_1 a block of 40 bytes, which no version of
ggml's C code writes.
"""

from __future__ import annotations

from typing import NamedTuple


class QuantFormat(NamedTuple):
    """One block format.

    Attributes:
        name: ggml's name of the type.
        type_id: ggml's number of the type, as a GGUF file stores it.
        block_elements: Elements a block holds; a row is a whole number of blocks.
        block_bytes: Bytes a block takes.
    """

    name: str
    type_id: int
    block_elements: int
    block_bytes: int


FORMATS: dict[str, QuantFormat] = {
    row[0]: QuantFormat(*row)
    for row in (
        ("F32", 0, 1, 4),
        ("F16", 1, 1, 2),
        ("BF16", 30, 1, 2),
        ("Q4_0", 2, 32, 18),
        ("Q4_1", 3, 32, 20),
        ("Q5_0", 6, 32, 22),
        ("Q5_1", 7, 32, 24),
        ("Q8_0", 8, 32, 34),
        ("Q8_1", 9, 32, 36),
        ("Q1_0", 41, 128, 18),
        ("Q2_K", 10, 256, 84),
        ("Q3_K", 11, 256, 110),
        ("Q4_K", 12, 256, 144),
        ("Q5_K", 13, 256, 176),
        ("Q6_K", 14, 256, 210),
        ("Q8_K", 15, 256, 292),
        ("IQ1_S", 19, 256, 50),
        ("IQ1_M", 29, 256, 56),
        ("IQ2_XXS", 16, 256, 66),
        ("IQ2_XS", 17, 256, 74),
        ("IQ2_S", 22, 256, 82),
        ("IQ3_XXS", 18, 256, 98),
        ("IQ3_S", 21, 256, 110),
        ("IQ4_NL", 20, 32, 18),
        ("IQ4_XS", 23, 256, 136),
        ("TQ1_0", 34, 256, 54),
        ("TQ2_0", 35, 256, 66),
        ("MXFP4", 39, 32, 17),
        ("NVFP4", 40, 64, 36),
    )
}

# Types of GGUF that are no weights of a layer.
_REFUSED = {24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_BY_ID = {quant.type_id: quant for quant in FORMATS.values()}


def find(quant: str | int) -> QuantFormat:
    """The format of ggml's name ("Q4_K") or number (12).

    Raises:
        ValueError: No such type, or one that holds no weights (F64, I8, I16, I32, I64).
        TypeError: ``quant`` is neither a str nor an int.
    """
    if isinstance(quant, bool) or not isinstance(quant, str | int):
        raise TypeError(f"quant must be a ggml type as name or number, got {type(quant).__name__}")
    found = FORMATS.get(quant) if isinstance(quant, str) else _BY_ID.get(quant)
    if found is not None:
        return found
    name = _REFUSED.get(quant, str(quant)) if isinstance(quant, int) else quant
    if name in _REFUSED.values():
        raise ValueError(f"quant {quant!r} is GGUF type {name}, which no kernel takes as a weight")
    raise ValueError(f"quant {quant!r} is no known ggml type; known are {', '.join(FORMATS)}")
