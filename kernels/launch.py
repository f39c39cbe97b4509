"""Which launch configuration a kernel gets on which target, as data.

There is no autotuning: a configuration that was compiled and checked offline is the one that runs, on a card that the
checking machine does not have. Every row must compile without spilled registers, inside the shared memory of its
family, for every shape that ``mla_decode`` accepts; 1 KiB too much is a kernel that cannot be launched
(vllm-project/vllm#53748).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget


class Family(NamedTuple):
    """A group of targets that share one set of configurations.

    Attributes:
        name: The target the rows are tuned for.
        shared_bytes: Shared memory that one program may ask for, in bytes.
    """

    name: str
    shared_bytes: int


class DecodeConfig(NamedTuple):
    """Launch configuration of the split kernel.

    Attributes:
        block_q: Query rows, a query token and a head each, that a program takes (rows of both matrix products).
        block_n: Tokens a program reads per step.
        num_warps: Warps a program runs on.
        num_stages: Software-pipeline depth of the token loop.
        prefetch: Whether the loop itself carries the next tile in registers, where the compiler's pipeline cannot.
        programs_per_sm: Programs that fit on one multiprocessor together; sets how many splits are worthwhile.
        regular_only: Whether it is meant only for tiles that lie in one page of regular rows (see ``decode_config``).
            Other addresses and masks take registers that this configuration does not have.
    """

    block_q: int
    block_n: int
    num_warps: int
    num_stages: int
    prefetch: bool
    programs_per_sm: int
    regular_only: bool = False


class MergeConfig(NamedTuple):
    """Launch configuration of the merge kernel: splits and output columns a program takes at a time, and its warps."""

    block_s: int
    block_d: int
    num_warps: int


SM120 = Family("sm_120", 101_376)
SM100 = Family("sm_100", 232_448)
SM90 = Family("sm_90", 232_448)

# Family of a CUDA capability, by its major number. Any other target, and the interpreter, gets DEFAULT_FAMILY, which
# has the smallest budget.
FAMILIES = {9: SM90, 10: SM100, 12: SM120}
DEFAULT_FAMILY = SM120

# Multiprocessors of a target that is not at hand, by capability: the largest card of each.
SM_COUNTS = {90: 132, 100: 148, 120: 188, 121: 48}
DEFAULT_SM_COUNT = 188

_TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

_FP8_CONFIGS = (
    DecodeConfig(16, 64, 8, 1, True, 1, regular_only=True),
    DecodeConfig(16, 16, 4, 1, True, 2),
    DecodeConfig(32, 32, 8, 1, True, 1),
)
_FP32_CONFIGS = (DecodeConfig(16, 16, 8, 1, False, 1),)
_SM100_HALF_CONFIGS = (
    DecodeConfig(16, 32, 4, 3, False, 2),
    DecodeConfig(32, 32, 8, 3, False, 1),
)
# 64 heads reach Hopper's wgmma, twice as fast here as two tiles of 32, but Triton 3.9 spills registers with it.
_WGMMA_CONFIGS = () if _TRITON_VERSION >= (3, 9) else (DecodeConfig(64, 32, 8, 3, False, 1, regular_only=True),)
_SM90_HALF_CONFIGS = _SM100_HALF_CONFIGS + _WGMMA_CONFIGS
_SM120_HALF_CONFIGS = (
    DecodeConfig(16, 32, 4, 3, False, 1),
    DecodeConfig(32, 32, 8, 2, False, 1),
)

# By family and by what is multiplied: "half" (bf16 or fp16, cache likewise), "fp8" (e4m3 cache, half-precision query),
# "fp32" (float32 query, any cache). Of the configurations that the cache allows, a call takes the first whose tile
# holds all query rows of a request, else the last.
DECODE_CONFIGS: dict[tuple[Family, str], tuple[DecodeConfig, ...]] = {
    (SM120, "half"): _SM120_HALF_CONFIGS,
    (SM120, "fp8"): _FP8_CONFIGS,
    (SM120, "fp32"): _FP32_CONFIGS,
    (SM100, "half"): _SM100_HALF_CONFIGS,
    (SM100, "fp8"): _FP8_CONFIGS,
    (SM100, "fp32"): _FP32_CONFIGS,
    (SM90, "half"): _SM90_HALF_CONFIGS,
    (SM90, "fp8"): _FP8_CONFIGS,
    (SM90, "fp32"): _FP32_CONFIGS,
}
# Registers a thread of the split kernel may take, the most there are. Left to itself the assembler spills a few to let
# one more program fit, although shared memory or the number of programs decides that here.
MAX_REGISTERS = 255
MERGE_CONFIG = MergeConfig(block_s=16, block_d=128, num_warps=4)

# CUDA's limit for the second and third axis of a grid.
MAX_GRID_YZ = 65_535

# Fewer tokens a split than this and the merge costs more than the extra programs save.
MIN_TOKENS_PER_SPLIT = 128
# What a split costs beside its tokens (its start, its partial result and the merge of that), measured on an H200 as the
# time of this many tokens, rounded up.
SPLIT_COST_IN_TOKENS = 64
MAX_WAVES = 8


def current_target() -> GPUTarget | None:
    """The target that Triton compiles for now, or None in Triton's interpreter, which has none.

    Triton is asked on each call, so a driver that stands in for an absent GPU is honoured, and so is the
    TRITON_OVERRIDE_ARCH with which Triton lowers for another CUDA target than the GPU at hand.

    Raises:
        RuntimeError: There is neither a GPU, nor a stand-in driver, nor the interpreter.
    """
    if triton.knobs.runtime.interpret:
        return None
    target: GPUTarget = triton.runtime.driver.active.get_current_target()
    overridden = re.fullmatch(r"sm(\d+)", triton.knobs.runtime.override_arch or "")
    if overridden and target.backend == "cuda":
        return GPUTarget(target.backend, int(overridden[1]), target.warp_size)
    return target


def _capability(target: GPUTarget | None) -> int | None:
    return target.arch if target is not None and isinstance(target.arch, int) else None


def family_of(target: GPUTarget | None) -> Family:
    """The family whose configurations a target takes; ``DEFAULT_FAMILY`` for an unlisted target or None."""
    capability = _capability(target)
    return DEFAULT_FAMILY if capability is None else FAMILIES.get(capability // 10, DEFAULT_FAMILY)


def supports_fp8_cache(target: GPUTarget | None) -> bool:
    """Whether Triton can read e4m3 on this target: the interpreter can, CUDA can from capability 8.9."""
    capability = _capability(target)
    return target is None or (capability is not None and capability >= 89)


def decode_kind(q_dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """Key of the second column of ``DECODE_CONFIGS`` for a query dtype and a cache dtype."""
    if q_dtype == torch.float32:
        return "fp32"
    return "fp8" if cache_dtype == torch.float8_e4m3fn else "half"


def decode_config(
    target: GPUTarget | None,
    q_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    query_rows: int,
    page_size: int,
    rows_regular: bool,
) -> DecodeConfig:
    """Configuration of the split kernel.

    Args:
        target: As ``current_target`` returns it.
        q_dtype: float32, float16 or bfloat16.
        cache_dtype: ``q_dtype`` or float8_e4m3fn.
        query_rows: Query tokens of a request times heads, 1 or more.
        page_size: Tokens a page.
        rows_regular: Whether every cache row starts on a multiple of 16 bytes, its latent part is 256 or 512 wide and
            its rotary part a power of two or 0.
    """
    allowed = [
        config
        for config in DECODE_CONFIGS[family_of(target), decode_kind(q_dtype, cache_dtype)]
        if not config.regular_only or (rows_regular and page_size % config.block_n == 0)
    ]
    return next((config for config in allowed if config.block_q >= query_rows), allowed[-1])


def sm_count(target: GPUTarget | None, device: torch.device) -> int:
    """Multiprocessors of the device, or of the target's card when the device is no GPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    capability = _capability(target)
    return DEFAULT_SM_COUNT if capability is None else SM_COUNTS.get(capability, DEFAULT_SM_COUNT)


def choose_num_splits(config: DecodeConfig, batch: int, query_tiles: int, max_tokens: int, multiprocessors: int) -> int:
    """How many splits finish first, from shapes alone: lengths live on the device and are not waited for.

    The GPU runs the programs in waves of as many as fit together, and a wave lasts as long as one program: the tokens
    of a split and a fixed cost. Only the largest count that fills a number of waves can win, so those are compared.

    Args:
        config: Configuration of the split kernel.
        batch: Requests of the call, 1 or more.
        query_tiles: Tiles of query rows that a request has.
        max_tokens: Tokens that the block table can name per request.
        multiprocessors: Multiprocessors of the GPU.

    Returns:
        A count of at least 1.
    """
    programs = batch * query_tiles
    fitting = multiprocessors * config.programs_per_sm
    most = max(1, max_tokens // MIN_TOKENS_PER_SPLIT)

    def duration(num_splits: int) -> float:
        waves = -(-programs * num_splits // fitting)
        return waves * (max_tokens / num_splits + SPLIT_COST_IN_TOKENS)

    counts = {max(1, min(waves * fitting // programs, most)) for waves in range(1, MAX_WAVES + 1)}
    return min(sorted(counts), key=duration)
