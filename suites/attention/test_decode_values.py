"""MLA decode gives the right numbers."""

import pytest

from mla_conformance.suites.harness.drawing import decode_problems, drawn, listed
from mla_conformance.suites.harness.judge import check_equal_bits, check_lse, check_output
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MLADecodeProblem(lengths=(37, 1, 50))
BFLOAT16 = BASE.replace(dtype="bfloat16", cache_dtype="bfloat16")
FP8 = BASE.replace(cache_dtype="float8_e4m3fn", k_scale=0.5)
EVERY_HEAD_COUNT = (1, 5, 8, 12, 16, 20, 40, 64, 128)

SIZES_512_64 = MLADecodeProblem(lengths=(45, 3), heads=8, kv_lora_rank=512, qk_rope_head_dim=64, page_size=64)
GLM_5_SCALE = 1 / 16
DEEPSEEK_V3_SCALE = 0.1352337788608801
"""192**-0.5 * (0.1 ln 40 + 1)**2: YaRN with factor 40 and mscale_all_dim 1."""
MODELS = {
    "glm-5-tp8": SIZES_512_64.replace(softmax_scale=GLM_5_SCALE),
    "glm-5-tp1": SIZES_512_64.replace(softmax_scale=GLM_5_SCALE, heads=64, lengths=(20,)),
    "deepseek-v3-tp8": SIZES_512_64.replace(softmax_scale=DEEPSEEK_V3_SCALE, heads=16),
    "deepseek-v3-tp1": SIZES_512_64.replace(softmax_scale=DEEPSEEK_V3_SCALE, heads=128, lengths=(20,)),
    "glm-4.7-flash": SIZES_512_64.replace(softmax_scale=GLM_5_SCALE, heads=20),
    "glm-5.3-flash-nope": SIZES_512_64.replace(softmax_scale=GLM_5_SCALE, qk_rope_head_dim=0),
}
LONG = {"8k": (8192, 5000), "64k": (65536, 300)}


@pytest.mark.requirement("MLA-DEC-01")
@drawn(decode_problems())
def test_output_is_within_the_derived_bound(subject: Subject, problem: MLADecodeProblem) -> None:
    """Drawn problems give the oracle's output."""
    check_output(subject.mla_decode(problem))


@pytest.mark.requirement("MLA-DEC-03")
@listed(BASE, heads=EVERY_HEAD_COUNT)
def test_any_number_of_heads(subject: Subject, problem: MLADecodeProblem) -> None:
    """Head counts below, at and above every tile size, prime and not."""
    check_output(subject.mla_decode(problem))


@pytest.mark.requirement("MLA-DEC-03")
@pytest.mark.parametrize("base", [BFLOAT16, FP8], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("heads", [2, 8, 20])
def test_any_number_of_heads_in_other_dtypes(subject: Subject, base: MLADecodeProblem, heads: int) -> None:
    """Below, at half and above a tile of 16."""
    check_output(subject.mla_decode(base.replace(heads=heads)))


@pytest.mark.requirement("MLA-DEC-33")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "fp8"])
def test_one_head_is_as_accurate_as_many(subject: Subject, dtype: str) -> None:
    """A single head may take another kernel; the request of one token shows the error of its score in the lse."""
    outcome = subject.mla_decode(_in_dtype(BASE.replace(heads=1), dtype))
    check_lse(outcome)
    check_output(outcome)


@pytest.mark.requirement("MLA-DEC-04")
@listed(
    BASE.replace(num_splits=4),
    lengths=[(1, 2, 3), (15, 16, 17), (31, 32, 33), (63, 64, 65), (127, 128, 129)],
)
def test_lengths_around_page_and_split_edges(subject: Subject, problem: MLADecodeProblem) -> None:
    """Pages of 16 and four splits put an edge at each of these lengths."""
    check_output(subject.mla_decode(problem))


@pytest.mark.requirement("MLA-DEC-06")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp8"])
@pytest.mark.parametrize("model", MODELS)
def test_sizes_of_real_models(subject: Subject, model: str, dtype: str) -> None:
    """The latent and rotary widths, head counts and softmax scales that people run."""
    check_output(subject.mla_decode(_in_dtype(MODELS[model], dtype)))


@pytest.mark.requirement("MLA-DEC-06")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp8"])
@pytest.mark.parametrize("model", ["glm-5-tp8", "deepseek-v3-tp1"])
@pytest.mark.parametrize("context", LONG)
def test_long_contexts_of_real_models(subject: Subject, model: str, context: str, dtype: str) -> None:
    """Contexts of 8192 and 65536 tokens, ragged, with the launcher's own number of splits."""
    problem = _in_dtype(MODELS[model], dtype).replace(lengths=LONG[context], num_splits=None)
    check_output(subject.mla_decode(problem))


@pytest.mark.requirement("MLA-DEC-08")
@pytest.mark.parametrize("qk_rope_head_dim", [0, 16, 32, 64])
@pytest.mark.parametrize("kv_lora_rank", [64, 128, 192, 256, 320, 512])
def test_any_latent_and_rotary_width(subject: Subject, kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    """Widths that are no power of two included."""
    sizes = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    check_output(subject.mla_decode(MLADecodeProblem(lengths=(21,), **sizes)))


@pytest.mark.requirement("MLA-DEC-09")
@listed(BASE, softmax_scale=[1e-4, 0.02, 1.0, 3.0])
def test_softmax_scale_is_applied_as_given(subject: Subject, problem: MLADecodeProblem) -> None:
    """From nearly uniform weights to nearly one-hot ones."""
    check_output(subject.mla_decode(problem))


@pytest.mark.requirement("MLA-DEC-10")
@listed(BASE, softmax_scale=[100.0, 2000.0], num_splits=[1, 8])
def test_large_scores_do_not_overflow(subject: Subject, problem: MLADecodeProblem) -> None:
    """Scores of up to some 60,000 in magnitude."""
    scale = problem.softmax_scale or 500.0
    check_output(subject.mla_decode(problem.replace(softmax_scale=scale)))


@pytest.mark.requirement("MLA-DEC-11")
@listed(
    BASE.replace(values="one_hot", softmax_scale=1.0),
    dtype=["float16", "bfloat16", "float32"],
    num_splits=[1, 8],
    heads=[1, 20],
)
def test_one_dominant_key_gives_its_latent_exactly(subject: Subject, problem: MLADecodeProblem) -> None:
    """The last key's score is far above every other, so nothing else may contribute."""
    outcome = subject.mla_decode(problem.replace(cache_dtype=problem.dtype))
    for row, keys in enumerate(outcome.case.rows):
        latent = keys[-1, : problem.kv_lora_rank].expand_as(outcome.out[row])
        check_equal_bits(outcome.out[row], latent, f"out of request {row}")


def _in_dtype(problem: MLADecodeProblem, dtype: str) -> MLADecodeProblem:
    """``fp8`` means a bfloat16 query over an e4m3 cache, as engines run it."""
    if dtype == "fp8":
        return problem.replace(dtype="bfloat16", cache_dtype="float8_e4m3fn", k_scale=0.5)
    return problem.replace(dtype=dtype, cache_dtype=dtype)
