"""The kernels' IQ formats against gguf-py, bit for bit: every grid entry, hostile bytes and memory, planted faults."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as gguf_dequantize
from numpy.typing import NDArray
from torch import Tensor

from mla_conformance.kernels.gguf.dequantize import dequantize
from mla_conformance.kernels.gguf.formats import find
from mla_conformance.kernels.gguf.tables import TABLES

Bytes = NDArray[np.uint8]

# Grid entries and the elements of one; of IQ4, the values.
ENTRIES = {
    "IQ1_S": (2048, 8),
    "IQ1_M": (2048, 8),
    "IQ2_XXS": (256, 8),
    "IQ2_XS": (512, 8),
    "IQ2_S": (1024, 8),
    "IQ3_XXS": (256, 4),
    "IQ3_S": (512, 4),
    "IQ4_NL": (16, 1),
    "IQ4_XS": (16, 1),
}
QUANTS = tuple(ENTRIES)


def set_scale(quant: str, blocks: Bytes, scale: NDArray[np.float16]) -> Bytes:
    """Write the float16 of each block: its first two bytes, in IQ1_M the high nibbles of its last four numbers."""
    if quant == "IQ1_M":
        shifts = np.arange(0, 16, 4, dtype=np.uint16)
        blocks[:, 49::2] &= 0x0F
        blocks[:, 49::2] |= (scale.view(np.uint16)[:, None] >> shifts & 15).astype(np.uint8) << 4
    else:
        blocks[:, :2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks


def random_blocks(quant: str, count: int) -> Bytes:
    """Random bytes; scales of both signs and all sizes, subnormal ones and the largest included."""
    rng = np.random.default_rng(find(quant).type_id)
    blocks = rng.integers(0, 256, (count, find(quant).block_bytes), dtype=np.uint8)
    scale = rng.integers(0, 0x7C00, count, dtype=np.uint16) | rng.integers(0, 2, count, dtype=np.uint16) << 15
    scale[:6] = 0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF
    return set_scale(quant, blocks, scale.view(np.float16))


def blocks_of_indices(quant: str, indices: NDArray[np.int64]) -> Bytes:
    """Blocks of scale 1 and no sign, whose grid indices (codes of IQ4) are ``indices`` in turn."""
    size, elements = find(quant).block_elements, ENTRIES[quant][1]
    index = indices.reshape(-1, size // elements)
    low, high = (index & 255).astype(np.uint8), index >> 8
    blocks = np.zeros((len(index), find(quant).block_bytes), dtype=np.uint8)
    if quant == "IQ1_S":
        blocks[:, 2:34] = low
        packed = (high.reshape(-1, 8, 4) << np.arange(0, 12, 3)).sum(2).astype(np.uint16)
        blocks[:, 34:50] = packed.view(np.uint8)
    elif quant == "IQ1_M":
        blocks[:, :32] = low
        blocks[:, 32:48] = high[:, 0::2] | high[:, 1::2] << 4
    elif quant == "IQ2_XXS":
        blocks[:, 2:].reshape(-1, 8, 8)[:, :, :4] = low.reshape(-1, 8, 4)
    elif quant == "IQ2_XS":
        blocks[:, 2:66] = index.astype(np.uint16).view(np.uint8)
    elif quant == "IQ2_S":
        blocks[:, 2:34] = low
        blocks[:, 66:74] = (high.reshape(-1, 8, 4) << np.arange(0, 8, 2)).sum(2)
    elif quant == "IQ3_XXS":
        blocks[:, 2:66] = low
    elif quant == "IQ3_S":
        blocks[:, 2:66] = low
        blocks[:, 66:74] = (high.reshape(-1, 8, 8) << np.arange(8)).sum(2)
    else:
        halves = low.reshape(len(index), -1, 2, 16)
        blocks[:, -size // 2 :] = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(index), -1)
    return set_scale(quant, blocks, np.ones(len(index), dtype=np.float16))


def every_index(quant: str) -> NDArray[np.int64]:
    """Whole blocks of indices, each grid entry at several places."""
    entries, elements = ENTRIES[quant]
    once = np.arange(max(entries, find(quant).block_elements // elements)) % entries
    return np.concatenate([once, np.random.default_rng(0).permutation(once)])


def expected(quant: str, blocks: Bytes) -> Tensor:
    """gguf-py's float32 values [1, elements]."""
    values = gguf_dequantize(blocks.reshape(1, -1), getattr(gguf.GGMLQuantizationType, quant))
    assert np.isfinite(values).all()
    return torch.from_numpy(values)


def found(quant: str, blocks: Bytes) -> Tensor:
    """The kernel's float32 values [1, elements]."""
    return dequantize(torch.from_numpy(blocks.reshape(1, -1)), quant)


def differing(left: Tensor, right: Tensor) -> Tensor:
    """Where the bits differ: -0 is not 0."""
    assert left.shape == right.shape
    assert left.dtype == right.dtype == torch.float32
    return left.view(torch.int32) != right.view(torch.int32)


@pytest.fixture
def replace_table(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Tensor], None]:
    """Give the kernels another table in place of a format's."""
    return lambda quant, table: monkeypatch.setitem(TABLES, quant, lambda device: table.to(device))


@pytest.mark.parametrize("quant", QUANTS)
def test_random_blocks_have_the_bits_of_gguf_py(quant: str) -> None:
    """Enough blocks for more than one program, the last one part full."""
    blocks = random_blocks(quant, 37 * 256 // find(quant).block_elements + 1)
    assert not differing(found(quant, blocks), expected(quant, blocks)).any()


@pytest.mark.parametrize("byte", [0x00, 0xFF])
@pytest.mark.parametrize("quant", QUANTS)
def test_blocks_of_one_byte_have_the_bits_of_gguf_py(quant: str, byte: int) -> None:
    """Nothing but zeros with scale 0 and -0, and every index, sign and multiplier at its largest."""
    blocks = np.full((3, find(quant).block_bytes), byte, dtype=np.uint8)
    set_scale(quant, blocks, np.array([0.0, -0.0, 1.5], dtype=np.float16))
    assert not differing(found(quant, blocks), expected(quant, blocks)).any()


@pytest.mark.parametrize("quant", QUANTS)
def test_every_grid_entry_decodes_as_in_gguf_py(quant: str) -> None:
    """And the blocks do contain each: as many different groups come out as the grid has entries."""
    entries, elements = ENTRIES[quant]
    blocks = blocks_of_indices(quant, every_index(quant))
    values = found(quant, blocks)
    assert len(torch.unique(values.reshape(-1, elements), dim=0)) == entries
    assert not differing(values, expected(quant, blocks)).any()


@pytest.mark.parametrize("quant", QUANTS)
def test_one_wrong_bit_of_the_table_is_noticed_where_its_entry_stands(
    quant: str, replace_table: Callable[[str, Tensor], None]
) -> None:
    """A planted fault in the first and in the last entry changes each group with that entry and no other."""
    entries, elements = ENTRIES[quant]
    indices, right = every_index(quant), TABLES[quant](torch.device("cpu"))
    blocks = blocks_of_indices(quant, indices)
    for entry in (0, entries - 1):
        wrong = right.clone()
        wrong.view(torch.int16).view(entries, -1)[entry, -1] ^= 0x200
        replace_table(quant, wrong)
        changed = differing(found(quant, blocks), expected(quant, blocks)).reshape(-1, elements).any(1)
        assert torch.equal(changed, torch.from_numpy(indices == entry))


@pytest.mark.parametrize("quant", QUANTS)
def test_no_index_leaves_the_table(quant: str, replace_table: Callable[[str, Tensor], None]) -> None:
    """A table amid garbage decodes as a table alone, whatever the bytes (ggml-org/llama.cpp#28581)."""
    right = TABLES[quant](torch.device("cpu"))
    amid = torch.cat([~right.view(torch.int16)] * 3).view(right.dtype)
    amid[len(right) : 2 * len(right)] = right
    replace_table(quant, amid[len(right) : 2 * len(right)])
    blocks = random_blocks(quant, 64)
    blocks[32:] = 0xFF
    set_scale(quant, blocks[32:], np.ones(32, dtype=np.float16))
    assert not differing(found(quant, blocks), expected(quant, blocks)).any()


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("quant", QUANTS)
def test_blocks_at_any_address_decode_alike(quant: str, offset: int) -> None:
    """Read as bytes or as words of two or four, as the address allows."""
    blocks = random_blocks(quant, 8)
    memory = torch.full((blocks.size + 32,), 0xA5, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + offset
    row = memory[start : start + blocks.size].unsqueeze(0)
    row.copy_(torch.from_numpy(blocks.reshape(1, -1)))
    assert row.data_ptr() % 16 == offset
    assert not differing(dequantize(row, quant), expected(quant, blocks)).any()


@pytest.mark.parametrize("quant", QUANTS)
def test_tables_are_made_once_a_device(quant: str) -> None:
    """The second call gives the same memory, of as many entries as the format has."""
    device = torch.device("cpu")
    assert TABLES[quant](device) is TABLES[quant](device)
    assert TABLES[quant](device).shape == (ENTRIES[quant][0],)
