"""Random GGUF weights with gguf-py's values of them, and the verdict on a product with one."""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np
import torch
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize
from torch import Tensor

from mla_conformance.reference.fused_linear import linear
from mla_conformance.reference.matmul_tolerance import MatmulArithmetic, matmul_bound

# Byte offsets of the float16 factors of the types that gguf-py cannot quantise to.
HALF_FACTORS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
PLAIN = ("F32", "F16", "BF16")
BLOCK_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL")
BLOCK_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


def weight(quant: str, shape: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """A random weight [..., columns] as GGUF bytes uint8 [..., row_bytes], and gguf-py's float32 values of them."""
    rng, kind = np.random.default_rng(seed), getattr(gguf.GGMLQuantizationType, quant)
    if quant in HALF_FACTORS:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
        for offset in HALF_FACTORS[quant]:
            factors = rng.uniform(2.0**-9, 2.0**-7, data.shape[:-1]).astype(np.float16)
            data[..., offset : offset + 2] = factors[..., None].view(np.uint8)
        data = data.reshape(*shape[:-1], -1)
    else:
        data = gguf_quantize(rng.standard_normal(shape, dtype=np.float32), kind).view(np.uint8)
    return torch.from_numpy(data), torch.from_numpy(gguf_dequantize(data, kind).astype(np.float32).reshape(shape))


def judge_product(out: Tensor, x: Tensor, values: Tensor) -> None:
    """Hold x [tokens, columns] times the decoded weight [rows, columns] to the one numeric contract."""
    name = str(x.dtype).removeprefix("torch.")
    bound = matmul_bound(x.double(), values.double(), MatmulArithmetic(name, name, name)).out
    assert out.dtype == x.dtype
    assert out.shape == bound.shape
    assert bool(((out.double() - linear(x, values)).abs() <= bound).all())
