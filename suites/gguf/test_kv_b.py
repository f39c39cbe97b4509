"""kv_b_proj of MLA from a GGUF file: absorbed from the fused tensor, and rebuilt from the split ones."""

from __future__ import annotations

import pytest

from mla_conformance.suites.harness.drawing import listed
from mla_conformance.suites.harness.gguf_judge import check_absorbed
from mla_conformance.suites.harness.problems import GGUFKvBProblem
from mla_conformance.suites.harness.subject import Subject

FUSED = GGUFKvBProblem(form="fused", quants=("Q8_0",))
SPLIT = GGUFKvBProblem(form="split", quants=("Q8_0", "Q8_0"))
GLM_5 = {"qk_nope_head_dim": 192, "v_head_dim": 256, "kv_lora_rank": 512, "heads": 2}
DEEPSEEK = {"qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512, "heads": 2}


@pytest.mark.requirement("GGUF-KVB-01")
@listed(FUSED, quants=[("Q8_0",), ("Q4_K",), ("Q6_K",), ("F16",)], dtype=["bfloat16", "float16"], heads=[1, 5])
def test_a_fused_kv_b_is_absorbed_bit_for_bit(subject: Subject, problem: GGUFKvBProblem) -> None:
    """Per head the key rows, then the value rows; all three sizes differ, so that no transposition fits."""
    check_absorbed(subject.gguf_kv_b(problem))


@pytest.mark.requirement("GGUF-KVB-02")
@listed(
    SPLIT,
    quants=[("Q8_0", "Q8_0"), ("Q5_1", "Q4_K"), ("F16", "Q6_K"), ("BF16", "BF16")],
    dtype=["bfloat16", "float16"],
    heads=[1, 5],
)
def test_split_k_b_and_v_b_give_the_same_as_kv_b(subject: Subject, problem: GGUFKvBProblem) -> None:
    """k_b is stored transposed, its blocks along the key part."""
    check_absorbed(subject.gguf_kv_b(problem))


@pytest.mark.requirement("GGUF-KVB-01", "GGUF-KVB-02")
@pytest.mark.parametrize("sizes", [GLM_5, DEEPSEEK], ids=["GLM-5", "DeepSeek-V3"])
@pytest.mark.parametrize("base", [FUSED, SPLIT], ids=["fused", "split"])
def test_sizes_of_real_models(subject: Subject, base: GGUFKvBProblem, sizes: dict[str, int]) -> None:
    """GLM-5's nope of 192 is no multiple of 256: its k_b cannot be a K-quant."""
    check_absorbed(subject.gguf_kv_b(base.replace(**sizes)))
