"""Kernels that know nothing of this project, as a user would check them: right ones pass, broken ones are explained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from mla_conformance.suites.emulator import Kind, emulate
from mla_conformance.suites.selfcheck.emulator.softmax_example import softmax
from mla_conformance.suites.selfcheck.readme import example_with

EXAMPLE = Path(__file__).with_name("softmax_example.py")
TARGETS = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121"]


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """C = A @ B, in float32."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * K + k, mask=(rows[:, None] < M) & (k < K), other=0.0)
        right = tl.load(b + k[:, None] * N + columns, mask=(k[:, None] < K) & (columns < N), other=0.0)
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * N + columns, total, mask=(rows[:, None] < M) & (columns < N))


@triton.jit
def without_mask(x, y, BLOCK: tl.constexpr):
    """Forgets that the last block is not full."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


@triton.jit
def overlapping(y, BLOCK: tl.constexpr):
    """Every program writes where its neighbour does."""
    at = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK)
    tl.store(y + at, tl.program_id(0).to(tl.float32))


@pytest.mark.parametrize("target", TARGETS)
def test_a_softmax_is_right_on_every_target(target: str) -> None:
    """Its reduction goes through shared memory and shuffles."""
    x = torch.randn(5, 300)
    y = torch.full_like(x, torch.nan)
    with emulate(target) as run:
        softmax[(5,)](x, y, 300, BLOCK=512)
    torch.testing.assert_close(y, x.softmax(1))
    assert not run.findings, run.report()
    assert [launch.function for launch in run.launches] == ["softmax"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("stages", [1, 3])
def test_a_matmul_is_right_in_every_dtype(dtype: torch.dtype, stages: int) -> None:
    """Asynchronous copies and tensor-core products; float32 goes through tf32, 10 bits of mantissa."""
    a, b = torch.randn(40, 72).to(dtype), torch.randn(72, 48).to(dtype)
    c = torch.full((40, 48), torch.nan)
    with emulate("sm_120") as run:
        matmul[3, 2](a, b, c, 40, 48, 72, BM=16, BN=32, BK=32, num_stages=stages)
    expected = a.double() @ b.double()
    rounding = 2**-11 if dtype is torch.float32 else 2**-24
    bound = 72 * 2 * rounding * (a.double().abs() @ b.double().abs()).max()
    assert (c.double() - expected).abs().max() <= bound
    assert not run.findings, run.report()


def test_a_missing_mask_is_an_access_out_of_bounds_with_its_line() -> None:
    """The storage has 100 elements, the grid covers 128; nothing of a neighbour is touched."""
    x, y = torch.ones(100), torch.zeros(100)
    with emulate() as run:
        without_mask[(2,)](x, y, BLOCK=64)
    kinds = {finding.kind for finding in run.findings}
    assert kinds == {Kind.GLOBAL_BOUNDS}
    assert re.search(
        r"test_foreign_kernels\.py:\d+, PTX line \d+: `.*CTA 1 thread \d+ .*byte 4\d\d of tensor", run.report()
    )
    assert y.eq(1).all()


def test_overlapping_programs_write_one_address() -> None:
    """On a card the result would depend on which program comes last."""
    y = torch.zeros(192)
    with emulate() as run:
        overlapping[(2,)](y, BLOCK=128)
    assert {finding.kind for finding in run.findings} == {Kind.TWO_CTAS}


def test_the_ten_lines_of_the_readme_run_as_written() -> None:
    """The block is cut out of the README and run."""
    block = example_with("emulate(")
    assert len(block.splitlines()) <= 10
    subprocess.run([sys.executable, "-c", block], check=True, timeout=120)


def test_a_script_runs_emulated_without_a_change(tmp_path: Path) -> None:
    """The exit status tells whether there was a finding, or nothing to check."""

    def run(script: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mla_conformance.suites.emulator", str(script)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    right = run(EXAMPLE)
    assert right.returncode == 0, right.stderr
    assert "sm_120: softmax[16]: no finding" in right.stdout
    broken = tmp_path / "broken.py"
    broken.write_text(EXAMPLE.read_text(encoding="utf-8").replace("softmax[(16,)]", "softmax[(17,)]"), encoding="utf-8")
    wrong = run(broken)
    assert wrong.returncode == 1, wrong.stderr
    assert "softmax: global access out of bounds: " in wrong.stdout
    broken.write_text("", encoding="utf-8")
    assert run(broken).returncode == 1


def test_unknown_targets_and_devices_are_refused_by_name() -> None:
    """Instead of compiling for something else."""
    with pytest.raises(ValueError, match=r"target='sm_75': unknown; use sm_80"), emulate("sm_75"):
        pass
