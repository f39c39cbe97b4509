"""Which launch configuration the products with one matrix a head get, as data: by family and by what is multiplied.

As in :mod:`mla_conformance.kernels.launch` there is no autotuning: a configuration that was compiled and checked
offline is the one that runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.backends.compiler import GPUTarget

from mla_conformance.kernels.launch import SM90, SM100, SM120, Family, family_of


class AbsorptionConfig(NamedTuple):
    """Launch configuration.

    Attributes:
        block_t: Tokens that a program takes.
        block_n: Columns of the result that it takes.
        block_k: Elements of the sum that it reads a step.
        num_warps: Warps that it runs on.
        num_stages: Software-pipeline depth of the loop over steps.
    """

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


_HALF_CONFIGS = (AbsorptionConfig(16, 64, 64, 4, 3), AbsorptionConfig(64, 128, 64, 8, 3))
_FP32_CONFIGS = (AbsorptionConfig(16, 64, 32, 4, 2), AbsorptionConfig(64, 64, 32, 8, 2))

# By family and by kind: "half" (bf16 or fp16) or "fp32". A call takes the first configuration whose tile holds all
# tokens, else the last.
ABSORPTION_CONFIGS: dict[tuple[Family, str], tuple[AbsorptionConfig, ...]] = {
    (SM120, "half"): _HALF_CONFIGS,
    (SM120, "fp32"): _FP32_CONFIGS,
    (SM100, "half"): _HALF_CONFIGS,
    (SM100, "fp32"): _FP32_CONFIGS,
    (SM90, "half"): _HALF_CONFIGS,
    (SM90, "fp32"): _FP32_CONFIGS,
}


def absorption_config(target: GPUTarget | None, dtype: torch.dtype, tokens: int) -> AbsorptionConfig:
    """Configuration for ``tokens`` rows of ``dtype``; ``target`` as ``launch.current_target`` returns it."""
    kind = "fp32" if dtype == torch.float32 else "half"
    configs = ABSORPTION_CONFIGS[family_of(target), kind]
    return next((config for config in configs if config.block_t >= tokens), configs[-1])
