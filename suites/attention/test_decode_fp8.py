"""An fp8 (e4m3) cache with one scale for the whole tensor."""

import pytest

from mla_conformance.suites.harness.drawing import listed
from mla_conformance.suites.harness.judge import check_equal_bits, check_lse, check_output
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MLADecodeProblem(lengths=(37, 1, 70))
FP8 = BASE.replace(cache_dtype="float8_e4m3fn")


@pytest.mark.requirement("MLA-DEC-29")
@listed(FP8, k_scale=[0.07, 0.5, 1.0, 3.0], heads=[5, 20], qk_rope_head_dim=[0, 64], dtype=["bfloat16", "float32"])
def test_scale_applies_to_latent_and_rotary_alike(subject: Subject, problem: MLADecodeProblem) -> None:
    """A scale missed in the keys shows in the lse, one missed in the values in the output."""
    scale = 0.25 if problem.k_scale == 1.0 and problem != FP8 else problem.k_scale
    outcome = subject.mla_decode(problem.replace(k_scale=scale))
    check_lse(outcome)
    check_output(outcome)


@pytest.mark.requirement("MLA-DEC-30")
@listed(
    FP8.replace(values="codes", softmax_scale=1e-4),
    dtype=["float16", "bfloat16", "float32"],
    k_scale=[1.0, 0.5],
)
def test_every_finite_code_is_read_as_its_value(subject: Subject, problem: MLADecodeProblem) -> None:
    """The cache holds all 254 finite codes, over and over."""
    check_output(subject.mla_decode(problem))


@pytest.mark.requirement("MLA-DEC-31")
@listed(BASE, dtype=["float16", "bfloat16", "float32"])
def test_scale_is_ignored_for_a_cache_that_is_not_fp8(subject: Subject, problem: MLADecodeProblem) -> None:
    """VLLM passes the layer's scale whatever the cache's dtype."""
    problem = problem.replace(cache_dtype=problem.dtype)
    plain = subject.mla_decode(problem)
    scaled = subject.mla_decode(problem.replace(k_scale=0.5))
    check_equal_bits(scaled.out, plain.out, "out with k_scale 0.5")
    check_equal_bits(scaled.lse, plain.lse, "lse with k_scale 0.5")
