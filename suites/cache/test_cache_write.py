"""Rows of new tokens reach their slots of the paged cache, byte for byte, and nothing else does."""

import pytest

from mla_conformance.suites.harness.cache_outcomes import check_cache
from mla_conformance.suites.harness.drawing import listed
from mla_conformance.suites.harness.problems import DTYPES, KVCacheWriteProblem
from mla_conformance.suites.harness.problems.cache import DS_MLA
from mla_conformance.suites.harness.subject import Subject

SAME = KVCacheWriteProblem(tokens=7)
FP8 = SAME.replace(cache_format="float8_e4m3fn", k_scale=0.3)
DS = SAME.replace(cache_format="fp8_ds_mla", **DS_MLA)
ROWS = {"same": SAME, "float8_e4m3fn": FP8, "fp8_ds_mla": DS}
every_format = pytest.mark.parametrize("base", [pytest.param(base, id=name) for name, base in ROWS.items()])


@pytest.mark.requirement("MLA-KVW-01")
@listed(
    SAME.replace(values="special"),
    dtype=DTYPES,
    page_size=[1, 5, 64],
    kv_lora_rank=[9, 72, 512],
    qk_rope_head_dim=[0, 64],
    tokens=[0, 1],
    slot_dtype=["int32"],
)
def test_cache_of_the_rows_dtype_takes_their_bits(subject: Subject, problem: KVCacheWriteProblem) -> None:
    """Zeros keep their sign, subnormals and NaN their bits."""
    check_cache(subject.kv_cache_write(problem))


@pytest.mark.requirement("MLA-KVW-02")
@listed(
    FP8.replace(dtype="float32", values="special"),
    dtype=DTYPES,
    k_scale=[1.0, 0.5, 0.07, 0.9, 1.1, 3.0],
    values=["normal"],
    page_size=[1, 5],
    kv_lora_rank=[72, 512],
    qk_rope_head_dim=[0, 64],
    slot_dtype=["int32"],
)
def test_fp8_holds_the_nearest_code_of_the_quotient(subject: Subject, problem: KVCacheWriteProblem) -> None:
    """Scales that are no powers of two, which round the quotient; latent and rotary part have the same one."""
    check_cache(subject.kv_cache_write(problem))


@pytest.mark.requirement("MLA-KVW-03")
@every_format
@pytest.mark.parametrize("values", ["large", "special"])
def test_what_is_too_large_saturates_and_nan_stays(subject: Subject, base: KVCacheWriteProblem, values: str) -> None:
    """Up to hundreds of times the largest code, both infinities, and NaN of both signs."""
    check_cache(subject.kv_cache_write(base.replace(values=values)))


@pytest.mark.requirement("MLA-KVW-04")
@listed(DS, values=["normal", "large", "special"], page_size=[1, 64], seed=[1], slots=["with_skipped"])
def test_ds_mla_scales_are_powers_of_two(subject: Subject, problem: KVCacheWriteProblem) -> None:
    """A group of zeros takes the least scale; every group has its own, stored behind the codes."""
    check_cache(subject.kv_cache_write(problem))


@pytest.mark.requirement("MLA-KVW-05")
@every_format
@pytest.mark.parametrize("slot_dtype", ["int32", "int64"])
def test_padding_is_not_written(subject: Subject, base: KVCacheWriteProblem, slot_dtype: str) -> None:
    """Every third token has slot -1 and a row that is half NaN."""
    check_cache(subject.kv_cache_write(base.replace(slots="with_skipped", slot_dtype=slot_dtype)))


@pytest.mark.requirement("MLA-KVW-06")
@every_format
@pytest.mark.parametrize("slot_dtype", ["int32", "int64"])
def test_slots_outside_the_cache_are_not_written(subject: Subject, base: KVCacheWriteProblem, slot_dtype: str) -> None:
    """One past the end, the extremes of the dtype, and slots of the cache plus a multiple of 2**32."""
    problem = base.replace(slots="beyond", slot_dtype=slot_dtype, tokens=16)
    check_cache(subject.kv_cache_write(problem))


@pytest.mark.requirement("MLA-KVW-07")
@every_format
@pytest.mark.parametrize("page_size", [1, 5])
def test_odd_strides_and_gaps(subject: Subject, base: KVCacheWriteProblem, page_size: int) -> None:
    """Rows, pages and tokens of the cache lie apart; the gaps are compared byte for byte."""
    check_cache(subject.kv_cache_write(base.replace(layout="gapped", page_size=page_size)))


@pytest.mark.requirement("MLA-KVW-08")
@every_format
def test_offsets_beyond_two_to_the_31(subject: Subject, base: KVCacheWriteProblem) -> None:
    """Pages lie 2**30 elements apart; a 32-bit offset would wrap into memory that is not looked at."""
    check_cache(subject.kv_cache_write(base.replace(layout="far", tokens=14)))


@pytest.mark.requirement("MLA-KVW-09")
@every_format
def test_equal_rows_may_share_a_slot(subject: Subject, base: KVCacheWriteProblem) -> None:
    """The last token has the slot and the row of the first."""
    check_cache(subject.kv_cache_write(base.replace(slots="duplicate_equal")))
