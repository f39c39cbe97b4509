"""Drawing quantised blocks: random bytes with factors that are finite, as any quantiser could have written them.

No quantiser is needed for that: every pattern of the integer fields is a valid block. Only the floating-point factors
must be chosen, and :class:`reference.gguf.ScaleField` says where they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.reference.gguf import FORMATS, Format

TOP_NIBBLE = 12
"""IQ1_M spreads its float16 factor over the top nibbles of four 16-bit words."""


def draw(quant: str, rows: int, columns: int, values: str, generator: torch.Generator) -> Tensor:
    """Return uint8 [rows, row_bytes] of ``quant``.

    Args:
        quant: ggml's name of the type.
        rows: rows of the matrix.
        columns: its columns, whole blocks.
        values: ``random`` (any bytes, any finite factor); ``moderate`` (any bytes, factors that give values of about
            1); ``zeros``; ``ones`` (every integer field all ones, factors 1); ``denormal``, ``negative`` and
            ``extreme`` factors; ``counting`` (bytes count up, so that every byte is at every place).
        generator: source of the drawn bytes.
    """
    form = FORMATS[quant]
    count = rows * columns // form.block_elements
    blocks = torch.randint(0, 256, (count, form.block_bytes), dtype=torch.uint8, generator=generator)
    if values == "zeros":
        blocks.zero_()
    elif values == "ones":
        blocks.fill_(0xFF)
    elif values == "counting":
        blocks = torch.arange(count * form.block_bytes).view(count, form.block_bytes).remainder(256).to(torch.uint8)
    if values != "zeros":
        _write_factors(form, blocks, values, generator)
    return blocks.view(rows, columns // form.block_elements * form.block_bytes)


def _write_factors(form: Format, blocks: Tensor, values: str, generator: torch.Generator) -> None:
    """Overwrite every floating-point factor of ``blocks`` with one of the kind that ``values`` asks for."""
    for field in form.scales:
        codes = _FACTORS[field.kind](values, len(blocks), generator, form.name)
        if field.kind == "iq1_m":
            words = blocks[:, field.offset : field.offset + 8].contiguous().view(torch.int16)
            nibbles = torch.stack([codes.int() >> 4 * i & 0xF for i in range(4)], 1) << TOP_NIBBLE
            mixed = (words.int() & 0xFFF) | nibbles
            blocks[:, field.offset : field.offset + 8] = mixed.to(torch.int16).view(torch.uint8)
        else:
            size = codes.element_size()
            blocks[:, field.offset : field.offset + size] = codes.view(torch.uint8).view(-1, size)


def _float16(values: str, count: int, generator: torch.Generator, name: str) -> Tensor:
    """Finite float16 factors, as int16 codes."""
    codes = torch.randint(0, 1 << 16, (count,), generator=generator)
    sign, rest = codes & 0x8000, codes & 0x7FFF
    if values in ("moderate", "counting"):
        # Elements are plain numbers or a factor times some tens: 2**-6 gives values of about 1 in most types.
        exponent = 15 if name == "F16" else 9
        codes = sign | (exponent << 10) | (rest & 0x3FF)
    elif values == "ones":
        codes = torch.full((count,), 0x3C00)
    elif values == "denormal":
        codes = sign | (rest & 0x3FF)
    elif values == "negative":
        codes = 0x8000 | (rest % 0x7C00)
    elif values == "extreme":
        codes = sign | torch.tensor([0x7BFF, 0x0001, 0x0400, 0x0000])[rest % 4]
    else:
        codes = sign | (rest % 0x7C00)
    return codes.to(torch.int32).to(torch.int16)


def _float32(values: str, count: int, generator: torch.Generator, name: str) -> Tensor:
    """Finite float32 factors whose products with a byte stay finite."""
    signs = torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1.0
    sizes = 1 + torch.rand(count, generator=generator)
    plain = name == "F32"
    exponents = torch.randint(-120, 100, (count,), generator=generator).double()
    if values in ("moderate", "counting"):
        exponents = torch.full((count,), -1.0 if plain else -7.0, dtype=torch.float64)
    elif values == "ones":
        return torch.ones(count)
    elif values == "denormal":
        exponents = torch.full((count,), -135.0, dtype=torch.float64)
    elif values == "negative":
        signs = -torch.ones(count)
    elif values == "extreme":
        exponents = torch.tensor([119.0, -149.0, -126.0, 0.0], dtype=torch.float64)[exponents.long() % 4]
    return (signs * sizes * 2.0**exponents).float()


def _bfloat16(values: str, count: int, generator: torch.Generator, name: str) -> Tensor:
    return _float32(values, count, generator, "F32").to(torch.bfloat16)


def _e8m0(values: str, count: int, generator: torch.Generator, name: str) -> Tensor:
    """Powers of two; 255, which the OCP standard calls NaN and ggml a number, has a requirement of its own."""
    codes = torch.randint(0, 255, (count,), generator=generator)
    if values in ("moderate", "counting"):
        codes = 124 + codes % 4
    elif values == "ones":
        codes.fill_(127)
    elif values == "denormal":
        codes %= 2
    elif values == "extreme":
        codes = torch.tensor([0, 1, 2, 254])[codes % 4]
    return codes.to(torch.uint8)


def _ue4m3(values: str, count: int, generator: torch.Generator, name: str) -> Tensor:
    """Unsigned e4m3, without the code that means NaN."""
    codes = torch.randint(0, 127, (count,), generator=generator)
    if values in ("moderate", "counting"):
        codes = 0x30 + codes % 16
    elif values == "ones":
        codes.fill_(0x38)
    elif values == "denormal":
        codes %= 8
    elif values == "extreme":
        codes = torch.tensor([0, 1, 8, 0x7E])[codes % 4]
    return codes.to(torch.uint8)


_FACTORS = {
    "f16": _float16,
    "iq1_m": _float16,
    "f32": _float32,
    "bf16": _bfloat16,
    "e8m0": _e8m0,
    "ue4m3": _ue4m3,
}
