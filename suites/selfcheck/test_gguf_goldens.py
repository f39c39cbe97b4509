"""The dequantisation oracle equals the numbers that ggml made of its own quantised tensors, without ggml at hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_conformance.reference.gguf import FORMATS, dequantize, iq_quants, k_quants, legacy, microscaling, ternary
from mla_conformance.reference.gguf.format import Format
from mla_conformance.suites import goldens
from mla_conformance.suites.goldens import gguf_quantised as golden

NEARLY_EXACT = {"F16": 2.0**-11, "BF16": 2.0**-8, "TQ1_0": 2.0**-11, "TQ2_0": 2.0**-11}
"""Formats whose error is one rounding: to 11 or 8 significant bits, or that of the scale of ternary weights."""


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    """Return the golden's tensors, once the file is known to be the one that its provenance describes."""
    return goldens.load(golden.NAME)[0]


def source_of(quant: str, stored: dict[str, Tensor]) -> Tensor:
    """Return the weights that were quantised."""
    return stored["source.ternary" if quant in golden.TERNARY else "source"]


def relative_error(found: Tensor, source: Tensor) -> float:
    """Return the root mean square of the difference as a share of that of the source."""
    return float((found - source).norm() / source.norm())


def error_limit(quant: str) -> float:
    """Return an error that a sound quantiser of this format stays under, for normal weights.

    With b bits a weight no quantiser gets the error of normal weights under 2^-b (the rate-distortion bound).
    Uniform steps, bits spent on scales and scales chosen from few cost up to two bits more: 2^(2 - b). Q8_1 and
    Q8_K, the formats of nine bits, spend up to one more on sums: 2^(3 - b). Keeping only the sign of a normal
    number leaves sqrt(1 - 2 / pi) = 0.603 and zeros leave 1, so that no format may exceed 0.7.
    """
    if quant in NEARLY_EXACT:
        return NEARLY_EXACT[quant]
    kind = FORMATS[quant]
    bits = 8 * kind.block_bytes / kind.block_elements
    return float(min(2.0 ** ((3 if bits >= 9 else 2) - bits), 0.7))


def test_golden_holds_every_quantised_format(stored: dict[str, Tensor]) -> None:
    """Every format but float32 is there, of the stated shape, with provenance and under 200 KB."""
    assert set(golden.QUANTS) == FORMATS.keys() - {"F32"}
    assert stored.keys() == {"source", "source.ternary", "importance"} | {
        f"{quant}.{part}" for quant in golden.QUANTS for part in ("quantised", "dequantised")
    }
    for quant in golden.QUANTS:
        kind = FORMATS[quant]
        row_bytes = golden.COLUMNS // kind.block_elements * kind.block_bytes
        assert stored[f"{quant}.quantised"].shape == (golden.ROWS, row_bytes)
        assert stored[f"{quant}.dequantised"].shape == (golden.ROWS, golden.COLUMNS)
    content = golden.PATH.read_bytes()
    provenance = golden.read_provenance(content)
    assert provenance.keys() == {"generator", "ggml", "ggml_python", "torch", "seed", "config"}
    assert provenance["seed"] == golden.SEED
    assert len(content) < 200_000


def test_sources_are_drawn_again_equal(stored: dict[str, Tensor]) -> None:
    """The weights follow from the seed on every machine."""
    for name, tensor in golden.sources().items():
        assert torch.equal(stored[name], tensor)


@pytest.mark.parametrize("quant", golden.QUANTS)
def test_oracle_equals_the_golden(quant: str, stored: dict[str, Tensor]) -> None:
    """Every number has the bits that ggml gave it."""
    found = dequantize(stored[f"{quant}.quantised"], quant)

    expected = stored[f"{quant}.dequantised"]
    if quant == "Q8_1":
        # ggml's numbers come through a dot product, which turns -0 into 0.
        found = found + 0.0
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("quant", golden.QUANTS)
def test_golden_is_near_its_source(quant: str, stored: dict[str, Tensor]) -> None:
    """What ggml stored stands for the weights that were put in, each row, to the format's accuracy."""
    source, numbers = source_of(quant, stored), stored[f"{quant}.dequantised"]

    for row in range(golden.ROWS):
        assert relative_error(numbers[row], source[row]) < error_limit(quant)


@pytest.mark.parametrize("quant", golden.QUANTS)
def test_nearness_notices_zeros_shifts_and_foreign_rows(quant: str, stored: dict[str, Tensor]) -> None:
    """Zeros, numbers one place on, the other row, other signs and, where it is sharp enough, 1.1 times are not near."""
    source, numbers = source_of(quant, stored), stored[f"{quant}.dequantised"]

    for wrong in (torch.zeros_like(numbers), numbers.roll(1, dims=1), numbers.flip(0), -numbers):
        assert relative_error(wrong, source) > error_limit(quant)
    if error_limit(quant) < 2.0**-6:
        assert relative_error(numbers * 1.1, source) > error_limit(quant)


class SwappedNibbles(k_quants.Q4_K):
    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        swapped = blocks.clone()
        swapped[:, 16:] = blocks[:, 16:] >> 4 | blocks[:, 16:] << 4
        return super().dequantize_blocks(swapped)


class InterleavedNibbles(legacy.Q4_0):
    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        return super().dequantize_blocks(blocks).reshape(-1, 2, 16).transpose(1, 2).flatten(1)


class ScaleOfTheNeighbour(k_quants.Q3_K):
    def sub_scales(self, blocks: Tensor) -> Tensor:
        return super().sub_scales(blocks).roll(1, dims=1)


class UnsignedScales(k_quants.Q6_K):
    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        cleared = blocks.clone()
        cleared[:, 192:208] &= 127
        return super().dequantize_blocks(cleared)


class FifthBitsForgotten(k_quants.Q5_K):
    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        cleared = blocks.clone()
        cleared[:, 16:48] = 0
        return super().dequantize_blocks(cleared)


class MinimumAndScaleSwapped(k_quants.Q2_K):
    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        swapped = blocks.clone()
        swapped[:, 80:84] = blocks[:, [82, 83, 80, 81]]
        return super().dequantize_blocks(swapped)


class ParityDropped(iq_quants.IQ2_XXS):
    def signs(self, seven: Tensor) -> Tensor:
        return iq_quants.signs_of_bytes(seven)


class ParityDropped16(iq_quants.IQ2_XS):
    def signs(self, seven: Tensor) -> Tensor:
        return iq_quants.signs_of_bytes(seven)


class ParityDropped3(iq_quants.IQ3_XXS):
    def signs(self, seven: Tensor) -> Tensor:
        return iq_quants.signs_of_bytes(seven)


class HalfFromTheTop(iq_quants.IQ1_M):
    def super_scale(self, nibbles: Tensor) -> Tensor:
        return super().super_scale(nibbles.flip(1))


class DigitsNotWrapped(ternary.TQ1_0):
    def digits(self, packed: Tensor, count: int) -> Tensor:
        return torch.cat([packed // 3 ** (4 - place) % 3 for place in range(count)], dim=1)


class ScaleNotHalved(microscaling.MXFP4):
    def dequantize_blocks(self, blocks: Tensor) -> Tensor:
        return super().dequantize_blocks(blocks) * 2


FAULTS: list[type[Format]] = [
    *(SwappedNibbles, InterleavedNibbles, ScaleOfTheNeighbour, UnsignedScales, FifthBitsForgotten),
    *(MinimumAndScaleSwapped, ParityDropped, ParityDropped16, ParityDropped3, HalfFromTheTop, DigitsNotWrapped),
    ScaleNotHalved,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_golden_notices_a_planted_fault(fault: type[Format], stored: dict[str, Tensor]) -> None:
    """A fault in one field of a format changes at least a thirty-second of the golden's numbers."""
    blocks = stored[f"{fault.name}.quantised"].reshape(-1, fault.block_bytes)

    found = fault().dequantize_blocks(blocks).reshape(golden.ROWS, golden.COLUMNS)

    assert (found != stored[f"{fault.name}.dequantised"]).sum() > found.numel() // 32
