"""What the merging kernels need of a card that is absent."""

from __future__ import annotations

import pytest

from mla_conformance.suites.harness.compiler import Compiler
from mla_conformance.suites.harness.problems import MergeShardsProblem, MergeStatesProblem
from mla_conformance.suites.target.limits import check_budget

STATES = MergeStatesProblem(tokens=40, heads=16, width=512)
STATES_PROBLEMS = {
    "512-bfloat16": STATES,
    "512-float32": STATES.replace(dtype="float32"),
    "1024-float32": STATES.replace(dtype="float32", width=1024),
    "128-bfloat16-gapped": STATES.replace(width=128, layout="gapped"),
    "33-float16": STATES.replace(dtype="float16", width=33),
}
SHARDS = MergeShardsProblem(tokens=40, heads=16, width=512, shards=8)
SHARDS_PROBLEMS = {
    "8-512-bfloat16": SHARDS,
    "8-512-float32": SHARDS.replace(dtype="float32"),
    "16-1024-float32": SHARDS.replace(dtype="float32", shards=16, width=1024),
    "16-1-float32": SHARDS.replace(dtype="float32", shards=16, width=1),
    "3-128-bfloat16-gapped": SHARDS.replace(shards=3, width=128, layout="gapped"),
}


@pytest.mark.requirement("MLA-MRG-20")
@pytest.mark.parametrize("problem", [pytest.param(problem, id=name) for name, problem in STATES_PROBLEMS.items()])
def test_merging_states_fits_the_target(compiler: Compiler, problem: MergeStatesProblem) -> None:
    """It compiles, within shared memory, and spills nothing."""
    check_budget(compiler, compiler.compile(problem))


@pytest.mark.requirement("MLA-CPM-20")
@pytest.mark.parametrize("problem", [pytest.param(problem, id=name) for name, problem in SHARDS_PROBLEMS.items()])
def test_merging_shards_fits_the_target(compiler: Compiler, problem: MergeShardsProblem) -> None:
    """It compiles, within shared memory, and spills nothing."""
    check_budget(compiler, compiler.compile(problem))
