"""What the cache-writing and the cache-gathering kernel need of a card that is absent, format by format."""

from __future__ import annotations

import pytest

from mla_conformance.suites.harness.compiler import Compiler
from mla_conformance.suites.harness.problems import KVCacheGatherProblem, KVCacheWriteProblem
from mla_conformance.suites.harness.problems.cache import CACHE_FORMATS, DS_MLA
from mla_conformance.suites.target.limits import check_budget

PROBLEMS = [KVCacheWriteProblem(cache_format=name, page_size=64, **DS_MLA) for name in CACHE_FORMATS]
GATHERS = [KVCacheGatherProblem(cache_format=name, page_size=64, **DS_MLA) for name in CACHE_FORMATS]


@pytest.mark.requirement("MLA-KVW-20")
@pytest.mark.parametrize("problem", PROBLEMS, ids=[f"cache_format={problem.cache_format}" for problem in PROBLEMS])
def test_cache_writing_fits_the_target(compiler: Compiler, problem: KVCacheWriteProblem) -> None:
    """It compiles, within shared memory, and spills nothing."""
    check_budget(compiler, compiler.compile(problem))


@pytest.mark.requirement("MLA-KVG-20")
@pytest.mark.parametrize("problem", GATHERS, ids=[f"cache_format={problem.cache_format}" for problem in GATHERS])
def test_cache_gathering_fits_the_target(compiler: Compiler, problem: KVCacheGatherProblem) -> None:
    """It compiles, within shared memory, and spills nothing."""
    check_budget(compiler, compiler.compile(problem))
