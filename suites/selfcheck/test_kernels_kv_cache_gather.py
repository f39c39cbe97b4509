"""The cache-gathering kernel's public function: what it refuses, and what no other lane runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mla_conformance.kernels.kv_cache_gather import gather_kv_cache
from mla_conformance.suites.cache.test_cache_gather import FORMATS
from mla_conformance.suites.harness.cache_gather_cases import KVCacheGatherCase, build
from mla_conformance.suites.harness.cache_gather_outcomes import check_gathered
from mla_conformance.suites.harness.implementations import kernels
from mla_conformance.suites.harness.problems import KVCacheGatherProblem
from mla_conformance.suites.harness.subject import Subject
from mla_conformance.suites.selfcheck.test_planted_faults import AnySize

NAMES = ("kv_cache", "block_table", "cu_seqlens", "out", "seq_starts", "k_scale")


def arguments(case: KVCacheGatherCase, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a right call, with some changed."""
    return {name: getattr(case, name) for name in NAMES} | changes


def refused(problem: KVCacheGatherProblem, name: str, change: Any, error: type[Exception]) -> None:
    """The call with this argument changed raises an error that names it, and writes nothing."""
    case = build(problem)
    with pytest.raises(error, match=rf"^{name} "):
        gather_kv_cache(**arguments(case, **{name: change(case)}))
    assert case.out.isnan().all()


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("kv_cache", lambda c: [1.0], TypeError),
        ("kv_cache", lambda c: c.kv_cache.float(), TypeError),
        ("kv_cache", lambda c: c.kv_cache[0], ValueError),
        ("kv_cache", lambda c: c.kv_cache[:, :0], ValueError),
        ("kv_cache", lambda c: c.kv_cache.new_zeros(3, 4, 2049), ValueError),
        ("kv_cache", lambda c: c.kv_cache.new_zeros(3, 80, 4).transpose(1, 2), ValueError),
        ("block_table", lambda c: c.block_table.float(), TypeError),
        ("block_table", lambda c: c.block_table[0], ValueError),
        ("block_table", lambda c: c.block_table.to("meta"), ValueError),
        ("cu_seqlens", lambda c: c.cu_seqlens.tolist(), TypeError),
        ("cu_seqlens", lambda c: c.cu_seqlens.short(), TypeError),
        ("cu_seqlens", lambda c: c.cu_seqlens[:-1], ValueError),
        ("cu_seqlens", lambda c: c.cu_seqlens[None], ValueError),
        ("out", lambda c: None, TypeError),
        ("out", lambda c: c.out.double(), TypeError),
        ("out", lambda c: c.out[..., :-1], ValueError),
        ("out", lambda c: c.out[0], ValueError),
        ("out", lambda c: c.out[:1].expand(12, -1), ValueError),
        ("out", lambda c: c.out.new_zeros(80, 12).T, ValueError),
        ("seq_starts", lambda c: c.seq_starts.float(), TypeError),
        ("seq_starts", lambda c: c.seq_starts[:2], ValueError),
        ("seq_starts", lambda c: 0, TypeError),
        ("k_scale", lambda c: 0.0, ValueError),
        ("k_scale", lambda c: "1", TypeError),
        ("k_scale", lambda c: torch.ones(2), ValueError),
        ("k_scale", lambda c: torch.ones((), dtype=torch.float64), TypeError),
    ],
)
def test_a_wrong_argument_is_named(name: str, change: Any, error: type[Exception]) -> None:
    refused(FORMATS["same"], name, change, error)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("kv_cache", lambda c: c.kv_cache[..., :576], ValueError),
        ("kv_cache", lambda c: torch.zeros(5, 4, 657, dtype=torch.uint8)[..., :656], ValueError),
        ("kv_cache", lambda c: torch.zeros(8000, dtype=torch.uint8)[1:7873].view(3, 4, 656), ValueError),
        ("out", lambda c: c.out.half(), TypeError),
        ("out", lambda c: c.out[:, :512], ValueError),
    ],
)
def test_what_does_not_fit_rows_of_656_bytes_is_named(name: str, change: Any, error: type[Exception]) -> None:
    """Another width, rows off the alignment of their scales, or an output of another dtype or width."""
    refused(FORMATS["fp8_ds_mla"], name, change, error)


@pytest.mark.parametrize("index", ["block_table", "cu_seqlens", "seq_starts"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_index_is_32_or_64_bits_by_itself(index: str, dtype: torch.dtype) -> None:
    case = build(FORMATS["float8_e4m3fn"])
    case = dataclasses.replace(case, **{index: getattr(case, index).to(dtype)})
    check_gathered(Subject(kernels.Adapter(), AnySize()).run(case))


def test_a_scale_may_be_a_number_or_a_tensor() -> None:
    """They give the same bits."""
    number, tensor = build(FORMATS["float8_e4m3fn"]), build(FORMATS["float8_e4m3fn"])
    rows = sum(number.problem.seq_lens)
    gather_kv_cache(**arguments(number, k_scale=0.3))
    gather_kv_cache(**arguments(tensor, k_scale=torch.tensor([0.3])))
    assert torch.equal(number.out[:rows], tensor.out[:rows])


def test_rows_that_do_not_fit_the_output_are_left_out() -> None:
    """A host that sized the output for fewer rows than the device asks for."""
    case, whole = build(FORMATS["same"]), build(FORMATS["same"])
    gather_kv_cache(**arguments(whole))
    short = case.out[:4]
    gather_kv_cache(**arguments(case, out=short))
    assert torch.equal(short, whole.out[:4])
    assert case.out[4:].isnan().all()


def test_a_position_outside_the_table_is_nan() -> None:
    """Before its first entry or behind its last; the other rows are right."""
    for start in (-3, 100):
        case = build(FORMATS["same"])
        starts = case.seq_starts.clone()
        starts[2] = start
        gather_kv_cache(**arguments(case, seq_starts=starts))
        expected = build(FORMATS["same"])
        gather_kv_cache(**arguments(expected))
        assert torch.equal(case.out[:6], expected.out[:6])
        lost = case.out[6:9] if start > 0 else case.out[6 : 6 - start]
        assert lost.isnan().all()
