"""The ``emulate`` lane: its requirements fail on planted faults, and its statuses are those of the other lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl

from mla_conformance.suites.attention.test_decode_launch import (
    test_every_launch_fits_the_target as fits,
)
from mla_conformance.suites.attention.test_decode_launch import (
    test_no_race_no_early_read_no_wild_access as no_fault,
)
from mla_conformance.suites.emulator import EmulationStopped, UnsupportedInstruction
from mla_conformance.suites.harness import implementation, lanes
from mla_conformance.suites.harness.errors import Mismatch, NoResult, Unsupported
from mla_conformance.suites.harness.implementations.kernels import Adapter
from mla_conformance.suites.harness.judge import check_lse, check_output
from mla_conformance.suites.harness.lanes import emulate as emulate_lane
from mla_conformance.suites.harness.lanes.interpreter import Lane as Interpreter
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Subject

BASE = MLADecodeProblem(lengths=(37, 1), heads=5)
FP8 = MLADecodeProblem(
    lengths=(70,), kv_lora_rank=512, qk_rope_head_dim=64, dtype="bfloat16", cache_dtype="float8_e4m3fn", k_scale=0.5
)


@triton.jit
def shifted_store(y, BLOCK: tl.constexpr):
    """One element beyond."""
    tl.store(y + 1 + tl.arange(0, BLOCK), 1.0)


@triton.jit
def product(a, b, c, SIZE: tl.constexpr):
    """A product whose two operands are staged in shared memory as often as it has stages."""
    at = tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, 4):
        tile = start * SIZE * SIZE + at[:, None] * SIZE + at
        total += tl.dot(tl.load(a + tile), tl.load(b + tile))
    tl.store(c + at[:, None] * SIZE + at, total)


class WritesBeyond(Adapter):
    """Right, but a helper kernel writes one element beyond its buffer."""

    def mla_decode(self, case: Any) -> Any:
        shifted_store[(1,)](torch.zeros(64), BLOCK=64)
        return super().mla_decode(case)


class AsksForTooMuch(Adapter):
    """Right, but a helper kernel wants 128 KiB of shared memory."""

    def mla_decode(self, case: Any) -> Any:
        a = torch.zeros(4, 128, 128, dtype=torch.bfloat16)
        product[(1,)](a, a, torch.zeros(128, 128), SIZE=128, num_stages=3)
        return super().mla_decode(case)


def lane(target: str = "sm_120") -> emulate_lane.Lane:
    return emulate_lane.Lane().for_targets([target])[0]


def test_a_write_beyond_a_buffer_fails_the_requirement() -> None:
    """The message names the kernel's line, the thread and the byte; without the helper kernel all is well."""
    with pytest.raises(Mismatch, match=r"sm_120: global access out of bounds: test_emulate_lane\.py:\d+, PTX line \d+"):
        no_fault(Subject(WritesBeyond(), lane()), problem=BASE)
    no_fault(Subject(Adapter(), lane()), problem=BASE)


def test_too_much_shared_memory_fails_the_requirement_on_a_small_card_only() -> None:
    """sm_120 gives 99 KB, sm_80 gives 163 KB."""
    with pytest.raises(Mismatch, match="gives a CTA at most 101376 bytes: a card refuses this launch"):
        fits(Subject(AsksForTooMuch(), lane()), problem=BASE)
    fits(Subject(AsksForTooMuch(), lane("sm_80")), problem=BASE)
    fits(Subject(Adapter(), lane()), problem=BASE)


@pytest.mark.parametrize("test", [fits, no_fault], ids=["fits", "no_fault"])
def test_a_lane_that_cannot_tell_says_so(test: Callable[..., None]) -> None:
    """Nor can an implementation without kernels pass by launching nothing."""
    with pytest.raises(Unsupported, match="interpreter lane"):
        test(Subject(Adapter(), Interpreter()), problem=BASE)
    with pytest.raises(Unsupported, match="launches no kernel"):
        test(Subject(implementation.load("reference"), lane()), problem=BASE)


def test_shipped_fp8_kernel_computes_rightly_though_a_card_refuses_it() -> None:
    """The two facts are told apart: vllm-project/vllm#53748."""
    subject = Subject(implementation.load("vllm"), lane())
    outcome = subject.mla_decode(FP8)
    check_output(outcome)
    check_lse(outcome)
    assert subject.lane.refusals is not None
    assert "102400 bytes" in subject.lane.refusals[0]
    subject = Subject(implementation.load("vllm"), lane("sm_90"))
    check_output(subject.mla_decode(FP8))
    assert not subject.lane.refusals


@pytest.mark.parametrize(
    ("raised", "status"), [(UnsupportedInstruction("`foo.bar`"), Unsupported), (EmulationStopped("too long"), NoResult)]
)
def test_what_the_emulator_cannot_do_is_no_verdict(raised: Exception, status: type[Exception]) -> None:
    """An instruction that is missing is unsupported, a run that does not end has no result."""
    with (
        patch("mla_conformance.suites.emulator.emulate.run_ptx", side_effect=raised),
        pytest.raises(status, match=str(raised)),
    ):
        Subject(Adapter(), lane()).mla_decode(BASE)


def test_auto_emulates_where_no_gpu_is_visible() -> None:
    """And takes the card where there is one."""
    assert [lane.name for lane in lanes.choose(["auto"], devices=[])] == ["emulate", "compile"]
    assert [lane.name for lane in lanes.choose(["auto"], devices=["0"])] == ["cuda", "compile"]


def test_each_target_asked_for_is_judged(run_pytest: Callable[..., Any]) -> None:
    """``--target`` may be repeated; the report says what the lane shows."""
    test = "suites/attention/test_decode_launch.py::test_every_launch_fits_the_target"
    chosen = ["--impl", "vllm", "--lane", "emulate", "--target", "sm_90", "--target", "sm_120", "-k", "float8"]
    run = run_pytest(test, *chosen)
    assert run.code == 0, run.output
    statuses = {result["target"]: result["status"] for result in run.results["results"]}
    assert statuses == {"sm_90": "pass", "sm_120": "expected-fail"}
    assert "this says nothing of ptxas" in run.output
    assert "this says nothing of ptxas" in run.results["shows"][0]
