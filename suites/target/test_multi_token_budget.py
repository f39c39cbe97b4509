"""What the decode kernels need of a card that is absent when a request has several query tokens.

Masks by row are compiled in only then, and rows decide which configuration is taken, so each is compiled here.
"""

from __future__ import annotations

import pytest

from mla_conformance.suites.harness.compiler import Compiler
from mla_conformance.suites.harness.errors import Unsupported
from mla_conformance.suites.harness.problems import MLAMultiTokenProblem
from mla_conformance.suites.target.limits import check_budget

BFLOAT16 = MLAMultiTokenProblem(
    lengths=(1100, 300),
    heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    page_size=64,
    dtype="bfloat16",
    cache_dtype="bfloat16",
    num_splits=None,
    query_tokens=4,
)
FLOAT8 = BFLOAT16.replace(cache_dtype="float8_e4m3fn", k_scale=0.5)
PROBLEMS = {
    "bf16-rows=2": BFLOAT16.replace(heads=1, query_tokens=2),
    "bf16-rows=32": BFLOAT16.replace(heads=16, query_tokens=2),
    "bf16-rows=64": BFLOAT16,
    "bf16-rows=64-page=16": BFLOAT16.replace(page_size=16),
    "bf16-rows=64-ragged": BFLOAT16.replace(causal=False, query_lens=(4, 1)),
    "bf16-rows=64-splits=1": BFLOAT16.replace(num_splits=1),
    "fp8-rows=2": FLOAT8.replace(heads=1, query_tokens=2),
    "fp8-rows=16-page=1": FLOAT8.replace(heads=4, page_size=1),
    "fp8-rows=64": FLOAT8,
    "fp8-rows=64-splits=1": FLOAT8.replace(num_splits=1),
    "fp32-rows=64": BFLOAT16.replace(dtype="float32", cache_dtype="float32"),
}


@pytest.mark.requirement("MLA-MTD-20")
@pytest.mark.parametrize("problem", [pytest.param(problem, id=name) for name, problem in PROBLEMS.items()])
def test_several_query_tokens_fit_the_target(compiler: Compiler, problem: MLAMultiTokenProblem) -> None:
    """The kernels compile, within shared memory, and spill nothing."""
    if compiler.implementation.flattens_query_tokens:
        raise Unsupported("decodes several query tokens with the kernels for one, which test_budget.py judges")
    check_budget(compiler, compiler.compile(problem))
