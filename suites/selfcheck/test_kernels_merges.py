"""The merging kernels' public functions: what they refuse, what they allocate, and what no lane shows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_conformance.kernels.merge_states import MAX_ROWS, merge_shards, merge_states
from mla_conformance.reference.split_kv import merge_many
from mla_conformance.suites.harness.implementations import kernels
from mla_conformance.suites.harness.merge_cases import build_shards, build_states
from mla_conformance.suites.harness.problems import MergeShardsProblem, MergeStatesProblem
from mla_conformance.suites.selfcheck.test_planted_faults import AnySize

STATES = MergeStatesProblem(tokens=5, heads=3, width=32, dtype="float32")
SHARDS = MergeShardsProblem(tokens=5, heads=3, width=32, dtype="float32", shards=4)


@pytest.fixture(autouse=True)
def _in_a_lane() -> Iterator[None]:
    with AnySize().running():
        yield


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("out_a", lambda c: [1.0], TypeError),
        ("out_a", lambda c: c.out_a.double(), TypeError),
        ("out_a", lambda c: c.out_a[0], ValueError),
        ("out_a", lambda c: c.out_a[..., :0], ValueError),
        ("out_a", lambda c: c.out_a[:, :0], ValueError),
        ("out_a", lambda c: c.out_a.new_zeros(5, 3, 1025), ValueError),
        ("out_a", lambda c: c.out_a.new_zeros(1, 1, 1).expand(MAX_ROWS + 1, 1, 1), ValueError),
        ("out_a", lambda c: c.out_a.new_zeros(5, 32, 3).mT, ValueError),
        ("out_b", lambda c: None, TypeError),
        ("out_b", lambda c: c.out_b.half(), TypeError),
        ("out_b", lambda c: c.out_b[:4], ValueError),
        ("out_b", lambda c: c.out_b[0], ValueError),
        ("out_b", lambda c: c.out_b.new_zeros(5, 32, 3).mT, ValueError),
        ("out_b", lambda c: c.out_b.to("meta"), ValueError),
        ("lse_a", lambda c: 0.0, TypeError),
        ("lse_a", lambda c: c.lse_a.double(), TypeError),
        ("lse_a", lambda c: c.lse_a.T, ValueError),
        ("lse_a", lambda c: c.lse_a[..., None], ValueError),
        ("lse_a", lambda c: c.lse_a.to("meta"), ValueError),
        ("lse_b", lambda c: c.lse_b.bfloat16(), TypeError),
        ("lse_b", lambda c: c.lse_b.T, ValueError),
        ("out", lambda c: "out", TypeError),
        ("out", lambda c: c.out.bfloat16(), TypeError),
        ("out", lambda c: c.out[:, :2], ValueError),
        ("out", lambda c: c.out.new_zeros(5, 32, 3).mT, ValueError),
        ("out", lambda c: c.out.new_zeros(5, 1, 32).expand(5, 3, 32), ValueError),
        ("out", lambda c: c.out.to("meta"), ValueError),
        ("lse", lambda c: c.lse.bfloat16(), TypeError),
        ("lse", lambda c: c.lse.T, ValueError),
        ("lse", lambda c: c.lse.new_zeros(5, 1).expand(5, 3), ValueError),
    ],
)
def test_a_wrong_argument_of_two_states_is_named(name: str, change: Any, error: type[Exception]) -> None:
    """And nothing is written."""
    case = build_states(STATES)
    given = {key: getattr(case, key) for key in ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")}
    with pytest.raises(error, match=rf"^{name} "):
        merge_states(**(given | {name: change(case)}))
    assert case.out.isnan().all()
    assert case.lse.isnan().all()


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("outs", lambda c: list(c.outs), TypeError),
        ("outs", lambda c: c.outs.double(), TypeError),
        ("outs", lambda c: c.outs[0], ValueError),
        ("outs", lambda c: c.outs[:0], ValueError),
        ("outs", lambda c: c.outs.repeat(5, 1, 1, 1), ValueError),
        ("outs", lambda c: c.outs.new_zeros(4, 5, 3, 1025), ValueError),
        ("outs", lambda c: c.outs.new_zeros(4, 5, 32, 3).mT, ValueError),
        ("lses", lambda c: c.lses.tolist(), TypeError),
        ("lses", lambda c: c.lses.half(), TypeError),
        ("lses", lambda c: c.lses[:3], ValueError),
        ("lses", lambda c: c.lses.mT, ValueError),
        ("lses", lambda c: c.lses[0], ValueError),
        ("lses", lambda c: c.lses.to("meta"), ValueError),
        ("out", lambda c: c.out.half(), TypeError),
        ("out", lambda c: c.out[:4], ValueError),
        ("out", lambda c: c.out.new_zeros(1, 3, 32).expand(5, 3, 32), ValueError),
        ("lse", lambda c: c.lse.double(), TypeError),
        ("lse", lambda c: c.lse.T, ValueError),
    ],
)
def test_a_wrong_argument_of_shards_is_named(name: str, change: Any, error: type[Exception]) -> None:
    """And nothing is written."""
    case = build_shards(SHARDS)
    given = {key: getattr(case, key) for key in ("outs", "lses", "out", "lse")}
    with pytest.raises(error, match=rf"^{name} "):
        merge_shards(**(given | {name: change(case)}))
    assert case.out.isnan().all()
    assert case.lse.isnan().all()


def test_results_are_allocated_where_none_are_given() -> None:
    states, shards = build_states(STATES), build_shards(SHARDS)
    close(merge_states(states.out_a, states.lse_a, states.out_b, states.lse_b), states.outs, states.lses)
    close(merge_shards(shards.outs, shards.lses), shards.outs, shards.lses)


def test_the_result_may_replace_the_second_side() -> None:
    case = build_states(STATES)
    results = merge_states(case.out_a, case.lse_a, case.out_b, case.lse_b, out=case.out_b, lse=case.lse_b)
    assert results[0] is case.out_b
    assert results[1] is case.lse_b
    close(results, case.outs, case.lses)


def test_a_nan_log_sum_exp_is_not_hidden() -> None:
    """Its row is NaN, and no other."""
    states, shards = build_states(STATES), build_shards(SHARDS)
    states.lse_b[1, 2] = shards.lses[3, 1, 2] = torch.nan
    for out, lse in (
        merge_states(states.out_a, states.lse_a, states.out_b, states.lse_b),
        merge_shards(shards.outs, shards.lses),
    ):
        assert out[1, 2].isnan().all()
        assert lse[1, 2].isnan()
        assert out.isnan().sum() == STATES.width
        assert lse.isnan().sum() == 1


def test_sizes_out_of_range_are_declined() -> None:
    adapter = kernels.Adapter()
    assert "width=1025" in str(adapter.declines(STATES.replace(width=1025)))
    assert "shards=17" in str(adapter.declines(SHARDS.replace(shards=17)))


COMPILE_IN_PLACE = """
import re
from mla_conformance.kernels.merge_states import merge_states
from mla_conformance.suites.harness.capture import capture
from mla_conformance.suites.harness.merge_cases import build_states
from mla_conformance.suites.harness.problems import MergeStatesProblem
from mla_conformance.suites.harness.targets import TARGETS

case = build_states(MergeStatesProblem(in_place=True, width=512))
with capture(TARGETS["sm_120"]) as launches:
    merge_states(case.out_a, case.lse_a, case.out_b, case.lse_b, out=case.out, lse=case.lse)
lines = launches[0].kernel.asm["ptx"].splitlines()
places = {name: [i for i, line in enumerate(lines) if name in line] for name in ("ld.global", "bar.sync", "st.global")}
print(any(max(places["ld.global"]) < i < min(places["st.global"]) for i in places["bar.sync"]))
"""


def test_in_place_a_barrier_lies_between_the_last_load_and_the_first_store() -> None:
    """The emulator runs the warps of a program in step, so it does not show one that stores before another has read."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE_IN_PLACE], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == "True", ran.stderr


def close(results: tuple[Tensor, Tensor], outs: Tensor, lses: Tensor) -> None:
    """The results are those of the oracle, of a dtype and shape that fit it."""
    merged = merge_many(outs.double(), lses.double())
    torch.testing.assert_close(results[0], merged.out.to(outs.dtype))
    torch.testing.assert_close(results[1], merged.lse.float())
