"""The GGUF plugin's Triton kernels as compiled for sm_120: dequantisation to the bit, products within rounding.

The oracle is gguf-py's NumPy code, which shares nothing with the plugin.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import triton
from gguf import GGMLQuantizationType as Type

from mla_conformance.suites.corpus.launches_models import plugin, quantised
from mla_conformance.suites.emulator import Emulation, Kind, emulate

TYPES = (
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
    *(
        Type.IQ1_S,
        Type.IQ1_M,
        Type.IQ2_XXS,
        Type.IQ2_XS,
        Type.IQ2_S,
        Type.IQ3_XXS,
        Type.IQ3_S,
        Type.IQ4_NL,
        Type.IQ4_XS,
    ),
)
UNEQUAL_COPIES = frozenset(
    (Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S),
)
"""Products whose kernels store unequal copies of one sum (docs/findings.md)."""
MATMUL_TYPES = (Type.Q4_0, Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.IQ4_XS, Type.IQ2_XXS, Type.IQ3_S)
COLUMNS = 256


def weights(type_: Type, rows: int) -> tuple[torch.Tensor, np.ndarray]:
    """Random blocks with finite factors, as bytes and as gguf-py dequantises them."""
    raw = quantised(type_.name.lower(), rows, COLUMNS, torch.device("cpu"))
    values = gguf.quants.dequantize(raw.numpy(), type_)
    assert np.isfinite(values).all()
    assert values.any()
    return raw, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("type_", TYPES, ids=lambda type_: type_.name)
def test_dequantisation_gives_the_bits_of_gguf_py(type_: Type, dtype: torch.dtype) -> None:
    """To float32 exactly, to the others rounded once."""
    raw, values = weights(type_, rows=4)
    dequantise = plugin("dequantize").ggml_dequantize_triton
    with emulate("sm_120") as run:
        found = dequantise(raw, int(type_), *values.shape, dtype)
    assert not run.findings, run.report()
    assert torch.equal(found, torch.from_numpy(values).to(dtype))


def product(type_: Type, dtype: torch.dtype) -> tuple[Emulation, float]:
    """The plugin's product with five rows, and its relative error against float64."""
    raw, values = weights(type_, rows=16)
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((5, COLUMNS))).to(dtype)
    multiply = plugin("gemm").ggml_mul_mat_a8_triton
    with emulate("sm_120") as run:
        found = multiply(raw, x, int(type_), len(values))
    expected = x.double() @ torch.from_numpy(values).double().T
    return run, float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("type_", MATMUL_TYPES, ids=lambda type_: type_.name)
def test_products_are_right_and_only_the_known_kernels_race(type_: Type) -> None:
    """Weights and sums are rounded to float16, so the error is that of a few thousand roundings of 2**-11."""
    run, error = product(type_, torch.float16)
    assert error < 2e-3
    kinds = {finding.kind for finding in run.findings}
    assert kinds == ({Kind.UNEQUAL_LANES} if type_ in UNEQUAL_COPIES else set()), run.report()


def test_unequal_copies_vanish_without_contraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane fuses its own product into the sum, but not the one that it gets from its neighbour."""
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", False)
    run, error = product(Type.IQ2_XXS, torch.float16)
    assert error < 2e-3
    assert not run.findings, run.report()
