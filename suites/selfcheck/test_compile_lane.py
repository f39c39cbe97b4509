"""The compile lane itself: planted faults are seen, a shipped kernel measures as known, a worker may die."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
import triton.language as tl

from mla_conformance.suites.harness import compile_worker
from mla_conformance.suites.harness.capture import capture
from mla_conformance.suites.harness.cases import DecodeCase
from mla_conformance.suites.harness.compiler import MODULE, Compiler, LauncherError
from mla_conformance.suites.harness.errors import Mismatch, NoResult, Unsupported
from mla_conformance.suites.harness.implementations import reference
from mla_conformance.suites.harness.lanes.compile import Lane
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.targets import TARGETS
from mla_conformance.suites.harness.worker import Worker
from mla_conformance.suites.target import test_budget as budget

SMALL = MLADecodeProblem(lengths=(20,), num_splits=1)
Make = Callable[..., Compiler]


@triton.jit
def product_kernel(x_ptr, y_ptr, M: tl.constexpr, K: tl.constexpr):
    rows, inner = tl.arange(0, M), tl.arange(0, K)
    left = tl.load(x_ptr + rows[:, None] * K + inner[None, :]).to(tl.float16)
    right = tl.load(x_ptr + inner[:, None] * M + rows[None, :]).to(tl.float16)
    tl.store(y_ptr + rows[:, None] * M + rows[None, :], tl.dot(left, right).to(y_ptr.dtype.element_ty))


@triton.jit
def column_sum_kernel(x_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    values = tl.load(x_ptr + offsets).to(tl.float32)
    tl.store(y_ptr + offsets, (values - tl.sum(values, 0)[None, :]).to(y_ptr.dtype.element_ty))


@triton.jit
def store_kernel(y_ptr, NUMBER: tl.constexpr):
    tl.store(y_ptr, NUMBER)


@triton.jit
def impossible_kernel(y_ptr):
    tl.static_assert(False, "planted")


@triton.autotune(configs=[triton.Config({}, num_warps=1), triton.Config({}, num_warps=2)], key=[])
@triton.heuristics({"NUMBER": lambda arguments: 3})
@triton.jit
def tuned_kernel(y_ptr, NUMBER: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, 128), NUMBER)


class Planted(reference.Adapter):
    """Declines nothing, and launches what a subclass plants: here nothing."""

    name = "planted"

    def mla_decode(self, case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor]:
        self.plant(case)
        return case.out, case.lse

    def plant(self, case: DecodeCase) -> None:
        """Launch nothing."""


class LargeProduct(Planted):
    """Both operands of the product pass through shared memory: 2 * 128 * 256 * 2 bytes."""

    def plant(self, case: DecodeCase) -> None:
        product_kernel[(1,)](case.q, case.out, M=128, K=256)


class SmallProduct(Planted):
    def plant(self, case: DecodeCase) -> None:
        product_kernel[(1,)](case.q, case.out, M=128, K=64)


class Spilling(Planted):
    """64 * 256 values live at once in one warp are 512 a thread."""

    def plant(self, case: DecodeCase) -> None:
        column_sum_kernel[(1,)](case.q, case.out, M=64, N=256, num_warps=1)


class LengthAsConstant(Planted):
    def plant(self, case: DecodeCase) -> None:
        store_kernel[(1,)](case.out, NUMBER=max(case.problem.lengths))


class Inquisitive(Planted):
    """Asks for the number of multiprocessors in the two usual ways, and gives its grid as a function."""

    def plant(self, case: DecodeCase) -> None:
        driver = triton.runtime.driver.active
        properties = driver.utils.get_device_properties(driver.get_current_device())
        of_torch = torch.cuda.get_device_properties().multi_processor_count
        for count in (properties["multiprocessor_count"], 1000 + of_torch):
            store_kernel[lambda arguments: (arguments["NUMBER"],)](case.out, NUMBER=count)


class Tuned(Planted):
    def plant(self, case: DecodeCase) -> None:
        tuned_kernel[(1,)](case.out)


class Impossible(Planted):
    def plant(self, case: DecodeCase) -> None:
        impossible_kernel[(1,)](case.out)


class Raising(Planted):
    def plant(self, case: DecodeCase) -> None:
        raise ValueError("planted: heads=16 displeases")


class OnlyHopper(Planted):
    def declines(self, problem: MLADecodeProblem) -> str | None:
        arch = triton.runtime.driver.active.get_current_target().arch
        return None if arch == 90 else f"sm_{arch}: only sm_90"


class Dying(Planted):
    def plant(self, case: DecodeCase) -> None:
        os.write(2, b"planted death")
        os._exit(7)


class Sleeping(Planted):
    def plant(self, case: DecodeCase) -> None:
        time.sleep(3600)


class Chatty(Planted):
    def plant(self, case: DecodeCase) -> None:
        print('{"kernels": []}', flush=True)
        os.write(1, b'{"kernels": []}\n')
        store_kernel[(1,)](case.out, NUMBER=1)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(MODULE) as worker:
        yield worker


@pytest.fixture
def planted(worker: Worker) -> Make:
    def make(kind: type[Planted], target: str = "sm_120", worker: Worker = worker) -> Compiler:
        spec = f"mla_conformance.suites.selfcheck.test_compile_lane:{kind.__name__}"
        return Compiler(spec, kind(), Lane(), TARGETS[target], worker=worker)

    return make


@pytest.fixture
def vllm(worker: Worker) -> Compiler:
    return Compiler("vllm", Planted(), Lane(), TARGETS["sm_120"], worker=worker)


@pytest.mark.parametrize(
    ("case", "shared_bytes"), [("bf16-heads=16-page=64", 63_488), ("fp8-heads=16-page=64", 102_400)]
)
def test_a_shipped_kernel_measures_as_known(vllm: Compiler, case: str, shared_bytes: int) -> None:
    """What vLLM 0.33 needs on sm_120 is public (vllm-project/vllm#53748): the lane must find the same."""
    first, second = vllm.compile(budget.PROBLEMS[case])
    assert (first.name, second.name) == ("_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2")
    assert first.shared_bytes == shared_bytes
    assert first.constants["BLOCK_N"] == "32"
    assert first.tensor_core_instructions["mma"] > 0
    assert [kernel["hash"] for kernel in vllm.record.kernels] == [first.hash, second.hash]


def test_a_probe_without_divisibility_passes_what_does_not_fit(vllm: Compiler) -> None:
    """Negative control: left out, the JIT's knowledge makes the same launch look as if it fitted the card."""
    problem = budget.PROBLEMS["fp8-heads=16-page=64"]
    real, probe = (vllm.compile(problem, specialise=specialise)[0] for specialise in (True, False))
    assert probe.shared_bytes < vllm.target.shared_bytes < real.shared_bytes


def test_too_much_shared_memory_is_reported(planted: Make) -> None:
    message = r"product_kernel \(M=128, K=256.* needs 131,072 B .* sm_120 has 101,376 B"
    with pytest.raises(Mismatch, match=message):
        budget.test_shared_memory_fits(planted(LargeProduct), SMALL)
    budget.test_shared_memory_fits(planted(SmallProduct), SMALL)


def test_a_spill_is_reported(planted: Make) -> None:
    with pytest.raises(Mismatch, match=r"column_sum_kernel .* [1-9]\d* B of stack.* spill stores [1-9]"):
        budget.test_nothing_is_spilled(planted(Spilling), SMALL)


@pytest.mark.parametrize(("target", "family"), [("sm_90", "wgmma"), ("sm_100", "tcgen05"), ("sm_120", "mma")])
def test_matrix_instructions_are_told_apart(planted: Make, target: str, family: str) -> None:
    """The same product takes each target's own family, and is reported where it is called foreign."""
    compiler = planted(SmallProduct, target)
    budget.test_no_foreign_instruction(compiler, SMALL)
    compiler.target = dataclasses.replace(compiler.target, foreign_instructions=(family,))
    with pytest.raises(Mismatch, match=rf"product_kernel .* [1-9]\d* {family} instructions"):
        budget.test_no_foreign_instruction(compiler, SMALL)


def test_products_without_tensor_cores_are_reported(planted: Make) -> None:
    with pytest.raises(Mismatch, match="0 tensor-core instructions"):
        budget.test_products_run_on_tensor_cores(planted(LengthAsConstant), SMALL)


def test_a_length_as_a_constant_is_reported(planted: Make) -> None:
    compiler = planted(LengthAsConstant)
    with pytest.raises(Mismatch, match="NUMBER=1099"):
        budget.test_sizes_of_a_batch_create_no_kernel(compiler, budget.OTHER_SIZES["lengths"])


def test_every_configuration_of_a_tuned_kernel_is_compiled(planted: Make) -> None:
    """On each target anew, although the tuner remembers what it chose for the last one."""
    for target in ("sm_120", "sm_90"):
        kernels = planted(Tuned, target).compile(SMALL)
        assert [(k.name, k.target, k.num_warps, k.constants["NUMBER"]) for k in kernels] == [
            ("tuned_kernel", target, 1, "3"),
            ("tuned_kernel", target, 2, "3"),
        ]


def test_the_launcher_sees_the_absent_card(planted: Make) -> None:
    kernels = planted(Inquisitive, "sm_121").compile(SMALL)
    assert [kernel.constants["NUMBER"] for kernel in kernels] == ["48", "1048"]


def test_a_kernel_that_does_not_compile_breaks_a_requirement(planted: Make) -> None:
    with pytest.raises(Mismatch, match=r"(?s)sm_120: does not compile: impossible_kernel: .*planted"):
        planted(Impossible).compile(SMALL)


def test_a_launcher_that_raises_is_no_expected_failure(planted: Make) -> None:
    with pytest.raises(LauncherError, match="ValueError: planted: heads=16 displeases"):
        planted(Raising).compile(SMALL)
    assert not issubclass(LauncherError, Mismatch)


def test_a_launcher_that_launches_nothing_fails(planted: Make) -> None:
    with pytest.raises(Mismatch, match="launched no Triton kernel"):
        planted(Planted).compile(SMALL)


def test_a_target_can_be_declined(planted: Make) -> None:
    compiler = planted(OnlyHopper)
    with pytest.raises(Unsupported, match="sm_120: only sm_90"):
        compiler.compile(SMALL)
    assert compiler.record.ran == 0
    assert compiler.record.declined == {"sm_120: only sm_90": 1}


def test_stray_output_does_not_reach_the_answers(planted: Make) -> None:
    assert [kernel.name for kernel in planted(Chatty).compile(SMALL)] == ["store_kernel"]


def test_a_dead_worker_gives_no_result_and_is_replaced(planted: Make) -> None:
    with Worker(MODULE) as worker:
        for _ in range(2):
            with pytest.raises(NoResult, match=r"(?s)died \(exit status 7\).*planted death"):
                planted(Dying, worker=worker).compile(SMALL)
        assert planted(LengthAsConstant, worker=worker).compile(SMALL)


def test_a_request_that_takes_too_long_gives_no_result(planted: Make) -> None:
    with Worker(MODULE, seconds=0.2) as worker:
        with pytest.raises(NoResult, match=r"no answer in 0\.2 s"):
            planted(Sleeping, worker=worker).compile(SMALL)
        worker.seconds = 120
        assert planted(LengthAsConstant, worker=worker).compile(SMALL)


def test_an_implementation_that_cannot_be_loaded_gives_no_result(worker: Worker) -> None:
    compiler = Compiler("no.such:Adapter", Planted(), Lane(), TARGETS["sm_120"], worker=worker)
    with pytest.raises(NoResult, match=r"no\.such"):
        compiler.compile(SMALL)


def test_by_hand_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    spec = "mla_conformance.suites.selfcheck.test_compile_lane:SmallProduct"
    assert compile_worker.main(["--impl", spec, "--target", "sm_120", str(SMALL)]) == 0
    printed = capsys.readouterr().out
    assert "product_kernel" in printed
    assert "32768/101376" in printed


def test_a_process_that_interprets_refuses_to_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset it"), capture(TARGETS["sm_120"]):
        pass
