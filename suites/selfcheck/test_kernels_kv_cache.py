"""The cache-writing kernel's public function: what it refuses, and what no other lane runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_conformance.kernels.kv_cache import write_kv_cache
from mla_conformance.suites.cache.test_cache_write import ROWS
from mla_conformance.suites.harness.cache_cases import KVCacheWriteCase, build
from mla_conformance.suites.harness.cache_outcomes import check_cache
from mla_conformance.suites.harness.implementations import kernels
from mla_conformance.suites.harness.problems import KVCacheWriteProblem
from mla_conformance.suites.harness.subject import Subject
from mla_conformance.suites.selfcheck.test_planted_faults import AnySize


def arguments(case: KVCacheWriteCase, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of a right call, with some changed."""
    given = {name: getattr(case, name) for name in ("ckv", "kpe", "kv_cache", "slot_mapping", "k_scale")}
    return given | changes


def refused(problem: KVCacheWriteProblem, name: str, change: Any, error: type[Exception]) -> None:
    """The call with this argument changed raises an error that names it, and writes nothing."""
    case = build(problem)
    before = case.kv_cache.clone()
    with pytest.raises(error, match=rf"^{name} "):
        write_kv_cache(**arguments(case, **{name: change(case)}))
    assert torch.equal(case.kv_cache.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("ckv", lambda c: [1.0], TypeError),
        ("ckv", lambda c: c.ckv.double(), TypeError),
        ("ckv", lambda c: c.ckv[0], ValueError),
        ("ckv", lambda c: c.ckv.new_zeros(7, 1025), ValueError),
        ("ckv", lambda c: c.ckv.t().contiguous().t(), ValueError),
        ("kpe", lambda c: c.kpe.float(), TypeError),
        ("kpe", lambda c: c.kpe[:3], ValueError),
        ("kpe", lambda c: c.kpe[0], ValueError),
        ("kv_cache", lambda c: c.kv_cache[0], ValueError),
        ("kv_cache", lambda c: c.kv_cache.float(), TypeError),
        ("kv_cache", lambda c: c.kv_cache[..., :-1], ValueError),
        ("kv_cache", lambda c: c.kv_cache[:, :0], ValueError),
        ("kv_cache", lambda c: c.kv_cache[:1].expand(3, -1, -1), ValueError),
        ("kv_cache", lambda c: c.kv_cache.new_zeros(3, 80, 4).transpose(1, 2), ValueError),
        ("slot_mapping", lambda c: c.slot_mapping.float(), TypeError),
        ("slot_mapping", lambda c: c.slot_mapping[:2], ValueError),
        ("slot_mapping", lambda c: c.slot_mapping[None], ValueError),
        ("slot_mapping", lambda c: c.slot_mapping.to("meta"), ValueError),
        ("k_scale", lambda c: 0.0, ValueError),
        ("k_scale", lambda c: float("nan"), ValueError),
        ("k_scale", lambda c: "1", TypeError),
        ("k_scale", lambda c: torch.ones(2), ValueError),
        ("k_scale", lambda c: torch.ones((), dtype=torch.float64), TypeError),
    ],
)
def test_a_wrong_argument_is_named(name: str, change: Any, error: type[Exception]) -> None:
    refused(ROWS["same"], name, change, error)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("kv_cache", lambda c: c.kv_cache[..., :576], ValueError),
        ("kv_cache", lambda c: torch.zeros(3, 4, 657, dtype=torch.uint8)[..., :656], ValueError),
        ("kv_cache", lambda c: torch.zeros(8000, dtype=torch.uint8)[1:7873].view(3, 4, 656), ValueError),
        ("ckv", lambda c: c.ckv.half(), TypeError),
        ("ckv", lambda c: c.ckv[:, :256], ValueError),
        ("kpe", lambda c: None, ValueError),
    ],
)
def test_what_does_not_fit_rows_of_656_bytes_is_named(name: str, change: Any, error: type[Exception]) -> None:
    """Another width, rows off the alignment of their scales, other sizes or dtypes than the format has."""
    if name == "ckv":
        case = build(ROWS["fp8_ds_mla"])
        with pytest.raises(error, match=r"^(ckv|kpe) "):
            write_kv_cache(**arguments(case, ckv=change(case)))
    else:
        refused(ROWS["fp8_ds_mla"], name, change, error)


@pytest.mark.parametrize("base", [pytest.param(base, id=name) for name, base in ROWS.items()])
def test_equal_rows_may_share_a_slot(base: KVCacheWriteProblem) -> None:
    """MLA-KVW-09 for the kernel: the emulate lane calls two equal writes a race and declines it."""
    check_cache(Subject(kernels.Adapter(), AnySize()).kv_cache_write(base.replace(slots="duplicate_equal")))


def test_no_rotary_part_may_be_none() -> None:
    case = build(ROWS["same"].replace(qk_rope_head_dim=0))
    write_kv_cache(case.ckv, None, case.kv_cache, case.slot_mapping)
    page, position = divmod(int(case.slot_mapping[2]), case.kv_cache.shape[1])
    assert torch.equal(case.kv_cache[page, position], case.ckv[2])
