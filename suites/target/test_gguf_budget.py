"""What the GGUF kernels that a launcher picks need of a card that is absent, type by type."""

from __future__ import annotations

import pytest

from mla_conformance.suites.harness.compiler import Compiler
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.problems import GGUFDequantizeProblem, GGUFMatmulProblem
from mla_conformance.suites.harness.problems.gguf import QUANTS
from mla_conformance.suites.target.limits import check_budget

DEQUANTIZE = [GGUFDequantizeProblem(quant=quant, rows=8, columns=8192, dtype="bfloat16") for quant in QUANTS]
MATMUL = [GGUFMatmulProblem(quant=quant, rows=4096, columns=4096, dtype="bfloat16") for quant in QUANTS]

LOADS_AN_ELEMENT = {
    "F32": 0.25, "F16": 0.125, "BF16": 0.125, "Q4_0": 0.625, "Q4_1": 0.375, "Q5_0": 0.75, "Q5_1": 0.375, "Q8_0": 0.625,
    "Q8_1": 0.375, "Q1_0": 0.25, "Q2_K": 0.5, "Q3_K": 1.375, "Q4_K": 0.25, "Q5_K": 0.375, "Q6_K": 1.25, "Q8_K": 0.375,
    "IQ1_S": 0.5, "IQ1_M": 0.5, "IQ2_XXS": 0.625, "IQ2_XS": 0.5, "IQ2_S": 0.75, "IQ3_XXS": 0.75, "IQ3_S": 0.875,
    "IQ4_NL": 1.625, "IQ4_XS": 1.375, "TQ1_0": 0.625, "TQ2_0": 0.625, "MXFP4": 1.125, "NVFP4": 0.375,
}  # fmt: skip
"""Load instructions a dequantised element: every field of a group of eight elements once, in the widest words that the
type's alignment allows (16 bytes for Q4_K, one for MXFP4), and a word of each table entry; IQ4 looks every element up.

A multiprocessor issues one warp-wide load or store a clock: 132 of them at 1.83 GHz make 7.7e12 lane loads a second,
where memory of 4.3 TB/s can take 1.7e12 elements of Q4_0. Beyond four loads an element the loads decide; shipped
kernels take two to twelve, a byte each.
"""


def _by_type(problems: list[GGUFDequantizeProblem] | list[GGUFMatmulProblem]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("problem", problems, ids=[f"quant={problem.quant}" for problem in problems])


@pytest.mark.requirement("GGUF-TGT-01")
@_by_type(DEQUANTIZE)
def test_dequantisation_fits_the_target(compiler: Compiler, problem: GGUFDequantizeProblem) -> None:
    """It compiles, within shared memory, and spills nothing."""
    check_budget(compiler, compiler.compile(problem))


@pytest.mark.requirement("GGUF-TGT-02")
@_by_type(DEQUANTIZE)
def test_dequantisation_loads_words(compiler: Compiler, problem: GGUFDequantizeProblem) -> None:
    """Load instructions of all threads of the launch, over the elements that they write."""
    loads = sum(kernel.global_loads * kernel.threads for kernel in compiler.compile(problem))
    share = loads / (problem.rows * problem.columns)
    limit = LOADS_AN_ELEMENT[problem.quant]
    if share > limit:
        raise Mismatch(f"{problem.quant} takes {share:.2f} load instructions an element, more than {limit}")


@pytest.mark.requirement("GGUF-TGT-03")
@_by_type(MATMUL)
def test_products_fit_the_target(compiler: Compiler, problem: GGUFMatmulProblem) -> None:
    """They compile, within shared memory, and spill nothing."""
    check_budget(compiler, compiler.compile(problem))
