"""What the kernels that a launcher picks need of a card that is absent.

The problems have the true sizes of DeepSeek and GLM (512 + 64) and cover what a launcher can branch on: the
head count, the page size, both dtypes, no rotary part, a smaller latent, a single split. Lengths matter only
through the number of splits and the width of the block table.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mla_conformance.suites.harness.compiler import Compiler
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.target.limits import over_shared_memory, spilling

BFLOAT16 = MLADecodeProblem(
    lengths=(1100, 300),
    heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    page_size=64,
    dtype="bfloat16",
    cache_dtype="bfloat16",
    num_splits=None,
)
FLOAT16 = BFLOAT16.replace(dtype="float16", cache_dtype="float16")
FLOAT32 = BFLOAT16.replace(dtype="float32", cache_dtype="float32")
FLOAT8 = BFLOAT16.replace(cache_dtype="float8_e4m3fn", k_scale=0.5)

PROBLEMS = {
    "bf16-heads=1-page=64": BFLOAT16.replace(heads=1),
    "bf16-heads=8-page=16": BFLOAT16.replace(heads=8, page_size=16),
    "bf16-heads=16-page=64": BFLOAT16,
    "bf16-heads=20-page=1": BFLOAT16.replace(heads=20, page_size=1),
    "bf16-heads=128-page=64": BFLOAT16.replace(heads=128),
    "bf16-heads=16-page=64-latent=256": BFLOAT16.replace(kv_lora_rank=256),
    "fp16-heads=64-page=64-splits=1": FLOAT16.replace(heads=64, num_splits=1),
    "fp8-heads=1-page=64": FLOAT8.replace(heads=1),
    "fp8-heads=16-page=64": FLOAT8,
    "fp8-heads=16-page=64-rope=0": FLOAT8.replace(qk_rope_head_dim=0),
    "fp8-heads=20-page=1": FLOAT8.replace(heads=20, page_size=1),
    "fp8-heads=128-page=16": FLOAT8.replace(heads=128, page_size=16),
    "fp32-heads=16-page=64": FLOAT32,
    "fp32-heads=16-page=64-latent=320": FLOAT32.replace(kv_lora_rank=320, qk_rope_head_dim=16),
}

FIXED_SPLITS = BFLOAT16.replace(num_splits=4)
OTHER_SIZES = {
    "lengths": FIXED_SPLITS.replace(lengths=(37, 1099)),
    "batch=1": FIXED_SPLITS.replace(lengths=(1100,)),
    "batch=16": FIXED_SPLITS.replace(lengths=(1100, *[64] * 15)),
    "table=12": FIXED_SPLITS.replace(lengths=(10 * 64, 300)),
    "table=17": FIXED_SPLITS.replace(lengths=(15 * 64, 300)),
}


def among(problems: dict[str, MLADecodeProblem]) -> pytest.MarkDecorator:
    """Run a test on each of ``problems``, under its name."""
    cases = [pytest.param(problem, id=name) for name, problem in problems.items()]
    return pytest.mark.parametrize("problem", cases)


def products_of_narrow_types(problem: MLADecodeProblem) -> bool:
    """Whether several heads share each key, in a type that the tensor cores of every target multiply."""
    return problem.heads > 1 and problem.dtype != "float32"


def only(wanted: Callable[[MLADecodeProblem], bool]) -> dict[str, MLADecodeProblem]:
    """The problems that are ``wanted``."""
    return {name: problem for name, problem in PROBLEMS.items() if wanted(problem)}


@pytest.mark.requirement("TGT-BUD-01")
@among(PROBLEMS)
def test_every_kernel_compiles(compiler: Compiler, problem: MLADecodeProblem) -> None:
    """Every kernel that the launcher picks compiles, and it picks at least one."""
    compiler.compile(problem)


@pytest.mark.requirement("TGT-BUD-02")
@among(PROBLEMS)
def test_shared_memory_fits(compiler: Compiler, problem: MLADecodeProblem) -> None:
    """No block needs more shared memory than the target lets it have."""
    over = over_shared_memory(compiler, compiler.compile(problem))
    if over:
        raise Mismatch("; ".join(over))


@pytest.mark.requirement("TGT-BUD-03")
@among(PROBLEMS)
def test_nothing_is_spilled(compiler: Compiler, problem: MLADecodeProblem) -> None:
    """No register is spilled, and no stack is used."""
    found = spilling(compiler, compiler.compile(problem))
    if found:
        raise Mismatch("; ".join(found))


@pytest.mark.requirement("TGT-INS-01")
@among(only(products_of_narrow_types))
def test_products_run_on_tensor_cores(compiler: Compiler, problem: MLADecodeProblem) -> None:
    """A problem with 16-bit or fp8 matrix products has tensor-core instructions for both of them."""
    kernels = compiler.compile(problem)
    count = sum(sum(kernel.tensor_core_instructions.values()) for kernel in kernels)
    if count < 2:
        raise Mismatch(
            f"{compiler.target.name}: {count} tensor-core instructions, expected at least 2, one a product: "
            + "; ".join(map(str, kernels))
        )


@pytest.mark.requirement("TGT-INS-02")
@among(PROBLEMS)
def test_no_foreign_instruction(compiler: Compiler, problem: MLADecodeProblem) -> None:
    """No matrix instruction of a family that the target lacks is used."""
    foreign = [
        f"{kernel} has {kernel.tensor_core_instructions[family]} {family} instructions; "
        f"{compiler.target.name} knows none"
        for kernel in compiler.compile(problem)
        for family in compiler.target.foreign_instructions
        if kernel.tensor_core_instructions[family]
    ]
    if foreign:
        raise Mismatch("; ".join(foreign))


@pytest.mark.requirement("TGT-VAR-01")
@among(OTHER_SIZES)
def test_sizes_of_a_batch_create_no_kernel(compiler: Compiler, problem: MLADecodeProblem) -> None:
    """Run-time sizes are run-time values: other lengths, batches and table widths reuse what is compiled.

    Triton specialises a stride that is a multiple of 16, so no width here is one: an engine keeps its width.
    """
    known = {kernel.hash for kernel in compiler.compile(problem.replace(lengths=FIXED_SPLITS.lengths))}
    new = [str(kernel) for kernel in compiler.compile(problem) if kernel.hash not in known]
    if new:
        raise Mismatch(
            f"{compiler.target.name}: lengths={problem.lengths} need {len(new)} kernels, limit 0, that "
            f"lengths={FIXED_SPLITS.lengths} do not: {'; '.join(new)}"
        )
