"""What the prefill kernel needs of a card that is absent, for every configuration that it has."""

from __future__ import annotations

import pytest

from mla_conformance.suites.harness.compiler import Compiler
from mla_conformance.suites.harness.problems import MLAPrefillProblem
from mla_conformance.suites.target.limits import check_budget

DEEPSEEK = MLAPrefillProblem(
    query_lens=(300, 40),
    context_lens=(0, 700),
    heads=16,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    layout="kv_halves",
)
GLM = DEEPSEEK.replace(qk_nope_head_dim=192, v_head_dim=256)
PROBLEMS = {
    "128+64-128": DEEPSEEK,
    "128+64-128-context": DEEPSEEK.replace(causal=False),
    "192+64-256": GLM,
    "192+64-256-context": GLM.replace(causal=False),
    "192+64-256-float16": GLM.replace(dtype="float16"),
    "256+64-256": GLM.replace(qk_nope_head_dim=256),
    "240+48-240": GLM.replace(qk_nope_head_dim=240, qk_rope_head_dim=48, v_head_dim=240),
    "128+64-128-float32": DEEPSEEK.replace(dtype="float32"),
    "256+64-256-float32": GLM.replace(qk_nope_head_dim=256, dtype="float32"),
}


@pytest.mark.requirement("MLA-PRE-20")
@pytest.mark.parametrize("problem", [pytest.param(problem, id=name) for name, problem in PROBLEMS.items()])
def test_prefill_fits_the_target(compiler: Compiler, problem: MLAPrefillProblem) -> None:
    """It compiles, within shared memory, and spills nothing."""
    check_budget(compiler, compiler.compile(problem))
