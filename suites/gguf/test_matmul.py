"""Products with a quantised matrix: one numeric contract, whatever the type and the number of tokens."""

from __future__ import annotations

import pytest

from mla_conformance.suites.harness.drawing import drawn, listed, matmul_problems
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.gguf_judge import check_product
from mla_conformance.suites.harness.judge import check_exact
from mla_conformance.suites.harness.problems import GGUFMatmulProblem
from mla_conformance.suites.harness.problems.gguf import QUANTS
from mla_conformance.suites.harness.subject import Subject

BASE = GGUFMatmulProblem(quant="Q8_0", rows=37, columns=512, tokens=2)
ALL = [BASE.replace(quant=quant, dtype="bfloat16", columns=256) for quant in QUANTS]
COUNTS = [1, 2, 3, 6, 7, 8, 9, 15, 16, 17, 33]
"""Around every number of tokens at which a shipped launcher changes its kernel."""

every_type = pytest.mark.parametrize("problem", ALL, ids=[f"quant={problem.quant}" for problem in ALL])


@pytest.mark.requirement("GGUF-MUL-01")
@every_type
def test_product_is_within_the_derived_bound(subject: Subject, problem: GGUFMatmulProblem) -> None:
    """Two tokens, 37 rows, every type."""
    check_product(subject.gguf_matmul(problem))


@pytest.mark.requirement("GGUF-MUL-01")
@drawn(matmul_problems())
def test_drawn_products_are_within_the_derived_bound(subject: Subject, problem: GGUFMatmulProblem) -> None:
    """Types, sizes, dtypes, layouts and numbers of tokens together."""
    check_product(subject.gguf_matmul(problem))


@pytest.mark.requirement("GGUF-MUL-02")
@pytest.mark.parametrize("quant", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("tokens", COUNTS)
def test_any_number_of_tokens(subject: Subject, tokens: int, quant: str) -> None:
    """Both sides of every switch between kernels."""
    check_product(subject.gguf_matmul(BASE.replace(quant=quant, tokens=tokens)))


@pytest.mark.requirement("GGUF-MUL-03")
@pytest.mark.parametrize("quant", ["Q4_K", "Q8_0", "IQ4_XS"])
@pytest.mark.parametrize("rows", [37, 6000])
def test_one_arithmetic_at_every_number_of_tokens(subject: Subject, quant: str, rows: int) -> None:
    """What is rounded to what does not change from one batch to the next."""
    problems = [BASE.replace(quant=quant, rows=rows, tokens=tokens) for tokens in COUNTS]
    subject.gguf_matmul(problems[0].replace(rows=37))
    declared = [subject.implementation.matmul_arithmetic(problem) for problem in problems]
    for before, after, first, second in zip(problems, problems[1:], declared, declared[1:], strict=False):
        if first != second:
            raise Mismatch(
                f"{quant}, {rows} rows: {before.tokens} tokens are computed with {first}, {after.tokens} with {second}"
            )


@pytest.mark.requirement("GGUF-MUL-04")
@listed(BASE, layout=["gapped"], rows=[0, 1, 16, 129], tokens=[0], columns=[256, 2816])
def test_any_layout_and_size(subject: Subject, problem: GGUFMatmulProblem) -> None:
    """Odd strides, no tokens, no rows, one row, sizes that fill no tile."""
    check_product(subject.gguf_matmul(problem))


@pytest.mark.requirement("GGUF-MUL-05")
@pytest.mark.parametrize("quant", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("tokens", [2, 9, 16])
def test_neighbours_change_no_bit(subject: Subject, tokens: int, quant: str) -> None:
    """The first token's result is the same alone and among others."""
    problem = BASE.replace(quant=quant, tokens=tokens)
    together = subject.run(subject.build(problem))
    alone = subject.build(problem.replace(tokens=1))
    alone.x.copy_(together.case.x[:1])
    for buffer in alone.buffers:
        buffer.guard()
    check_exact(subject.run(alone).out[0], together.out[0], "the first token alone")


@pytest.mark.requirement("GGUF-MUL-06")
@listed(BASE.replace(tokens=1), dtype=["bfloat16", "float16", "float32"], quant=["Q6_K", "MXFP4", "F16"])
def test_any_dtype_of_activations(subject: Subject, problem: GGUFMatmulProblem) -> None:
    """float32 activations are not multiplied in less than float32."""
    check_product(subject.gguf_matmul(problem))
