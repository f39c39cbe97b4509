"""The dequantisation oracle equals gguf-py and ggml's C code bit for bit, and the comparison notices planted faults.

Rule for numbers that are not finite: infinities are equal, and a NaN stands exactly where the other has one. The
bits of a NaN are not compared, since the two judges themselves differ in them (its sign after a factor of -1).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.gguf import FORMATS, Format, ScaleField, dequantize, find, grids, microscaling
from mla_conformance.suites.goldens import GoldenError
from mla_conformance.suites.goldens.gguf_quantised import Ggml
from mla_conformance.suites.selfcheck.test_gguf_goldens import FAULTS

Judge = Callable[[Format, Tensor], Tensor]
NOT_IN_GGUF_PY = ("Q8_1", "Q8_K", "Q1_0")
BLOCKS = 256
FLOATS = {"f16": (5, 10), "iq1_m": (5, 10), "bf16": (8, 7), "f32": (8, 23)}
"""Exponent and mantissa bits of the kinds of scale that have a sign."""
CODE_BOOKS = {
    **{"IQ1_S": (2048, 8), "IQ1_M": (2048, 8), "IQ2_XXS": (256, 8), "IQ2_XS": (512, 8)},
    **{"IQ2_S": (1024, 8), "IQ3_XXS": (256, 4), "IQ3_S": (512, 4)},
}
"""Rows and width of the formats' code books."""
BOOK_OF = {name: getattr(grids, name[:3] if name.startswith("IQ1") else name) for name in CODE_BOOKS}
CASES = ("random", "zeros", "ones", "ones_finite", "subnormal", "negative", "largest", "lowest", "smallest")


@pytest.fixture(scope="module")
def gguf_py() -> Judge:
    """Dequantise with gguf-py."""
    try:
        gguf: ModuleType = importlib.import_module("gguf")
    except ImportError as error:
        pytest.fail(f"gguf-py cannot be imported ({error}); install gguf 0.19.0")

    def judge(kind: Format, blocks: Tensor) -> Tensor:
        numbers = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind.name])
        return torch.from_numpy(numbers.copy())

    return judge


@pytest.fixture(scope="module")
def ggml() -> Ggml:
    """Return ggml's C functions."""
    try:
        return Ggml()
    except GoldenError as error:
        pytest.fail(str(error))


def draw_scale(kind: str, case: str, count: int, rng: torch.Generator) -> Tensor:
    """Draw the bits of `count` scales, int64."""

    def below(limit: int) -> Tensor:
        return torch.randint(0, limit, (count,), generator=rng)

    def always(bits: int) -> Tensor:
        return torch.full((count,), bits)

    if kind == "e8m0":
        bytes_of = {"subnormal": below(2), "largest": always(255), "lowest": always(255), "smallest": always(0)}
        return bytes_of.get(case, below(256))
    if kind == "ue4m3":
        codes = {"subnormal": 1 + below(7), "largest": always(0x7E), "lowest": always(0xFE), "smallest": always(1)}
        return codes.get(case, below(256))
    exponent_bits, mantissa_bits = FLOATS[kind]
    sign, infinity = 1 << exponent_bits + mantissa_bits, (1 << exponent_bits) - 1 << mantissa_bits
    return {
        "subnormal": 1 + below((1 << mantissa_bits) - 1) + sign * below(2),
        "negative": below(infinity) + sign,
        "largest": always(infinity - 1),
        "lowest": always(sign + infinity - 1),
        "smallest": always(1),
    }.get(case, below(infinity) + sign * below(2))


def write_scale(blocks: Tensor, field: ScaleField, bits: Tensor) -> None:
    """Put the bits of one scale a block into their place, little-endian."""
    if field.kind == "iq1_m":
        for word in range(4):
            top = blocks[:, field.offset + 2 * word + 1]
            top.copy_(top & 15 | (bits >> 4 * word & 15) << 4)
        return
    size = {"f16": 2, "bf16": 2, "f32": 4, "e8m0": 1, "ue4m3": 1}[field.kind]
    for place in range(size):
        blocks[:, field.offset + place] = (bits >> 8 * place & 255).to(torch.uint8)


def draw_blocks(kind: Format, case: str, count: int = BLOCKS) -> Tensor:
    """Draw blocks: bytes at random or all the same, scales as the case says."""
    rng = torch.Generator().manual_seed(1000 * kind.type_id + CASES.index(case))
    if case in ("zeros", "ones", "ones_finite"):
        blocks = torch.full((count, kind.block_bytes), 0 if case == "zeros" else 255, dtype=torch.uint8)
    else:
        blocks = torch.randint(0, 256, (count, kind.block_bytes), generator=rng, dtype=torch.uint8)
    if case not in ("zeros", "ones"):
        for field in kind.scales:
            write_scale(blocks, field, draw_scale(field.kind, case, count, rng))
    return blocks


def differing(found: Tensor, expected: Tensor) -> int:
    """Count the numbers that differ in any bit and are not both NaN."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == torch.float32
    both_nan = found.isnan() & expected.isnan()
    return int(((found.view(torch.int32) != expected.view(torch.int32)) & ~both_nan).sum())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in NOT_IN_GGUF_PY])
def test_equals_gguf_py(name: str, case: str, gguf_py: Judge) -> None:
    """Every number of every block has gguf-py's bits."""
    kind = FORMATS[name]
    blocks = draw_blocks(kind, case)

    found = kind.dequantize_blocks(blocks)

    assert differing(found, gguf_py(kind, blocks)) == 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FORMATS)
def test_equals_ggml(name: str, case: str, ggml: Ggml) -> None:
    """Every number of every block has the bits that ggml's C code gives."""
    kind = FORMATS[name]
    blocks = draw_blocks(kind, case, 32 if name == "Q8_1" else BLOCKS)

    found = kind.dequantize_blocks(blocks)
    expected = ggml.dequantise(name, blocks)

    if name == "Q8_1":
        # ggml's numbers come through a dot product that adds 0 * s and 0 to each: -0 becomes 0, a NaN in s spreads.
        found = found + 0.0 * dequantised_s(blocks) + 0.0
    assert differing(found, expected) == 0


def dequantised_s(blocks: Tensor) -> Tensor:
    """Return the second half of a Q8_1 block, [blocks, 1]."""
    return blocks[:, 2:4].contiguous().view(torch.float16).float()


@pytest.mark.parametrize("name", FORMATS)
def test_finite_scales_give_finite_numbers(name: str) -> None:
    """The listed scale fields are all that can make a number infinite or NaN, apart from overflow of a float32."""
    kind = FORMATS[name]

    numbers = kind.dequantize_blocks(draw_blocks(kind, "random"))

    if not any(field.kind in ("f32", "e8m0") for field in kind.scales):
        assert numbers.isfinite().all()
    assert not numbers.isnan().any()
    assert len(set(numbers.flatten().tolist())) > 100


@pytest.mark.parametrize("name", CODE_BOOKS)
def test_every_row_of_the_code_book_equals_ggml(name: str, ggml: Ggml) -> None:
    """Random blocks that meet each row 32 times or more on average, so that none is missed (e^-32), equal ggml."""
    kind, (rows, width) = FORMATS[name], CODE_BOOKS[name]
    blocks = draw_blocks(kind, "random", 2048)

    found = kind.dequantize_blocks(blocks)

    assert found.numel() // width >= 32 * rows
    assert differing(found, ggml.dequantise(name, blocks)) == 0


@pytest.mark.parametrize("place", [0, 0.5, 1])
@pytest.mark.parametrize("name", CODE_BOOKS)
def test_one_wrong_row_of_a_code_book_is_noticed(
    name: str, place: float, monkeypatch: pytest.MonkeyPatch, ggml: Ggml
) -> None:
    """One wrong number in the first, middle or last row of a code book makes the comparison above fail."""
    kind, (rows, width) = FORMATS[name], CODE_BOOKS[name]
    blocks, unpack = draw_blocks(kind, "random", 2048), grids.unpack

    def unpack_wrongly(grid: grids.Grid) -> Tensor:
        book = unpack(grid).clone()
        book[int(place * (rows - 1)), width - 1] += 1
        return book

    monkeypatch.setattr(grids, "unpack", unpack_wrongly)

    assert unpack(BOOK_OF[name]).shape == (rows, width)
    assert differing(kind.dequantize_blocks(blocks), ggml.dequantise(name, blocks)) > 0


def test_every_half_equals_both(gguf_py: Judge, ggml: Ggml) -> None:
    """All 65536 float16 scales, infinite and NaN ones included, under all 256 int8 numbers of Q8_0."""
    kind = FORMATS["Q8_0"]
    blocks = torch.arange(65536 * 32).reshape(-1, 32).remainder(256)
    halves = torch.arange(65536)[:, None]
    blocks = torch.cat([halves & 255, halves >> 8, blocks], dim=1).to(torch.uint8)

    found = kind.dequantize_blocks(blocks)

    assert differing(found, gguf_py(kind, blocks)) == 0
    assert differing(found, ggml.dequantise("Q8_0", blocks)) == 0


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_every_microscale_equals_both(name: str, gguf_py: Judge, ggml: Ggml) -> None:
    """All 256 scale bytes times all sixteen E2M1 codes."""
    kind = FORMATS[name]
    scales = len(kind.scales)
    codes = torch.arange(kind.block_bytes - scales).remainder(16) * 17
    blocks = torch.cat([torch.arange(256)[:, None].expand(-1, scales), codes.expand(256, -1)], dim=1).to(torch.uint8)

    found = kind.dequantize_blocks(blocks)

    assert differing(found, gguf_py(kind, blocks)) == 0
    assert differing(found, ggml.dequantise(name, blocks)) == 0


def test_microscale_rules_at_the_ends() -> None:
    """The bytes for which the OCP specification and ggml part follow ggml, and are finite."""
    e8m0 = microscaling.halved_e8m0(torch.tensor([0, 1, 2, 127, 254, 255], dtype=torch.int32))
    ue4m3 = microscaling.halved_ue4m3(torch.tensor([0, 1, 7, 8, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF], dtype=torch.int32))

    assert e8m0.tolist() == [2.0**-128, 2.0**-127, 2.0**-126, 0.5, 2.0**126, 2.0**127]
    assert ue4m3.tolist() == [0, 2**-10, 7 * 2**-10, 2**-7, 224, 0, 0, 2**-10, 224, 240]


def test_sizes_and_numbers_equal_ggml(ggml: Ggml) -> None:
    """Ggml has the same number, elements and bytes for every format."""
    for name, kind in FORMATS.items():
        assert ggml.type_id(name) == kind.type_id
        assert ggml.block_size(name) == (kind.block_elements, kind.block_bytes)


def test_sizes_and_numbers_equal_gguf_py_but_for_q8_1() -> None:
    """gguf-py has the same table with one difference: it gives Q8_1 the 40 bytes of an older struct."""
    gguf = importlib.import_module("gguf")
    differences = {}
    for name, kind in FORMATS.items():
        quant = gguf.GGMLQuantizationType[name]
        assert quant.value == kind.type_id
        if gguf.GGML_QUANT_SIZES[quant] != (kind.block_elements, kind.block_bytes):
            differences[name] = gguf.GGML_QUANT_SIZES[quant]

    assert differences == {"Q8_1": (32, 40)}


@pytest.mark.parametrize("name", NOT_IN_GGUF_PY)
def test_gguf_py_lacks_what_is_judged_by_ggml_alone(name: str, gguf_py: Judge) -> None:
    """The formats left out of the comparison with gguf-py are the ones that it refuses."""
    with pytest.raises(NotImplementedError, match=name):
        gguf_py(FORMATS[name], draw_blocks(FORMATS[name], "zeros"))


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_noticed_by_both(fault: type[Format], gguf_py: Judge, ggml: Ggml) -> None:
    """A fault in one field of a format differs from both judges in at least a thirty-second of random numbers."""
    blocks = draw_blocks(FORMATS[fault.name], "random")

    found = fault().dequantize_blocks(blocks)

    assert differing(found, gguf_py(FORMATS[fault.name], blocks)) > found.numel() // 32
    assert differing(found, ggml.dequantise(fault.name, blocks)) > found.numel() // 32


@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_strides_do_not_matter(name: str) -> None:
    """Leading dimensions are kept, and any strides give what contiguous bytes give."""
    kind = FORMATS[name]
    blocks = draw_blocks(kind, "random", 12)
    data = blocks.reshape(2, 3, 2 * kind.block_bytes)
    padded = torch.full((2, 3, 2 * data.shape[2] + 3), 255, dtype=torch.uint8)
    padded[..., 1 : 2 * data.shape[2] : 2] = data

    numbers = dequantize(padded[..., 1 : 2 * data.shape[2] : 2], name)

    assert numbers.shape == (2, 3, 2 * kind.block_elements)
    assert differing(numbers.reshape(12, -1), kind.dequantize_blocks(blocks)) == 0
    assert torch.equal(dequantize(data, kind.type_id).view(torch.int32), numbers.view(torch.int32))
    assert dequantize(data[:0], name).shape == (0, 3, 2 * kind.block_elements)
    assert dequantize(data[..., :0], name).shape == (2, 3, 0)


def test_misuse_is_named() -> None:
    """Unknown types, other dtypes and rows that end inside a block raise an error that says so."""
    for quant in ("Q4_X", "q4_k", "F64", "I8", 28, 4, -1):
        with pytest.raises(ValueError, match=rf"quant is {quant!r}.*Q4_K \(12\)"):
            find(quant)
    with pytest.raises(ValueError, match=r"dtype torch\.int8"):
        dequantize(torch.zeros(144, dtype=torch.int8), "Q4_K")
    with pytest.raises(ValueError, match=r"shape \[2, 145\]; a row of Q4_K is a multiple of 144 bytes"):
        dequantize(torch.zeros(2, 145, dtype=torch.uint8), "Q4_K")
    with pytest.raises(ValueError, match=r"shape \[\]"):
        dequantize(torch.zeros((), dtype=torch.uint8), "Q4_K")
