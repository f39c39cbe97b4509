"""The dequantisation kernel: gguf-py's bits for every format, in any memory layout, and what it refuses."""

from __future__ import annotations

import importlib
import zlib
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import quants
from torch import Tensor

from mla_conformance.kernels.gguf import FORMATS, dequantize, find
from mla_conformance.kernels.gguf.decode import DECODE

# Where a block's float16 factors lie; any other byte may have any value.
FLOAT16_AT = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "Q1_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q8_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"), (0,)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
}
# Zeros of both signs, the largest number, the smallest normal and the smallest of all.
EXTREMES = (0.0, -0.0, 65504.0, -65504.0, 2.0**-14, -(2.0**-24))
# The formats that gguf-py cannot dequantise are structs with one factor.
STRUCTS = {
    "Q8_1": [("d", "<f2"), ("s", "<f2"), ("q", "i1", 32)],
    "Q8_K": [("d", "<f4"), ("q", "i1", 256), ("sums", "<i2", 16)],
    "Q1_0": [("d", "<f2"), ("bits", "u1", 16)],
}

Bytes = npt.NDArray[np.uint8]


def draw(name: str, rows: int, blocks: int) -> Bytes:
    """Blocks of random bytes whose factors are finite, some of them extreme: uint8 [rows, row_bytes]."""
    fmt = FORMATS[name]
    random = np.random.default_rng(zlib.crc32(name.encode()))
    count = rows * blocks
    data = random.integers(0, 256, (count, fmt.block_bytes), dtype=np.uint8)
    for at in FLOAT16_AT.get(name, ()):
        factors = random.standard_normal(count).astype(np.float16)
        extremes = random.permutation(np.resize(EXTREMES, count))
        factors = np.where(random.random(count) < 0.3, extremes, factors).astype("<f2")
        data[:, at : at + 2] = factors.view(np.uint8).reshape(count, 2)
    if name == "IQ1_M":
        data[:, 55] &= 0xBF  # a bit of the exponent that the top nibbles of the four scales make up
    if name in ("F16", "BF16", "F32"):
        data = random.standard_normal(count).astype("<f2" if name == "F16" else "<f4").view(np.uint8)
        data = data.reshape(count, -1)[:, -fmt.block_bytes :].copy()
    if name == "Q8_K":
        data[:, :4] = random.standard_normal(count).astype("<f4").view(np.uint8).reshape(count, 4)
    return data.reshape(rows, blocks * fmt.block_bytes)


def expected(name: str, data: Bytes) -> Tensor:
    """float32 [rows, columns] by gguf-py, or from the struct where it does not know the format."""
    with np.errstate(over="ignore"):
        if name not in STRUCTS:
            return torch.from_numpy(quants.dequantize(data, gguf.GGMLQuantizationType[name]).copy())
        blocks = data.reshape(-1).view(np.dtype(STRUCTS[name]))
        if name == "Q1_0":
            signs = np.unpackbits(blocks["bits"], axis=1, bitorder="little").astype(np.float32) * 2 - 1
        else:
            signs = blocks["q"].astype(np.float32)
        return torch.from_numpy((blocks["d"].astype(np.float32)[:, None] * signs).reshape(data.shape[0], -1))


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    torch.testing.assert_close(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8), rtol=0, atol=0)


def blocks_a_row(name: str) -> int:
    """Three, or as many columns of a plain type."""
    return 3 if FORMATS[name].block_elements > 1 else 40


def test_every_format_has_its_block_size_and_number() -> None:
    """As gguf-py has them, except for Q8_1, whose struct in ggml-common.h has 36 bytes."""
    for name, fmt in FORMATS.items():
        assert find(name) is find(fmt.type_id) is fmt
        if name in gguf.GGMLQuantizationType.__members__:
            kind = gguf.GGMLQuantizationType[name]
            assert fmt.type_id == kind.value
            size = gguf.GGML_QUANT_SIZES[kind]
            assert (fmt.block_elements, fmt.block_bytes) == ((32, 36) if name == "Q8_1" else size)
    assert set(DECODE) == set(FORMATS)


@pytest.mark.parametrize("rows", [0, 1, 3, 37])
@pytest.mark.parametrize("name", FORMATS)
def test_float32_has_the_bits_of_gguf_py(name: str, rows: int) -> None:
    """Random blocks, in any number of rows."""
    data = draw(name, 37, blocks_a_row(name))
    assert_same_bits(dequantize(torch.from_numpy(data[:rows]), name), expected(name, data)[:rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_half_precision_result_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    """As torch rounds the float32 one; what is too large for float16 is infinite."""
    data = draw(name, 5, blocks_a_row(name))
    assert_same_bits(dequantize(torch.from_numpy(data), name, dtype=dtype), expected(name, data).to(dtype))


@pytest.mark.parametrize(("first", "padding"), [(0, 8), (8, 0), (4, 4), (2, 6), (0, 1), (3, 2)])
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_may_lie_anywhere(name: str, first: int, padding: int) -> None:
    """The words that are read get narrower with the alignment of the first byte and of the rows, the bits stay."""
    data = draw(name, 3, blocks_a_row(name))
    memory = torch.full((16 + 3 * (data.shape[1] + padding),), 0xFF, dtype=torch.uint8)
    start = first - memory.data_ptr() % 16 + 16 * (memory.data_ptr() % 16 > first)
    rows = memory.as_strided(data.shape, (data.shape[1] + padding, 1), start)
    rows.copy_(torch.from_numpy(data))
    assert_same_bits(dequantize(rows, name), expected(name, data))


@pytest.mark.parametrize("columns", [1, 7, 9, 513])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_rows_may_have_any_width(name: str, columns: int) -> None:
    """Also one that is no whole number of groups of eight, from an odd address."""
    data = draw(name, 3, columns)
    moved = torch.empty(data.size + 1, dtype=torch.uint8)[1:].view(data.shape)
    moved.copy_(torch.from_numpy(data))
    assert_same_bits(dequantize(moved, name, dtype=torch.bfloat16), expected(name, data).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "padding"), [(0, 16), (8, 8), (1, 3)])
def test_out_may_be_a_part_of_a_larger_tensor(first: int, padding: int, dtype: torch.dtype) -> None:
    """It is returned itself, and what lies around it is not written."""
    data = draw("Q4_K", 3, 2)
    memory = torch.full((3, 512 + padding + first), 7.0, dtype=dtype)
    out = memory[:, first : first + 512]
    assert dequantize(torch.from_numpy(data), "Q4_K", out=out) is out
    assert_same_bits(out, expected("Q4_K", data).to(dtype))
    assert (memory[:, :first] == 7).all()
    assert (memory[:, first + 512 :] == 7).all()


def test_rows_may_lie_more_than_2_to_the_31_elements_apart() -> None:
    """Offsets are 64-bit; of these gigabytes only the rows themselves are touched."""
    data = draw("Q8_0", 2, 8)
    distance = 2**31 + 64
    far_data = torch.empty(distance + 272, dtype=torch.uint8).as_strided((2, 272), (distance, 1))
    far_data.copy_(torch.from_numpy(data))
    far_out = torch.empty(distance + 256, dtype=torch.bfloat16).as_strided((2, 256), (distance, 1))
    assert_same_bits(dequantize(far_data, "Q8_0", out=far_out), expected("Q8_0", data).bfloat16())


def test_more_rows_than_a_grid_has_are_launched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are the second axis of the grid, which CUDA limits."""
    # The package has a function of the module's name.
    module = importlib.import_module("mla_conformance.kernels.gguf.dequantize")
    monkeypatch.setattr(module, "MAX_GRID_YZ", 4)
    data = draw("Q5_0", 9, 2)
    rows = torch.zeros(9, data.shape[1] + 2, dtype=torch.uint8)[:, : data.shape[1]]
    rows.copy_(torch.from_numpy(data))
    assert_same_bits(dequantize(rows, "Q5_0"), expected("Q5_0", data))


def test_leading_dimensions_are_kept() -> None:
    """Experts are matrices in a row; a tensor without elements keeps its shape, too."""
    data = draw("Q6_K", 6, 2)
    experts = torch.from_numpy(data).view(2, 3, -1)
    assert_same_bits(dequantize(experts, 14), expected("Q6_K", data).view(2, 3, 512))
    assert_same_bits(dequantize(experts.transpose(0, 1), 14), expected("Q6_K", data).view(2, 3, 512).transpose(0, 1))
    assert_same_bits(dequantize(experts[0, 0], "Q6_K"), expected("Q6_K", data)[0])
    assert dequantize(experts[:, :0], "Q6_K").shape == (2, 0, 512)
    assert dequantize(experts[..., :0], "Q6_K").shape == (2, 3, 0)


DATA = torch.zeros(3, 36, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("quant", {"quant": "Q4_X"}, ValueError),
        ("quant", {"quant": "F64"}, ValueError),
        ("quant", {"quant": 26}, ValueError),
        ("quant", {"quant": 999}, ValueError),
        ("quant", {"quant": 2.0}, TypeError),
        ("quant", {"quant": True}, TypeError),
        ("data", {"data": DATA.tolist()}, TypeError),
        ("data", {"data": DATA.view(torch.int8)}, TypeError),
        ("data", {"data": DATA[0, 0]}, ValueError),
        ("data", {"data": DATA[:, :35]}, ValueError),
        ("data", {"data": torch.zeros(3, 72, dtype=torch.uint8)[:, ::2]}, ValueError),
        ("dtype", {"dtype": torch.float64}, TypeError),
        ("out", {"out": [0.0]}, TypeError),
        ("out", {"out": torch.empty(3, 64, dtype=torch.int32)}, TypeError),
        ("out", {"out": torch.empty(3, 64), "dtype": torch.bfloat16}, TypeError),
        ("out", {"out": torch.empty(3, 32)}, ValueError),
        ("out", {"out": torch.empty(64, 3).T}, ValueError),
        ("out", {"out": torch.empty(64).expand(3, 64)}, ValueError),
        ("out", {"out": torch.empty(3, 64, device="meta")}, ValueError),
        ("out", {"data": DATA.expand(2, 3, 36), "out": torch.empty(3, 2, 64).transpose(0, 1)}, ValueError),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name: str, arguments: dict[str, Any], error: type[Exception]) -> None:
    """Before anything is launched, with the argument's name in the message."""
    given: dict[str, Any] = {"data": DATA, "quant": "Q4_0"} | arguments
    with pytest.raises(error, match=rf"^{name}\b"):
        dequantize(given.pop("data"), given.pop("quant"), **given)
