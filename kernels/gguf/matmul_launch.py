"""Which launch configuration the fused multiplication gets, as data: by target, by what is multiplied, by format.

As in :mod:`mla_conformance.kernels.launch` there is no autotuning: a configuration that was compiled and checked
offline is the one that runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from mla_conformance.kernels.launch import SM90, SM100, SM120, Family, family_of

MAX_FUSED_TOKENS = 16
"""Tokens of the fused kernel's tile; more go through a decoded copy of the matrix."""
NUM_WARPS = 1
"""Without exchanges between warps, a tile of rows is one warp's."""


class MatmulConfig(NamedTuple):
    """Launch configuration of the fused kernel.

    Attributes:
        block_n: Rows of the matrix a program takes, 16 or 32.
        step: Columns it takes a step, a multiple of 32.
        programs_per_sm: Programs that registers and the card let run on one multiprocessor together.
    """

    block_n: int
    step: int
    programs_per_sm: int


_HALF = MatmulConfig(block_n=32, step=64, programs_per_sm=16)
_FP32 = MatmulConfig(block_n=16, step=64, programs_per_sm=14)
# Blocks at worse addresses than their size allows take more loads and registers.
_NARROW = MatmulConfig(block_n=16, step=64, programs_per_sm=16)
# Formats that take at most 96 registers, and those that take more than 128, with any of the checked compilers.
_LIGHT = ("Q8_0", "Q8_1", "Q8_K", "Q1_0", "IQ1_S", "IQ3_XXS", "TQ1_0", "TQ2_0", "NVFP4")
_HEAVY = ("F32", "Q5_0", "IQ4_NL", "MXFP4")

# By family and by what is multiplied: "half" (bfloat16 or float16 tokens) or "fp32".
MATMUL_CONFIGS: dict[tuple[Family, str], MatmulConfig] = {
    (family, kind): config for family in (SM90, SM100, SM120) for kind, config in (("half", _HALF), ("fp32", _FP32))
}
# By family, kind and format, where a format gets another one.
FORMAT_CONFIGS: dict[tuple[Family, str, str], MatmulConfig] = {
    (family, "half", quant): _HALF._replace(programs_per_sm=programs)
    for family in (SM90, SM100, SM120)
    for quants, programs in ((_LIGHT, 20), (_HEAVY, 14))
    for quant in quants
}
# Triton 3.8 spills a register with the wide tile.
FORMAT_CONFIGS[SM100, "half", "IQ2_S"] = _NARROW
# By kind, for any target and format.
IRREGULAR_CONFIGS = {"half": _NARROW, "fp32": _FP32}

# The run of columns (see matmul_triton.py) that the compiler gives a lane. It derives it from a format's decoding, and
# not every version derives the same; a check of the compiled kernels finds exchanges between lanes where this is wrong.
DEFAULT_RUN = 4
RUNS: dict[str, int] = dict.fromkeys(
    ("Q5_1", "Q1_0", "Q4_K", "Q5_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_S", "IQ4_XS"), 2
)
VERSION_RUNS: dict[tuple[str, str], int] = {("MXFP4", "3.6"): 8, ("F16", "3.9"): 2, ("BF16", "3.9"): 2}
_TRITON_VERSION = ".".join(triton.__version__.split(".")[:2])

MERGE_BLOCK_N = 256
MERGE_NUM_WARPS = 2

# Fewer steps than this and a slice costs more than its programs save.
MIN_STEPS_PER_SPLIT = 4
# What a slice costs beside its steps, in steps [estimate].
SPLIT_COST_IN_STEPS = 2
MAX_WAVES = 4
MAX_SPLITS = 64


def matmul_config(target: GPUTarget | None, dtype: torch.dtype, quant: str, regular: bool) -> MatmulConfig:
    """Configuration of the fused kernel.

    Args:
        target: As ``launch.current_target`` returns it.
        dtype: float32, float16 or bfloat16, of the tokens.
        quant: ggml's name of the format.
        regular: Whether every block lies at a multiple of the power of two that divides its size, up to 16.
    """
    family, kind = family_of(target), "fp32" if dtype == torch.float32 else "half"
    if not regular:
        return IRREGULAR_CONFIGS[kind]
    return FORMAT_CONFIGS.get((family, kind, quant), MATMUL_CONFIGS[family, kind])


def run(quant: str, regular: bool) -> int:
    """The run of columns that this version of Triton gives a lane; the arguments are those of ``matmul_config``."""
    if not regular:
        return DEFAULT_RUN
    return VERSION_RUNS.get((quant, _TRITON_VERSION), RUNS.get(quant, DEFAULT_RUN))


def choose_num_splits(config: MatmulConfig, rows: int, columns: int, multiprocessors: int) -> int:
    """Into how many slices the columns are cut, from the matrix and the GPU alone and never from the tokens.

    The GPU runs the programs in waves of as many as fit together, and a wave lasts as long as one program: its steps
    and a fixed cost. Only the largest count that fills a number of waves can win, so those are compared.

    Args:
        config: Configuration of the fused kernel.
        rows: Rows of the matrix, 1 or more.
        columns: Columns of the matrix, 1 or more.
        multiprocessors: Multiprocessors of the GPU.
    """
    programs = triton.cdiv(rows, config.block_n)
    steps = triton.cdiv(columns, config.step)
    fitting = multiprocessors * config.programs_per_sm
    most = max(1, min(MAX_SPLITS, steps // MIN_STEPS_PER_SPLIT))

    def duration(num_splits: int) -> int:
        waves = triton.cdiv(programs * num_splits, fitting)
        return int(waves * (triton.cdiv(steps, num_splits) + SPLIT_COST_IN_STEPS))

    counts: set[int] = {max(1, min(waves * fitting // programs, most)) for waves in range(1, MAX_WAVES + 1)}
    return min(sorted(counts), key=duration)
