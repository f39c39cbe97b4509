"""Rows of cached context are gathered from any page and position, bit for bit, and nothing else is written.

No shipped implementation is run: vLLM's ``gather_and_maybe_dequant_cache`` is compiled CUDA, which no lane without a
GPU can execute.
"""

import pytest

from mla_conformance.suites.harness.cache_gather_cases import reading_back
from mla_conformance.suites.harness.cache_gather_outcomes import check_gathered, check_invalid, check_round_trip
from mla_conformance.suites.harness.drawing import listed
from mla_conformance.suites.harness.errors import Mismatch, Unsupported
from mla_conformance.suites.harness.problems import DTYPES, KVCacheGatherProblem, KVCacheWriteProblem
from mla_conformance.suites.harness.problems.cache import DS_MLA
from mla_conformance.suites.harness.subject import Subject

SAME = KVCacheGatherProblem()
FP8 = SAME.replace(cache_format="float8_e4m3fn", k_scale=0.3)
DS = SAME.replace(cache_format="fp8_ds_mla", **DS_MLA)
FORMATS = {"same": SAME, "float8_e4m3fn": FP8, "fp8_ds_mla": DS}
every_format = pytest.mark.parametrize("base", [pytest.param(base, id=name) for name, base in FORMATS.items()])


@pytest.mark.requirement("MLA-KVG-01")
@listed(
    SAME.replace(values="bits"), dtype=DTYPES, kv_lora_rank=[9, 512], qk_rope_head_dim=[0, 64], page_size=[1, 5, 64]
)
def test_rows_of_the_outputs_dtype_keep_their_bits(subject: Subject, problem: KVCacheGatherProblem) -> None:
    """Any bits at all: infinities, subnormals and NaN with a payload."""
    check_gathered(subject.kv_cache_gather(problem))


@pytest.mark.requirement("MLA-KVG-02")
@listed(
    FP8.replace(values="codes"),
    dtype=DTYPES,
    k_scale=[1.0, 0.07, 3.0, 300.0],
    kv_lora_rank=[72, 512],
    qk_rope_head_dim=[0, 64],
)
def test_e4m3_is_read_as_its_value_times_the_scale(subject: Subject, problem: KVCacheGatherProblem) -> None:
    """All 256 codes, NaN of both signs among them; scales that round, and one that overflows float16."""
    check_gathered(subject.kv_cache_gather(problem))


@pytest.mark.requirement("MLA-KVG-03")
@listed(DS, values=["normal", "codes", "bits"], page_size=[1, 64])
def test_ds_mla_groups_have_a_scale_each(subject: Subject, problem: KVCacheGatherProblem) -> None:
    """Scales that are powers of two and scales that are not; the rotary part is copied, NaN and all."""
    check_gathered(subject.kv_cache_gather(problem))


@pytest.mark.requirement("MLA-KVG-04")
@every_format
def test_scale_of_another_cache_is_ignored(subject: Subject, base: KVCacheGatherProblem) -> None:
    """A scale of 3 multiplies an e4m3 cache, latent and rotary alike, and no other."""
    check_gathered(subject.kv_cache_gather(base.replace(k_scale=3.0)))


@pytest.mark.requirement("MLA-KVG-05")
@listed(
    SAME,
    seq_starts=[(), (0, 0, 0), (4, 0, 8), (3, 9, 5), (1, 0, 11)],
    seq_lens=[(1, 1, 1), (4, 8, 3), (9, 1, 13)],
    page_size=[1, 3, 64],
)
def test_any_start_and_length(subject: Subject, problem: KVCacheGatherProblem) -> None:
    """Chunks that start and end inside a page, at its edge, or span several; or no starts at all."""
    check_gathered(subject.kv_cache_gather(problem))


@pytest.mark.requirement("MLA-KVG-06")
@pytest.mark.parametrize("seq_lens", [(0, 5), (5, 0), (0, 0, 4, 0, 0, 3, 0), (0, 0), (), (1,) * 17], ids=str)
def test_requests_without_tokens(subject: Subject, seq_lens: tuple[int, ...]) -> None:
    """First, last, several in a row, all of them, and no request; each row still belongs to one request."""
    check_gathered(subject.kv_cache_gather(SAME.replace(seq_lens=seq_lens, seq_starts=())))


@pytest.mark.requirement("MLA-KVG-07")
@every_format
@pytest.mark.parametrize("spare_rows", [0, 1, 9])
def test_rows_of_no_request_are_left_alone(subject: Subject, base: KVCacheGatherProblem, spare_rows: int) -> None:
    """A workspace is larger than a chunk: what lies behind it may be another layer's."""
    check_gathered(subject.kv_cache_gather(base.replace(spare_rows=spare_rows, seq_lens=(2, 3, 0))))


@pytest.mark.requirement("MLA-KVG-08")
@listed(SAME.replace(page_size=2), unused_entries=["negative", "beyond"], poison=["inf", "huge"], pages=["shared"])
def test_only_what_the_positions_reach_is_read(subject: Subject, problem: KVCacheGatherProblem) -> None:
    """Entries before a start and behind an end name no page; rows there are poison. Requests may share pages."""
    check_gathered(subject.kv_cache_gather(problem))


@pytest.mark.requirement("MLA-KVG-09")
@every_format
@pytest.mark.parametrize("seed", [0, 1])
def test_page_ids_outside_the_cache(subject: Subject, base: KVCacheGatherProblem, seed: int) -> None:
    """The last request's first page is negative or beyond the cache; the other rows must not notice.

    The poison is finite, so that a NaN cannot come from reading some other page.
    """
    documented = subject.implementation.invalid_pages
    if documented is None:
        raise Unsupported("documents nothing for page ids outside the cache")
    case = subject.build(base.replace(pages="invalid", poison="huge", seed=seed))
    if documented == "refused":
        try:
            subject.run(case)
        except ValueError:
            return
        raise Mismatch("a page outside the cache was not refused")
    check_invalid(subject.run(case))


@pytest.mark.requirement("MLA-KVG-10")
@every_format
def test_odd_strides_and_gaps(subject: Subject, base: KVCacheGatherProblem) -> None:
    """Pages, tokens, table, offsets and output rows lie apart; the gaps are compared byte for byte."""
    check_gathered(subject.kv_cache_gather(base.replace(layout="gapped")))


@pytest.mark.requirement("MLA-KVG-11")
@every_format
def test_offsets_beyond_two_to_the_31(subject: Subject, base: KVCacheGatherProblem) -> None:
    """Pages lie 2**30 elements apart; a 32-bit offset would wrap into memory that holds zeros."""
    check_gathered(subject.kv_cache_gather(base.replace(layout="far")))


@pytest.mark.requirement("MLA-KVG-12")
@every_format
def test_what_was_written_is_what_is_gathered(subject: Subject, base: KVCacheGatherProblem) -> None:
    """One subject does both, so that writer and reader agree about scale and row format; at 0.07 few codes are left."""
    if not subject.implementation.offers("kv_cache_write"):
        raise Unsupported("offers no kv_cache_write")
    written = subject.build(
        KVCacheWriteProblem(
            tokens=7,
            kv_lora_rank=base.kv_lora_rank,
            qk_rope_head_dim=base.qk_rope_head_dim,
            cache_format=base.cache_format,
            k_scale=0.07,
        )
    )
    subject.run(written)
    check_round_trip(subject.run(reading_back(written)), written)
