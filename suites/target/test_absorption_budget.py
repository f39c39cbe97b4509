"""What the product with one matrix a head needs of a card that is absent, configuration by configuration."""

from __future__ import annotations

import itertools

import pytest

from mla_conformance.suites.harness.compiler import Compiler
from mla_conformance.suites.harness.problems import AbsorbQueryProblem, VUpProjProblem
from mla_conformance.suites.target.limits import check_budget

TOKENS = (1, 65)
"""One for each tile of tokens."""
DTYPES = ("bfloat16", "float32")
ABSORB = [
    AbsorbQueryProblem(tokens=tokens, dtype=dtype, head_dim=128, kv_lora_rank=512)
    for tokens, dtype in itertools.product(TOKENS, DTYPES)
]
V_UP = [
    VUpProjProblem(tokens=tokens, dtype=dtype, head_dim=head_dim, kv_lora_rank=512, weight_layout=weight)
    for (tokens, dtype), (head_dim, weight) in zip(
        itertools.product(TOKENS, DTYPES), itertools.cycle([(128, "kv_b_rows"), (256, "dense")]), strict=False
    )
]


def _name(problem: AbsorbQueryProblem | VUpProjProblem) -> str:
    return f"tokens={problem.tokens}-dtype={problem.dtype}"


@pytest.mark.requirement("MLA-ABS-20")
@pytest.mark.parametrize("problem", ABSORB, ids=map(_name, ABSORB))
def test_absorbing_fits_the_target(compiler: Compiler, problem: AbsorbQueryProblem) -> None:
    """It compiles, within shared memory, and spills nothing."""
    check_budget(compiler, compiler.compile(problem))


@pytest.mark.requirement("MLA-ABS-21")
@pytest.mark.parametrize("problem", V_UP, ids=map(_name, V_UP))
def test_value_projection_fits_the_target(compiler: Compiler, problem: VUpProjProblem) -> None:
    """It compiles, within shared memory, and spills nothing."""
    check_budget(compiler, compiler.compile(problem))
