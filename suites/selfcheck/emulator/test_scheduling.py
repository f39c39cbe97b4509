"""Scheduling: diverged lanes meet again, CTAs of a batch go their own ways, and batches change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from mla_conformance.suites.emulator import EmulationStopped, Kind, Run, execution, run_ptx

from .builds import Build
from .one_instruction import HEADER
from .random_programs import SHARED_BYTES, THREADS, random_program

START = """
.reg .b32 %tid, %cta, %lane, %a, %b, %c, %smem, %v<8>; .reg .b64 %out, %at; .reg .pred %p, %q;
mov.u32 %tid, %tid.x; mov.u32 %cta, %ctaid.x; mov.u32 %lane, %laneid; mov.b32 %smem, smem;
ld.param.b64 %out, [p0]; mov.u32 %v0, %ntid.x; mad.lo.s32 %v0, %cta, %v0, %tid; mad.wide.s32 %at, %v0, 4, %out;
"""
STORE = "st.global.b32 [%at], %a;\nret;"


def run(
    body: str, *, ctas: int = 1, threads: int = 64, lanes: int = 2048, budget: int = 100_000
) -> tuple[Run, list[int]]:
    """Run START and a body that leaves a result in %a; returns it for each thread of the grid."""
    out = torch.full((max(1, ctas) * threads,), -1, dtype=torch.int32)
    text = (
        f"{HEADER}.extern .shared .align 16 .b8 smem[];\n.visible .entry kernel(\n.param .u64 p0\n)\n"
        f".reqntid {threads}\n{{{START}{body}\n{STORE}\n}}\n"
    )
    with patch.object(execution, "LANES", lanes):
        made = run_ptx(text, (ctas,), [out], shared_bytes=1024, budget=budget)
    return made, out.tolist()


VOTE = "vote.sync.ballot.b32 %b, %q, -1;"
"""A ballot of a whole warp is reported unless its lanes came together."""


@pytest.mark.parametrize(
    "branches",
    [
        "@%p bra A;\nadd.s32 %a, %a, 10;\nbra JOIN;\nA: add.s32 %a, %a, 20;\nJOIN:",
        "@!%p bra A;\nadd.s32 %a, %a, 20;\nbra.uni JOIN;\nA: add.s32 %a, %a, 10;\nJOIN:",
        # An arm behind the point where both meet.
        "@%p bra A;\nadd.s32 %a, %a, 10;\nbra JOIN;\nFAR: add.s32 %a, %a, 15;\nbra JOIN;\n"
        "A: add.s32 %a, %a, 5;\nbra FAR;\nJOIN:",
        # One arm inside the other's.
        "@!%p bra A;\nadd.s32 %a, %a, 10;\nA: add.s32 %a, %a, 10;\nJOIN:",
    ],
)
def test_diverged_branches_meet_again(branches: str) -> None:
    """Each lane takes its own arm, and behind them the warp votes as a whole."""
    made, results = run(f"mov.b32 %a, %tid; setp.lt.u32 %p, %lane, 11; setp.ge.u32 %q, %lane, 4;\n{branches}\n{VOTE}")
    assert not made.findings
    assert results == [tid + (20 if tid % 32 < 11 else 10) for tid in range(64)]


def test_lanes_leave_a_loop_at_their_own_time() -> None:
    """Lanes that loop as often as their number meet behind the loop, each with its own count."""
    body = (
        "mov.b32 %a, 0; mov.b32 %c, %lane; setp.eq.u32 %q, %lane, 3;\n"
        f"LOOP: add.s32 %a, %a, 3; sub.s32 %c, %c, 1; setp.ge.s32 %p, %c, 0;\n@%p bra LOOP;\n{VOTE}"
    )
    made, results = run(body)
    assert not made.findings
    assert results == [3 * (tid % 32 + 1) for tid in range(64)]


def test_loops_nest_with_lanes_apart() -> None:
    """Inner loops of lane-dependent length inside outer ones: every lane counts its own product."""
    body = (
        "mov.b32 %a, 0; and.b32 %v1, %tid, 3; and.b32 %v2, %tid, 7; mov.b32 %c, 0;\n"
        "OUTER: setp.gt.u32 %p, %c, %v1;\n@%p bra DONE;\nmov.b32 %b, 0;\n"
        "INNER: add.s32 %a, %a, 1; add.s32 %b, %b, 1; setp.le.u32 %p, %b, %v2;\n@%p bra INNER;\n"
        f"add.s32 %c, %c, 1;\nbra OUTER;\nDONE: setp.eq.u32 %q, %lane, 0;\n{VOTE}"
    )
    made, results = run(body)
    assert not made.findings
    assert results == [(tid % 4 + 1) * (tid % 8 + 1) for tid in range(64)]


EXCHANGE = (
    "add.s32 %v1, %v3, 32; and.b32 %v1, %v1, 63; shl.b32 %v1, %v1, 2; add.s32 %v1, %v1, %smem;\n"
    "shl.b32 %v2, %v3, 2; add.s32 %v2, %v2, %smem;\n"
)
"""%v2 is the thread's own word of shared memory, %v1 that of a thread of the other warp."""


@pytest.mark.parametrize("lanes", [64, 128, 192, 2048])
def test_ctas_of_a_batch_loop_as_often_as_they_like(lanes: int) -> None:
    """CTAs that exchange values under barriers in loops of different lengths disturb each other in no batch."""
    body = (
        f"mov.b32 %v3, %tid; {EXCHANGE} mov.b32 %a, %tid; rem.u32 %c, %cta, 4;\n"
        "LOOP: st.shared.b32 [%v2], %a;\nbar.sync 0;\nld.shared.b32 %b, [%v1]; add.s32 %a, %b, 1;\nbar.sync 0;\n"
        "sub.s32 %c, %c, 1; setp.ge.s32 %p, %c, 0;\n@%p bra LOOP;"
    )
    made, results = run(body, ctas=7, lanes=lanes)
    assert not made.findings
    for cta in range(7):
        turns = cta % 4 + 1
        expected = [(tid + 32 * turns) % 64 + turns for tid in range(64)]
        assert results[64 * cta : 64 * cta + 64] == expected


def test_barriers_meet_from_different_branches() -> None:
    """Warps that wait at two instructions wait at one barrier, and what was written before is seen after."""
    body = (
        f"mov.b32 %v3, %tid; {EXCHANGE} st.shared.b32 [%v2], %tid; setp.lt.u32 %p, %tid, 32;\n"
        "@%p bra A;\nbar.sync 0;\nbra JOIN;\nA: bar.sync 0;\nJOIN: ld.shared.b32 %a, [%v1];"
    )
    made, results = run(body)
    assert not made.findings
    assert results == [(tid + 32) % 64 for tid in range(64)]


def test_named_barrier_with_a_count_orders_its_warps_only_once_enough_came() -> None:
    """Two of three warps meet at barrier 1 while the third goes on; the count of arrivals frees the waiting."""
    body = (
        f"and.b32 %v3, %tid, 63; {EXCHANGE} mov.b32 %a, -5; setp.ge.u32 %p, %tid, 64;\n@%p bra OUT;\n"
        "st.shared.b32 [%v2], %tid;\nbar.sync 1, 64;\nld.shared.b32 %a, [%v1];\nOUT:"
    )
    made, results = run(body, threads=96, ctas=3)
    assert not made.findings
    for cta in range(3):
        assert results[96 * cta : 96 * cta + 96] == [(tid + 32) % 64 for tid in range(64)] + [-5] * 32


def test_arriving_frees_those_who_wait() -> None:
    """``bar.arrive`` counts and goes on; without it those who wait are stuck, which is reported and ends."""
    body = (
        "setp.ge.u32 %p, %tid, 32; mov.b32 %a, 1;\n@%p bra W;\n{}\nbra OUT;\nW: bar.sync 2, 64;\nmov.b32 %a, 2;\nOUT:"
    )
    made, results = run(body.format("bar.arrive 2, 64;"))
    assert not made.findings
    assert results == [1] * 32 + [2] * 32
    stuck, results = run(body.format(""))
    assert [finding.kind for finding in stuck.findings] == [Kind.BARRIER]
    assert "CTA 0 thread 32 waits for ever" in stuck.findings[0].detail
    assert results == [1] * 32 + [2] * 32


def test_one_stuck_cta_is_named_and_the_others_finish() -> None:
    """Of the CTAs of a batch the one with a thread missing is reported, by its number in the grid."""
    body = "mov.b32 %a, 7; setp.eq.u32 %p, %cta, 3; setp.lt.u32 %q, %tid, 5; and.pred %p, %p, %q;\n"
    body += "@%p bra OUT;\nbar.sync 0;\nOUT:"
    made, results = run(body, ctas=5)
    assert results == [7] * 320
    assert [finding.kind for finding in made.findings] == [Kind.BARRIER]
    assert "CTA 3 thread 0 ended" in made.findings[0].detail
    assert made.findings[0].count == 5


@pytest.mark.parametrize("ctas", [0, 1, 2, 3, 31, 32, 33, 64, 67, 97])
@pytest.mark.parametrize("lanes", [1, 64, 256, 2048])
def test_every_cta_of_a_grid_runs_once(ctas: int, lanes: int) -> None:
    """No CTA, one, fewer than a batch, more than one, and grids that batches do not divide."""
    made, results = run("mad.lo.s32 %a, %cta, 1000, %tid;", ctas=ctas, lanes=lanes)
    assert not made.findings
    assert made.ctas == ctas
    assert results[: 64 * ctas] == [1000 * cta + tid for cta in range(ctas) for tid in range(64)]
    assert results[64 * ctas :] == [-1] * (64 * (not ctas))


@pytest.mark.parametrize("grid", [(5, 3, 2), (1, 7), (3, 1, 4)])
@pytest.mark.parametrize("lanes", [32, 128, 2048])
def test_three_dimensional_grids_are_numbered(grid: tuple[int, ...], lanes: int) -> None:
    """``%ctaid`` and ``%nctaid`` have the numbers of each axis, whatever the batch."""
    x, y, z = (*grid, 1, 1)[:3]
    out = torch.full((x * y * z,), -1, dtype=torch.int32)
    text = (
        f"{HEADER}.visible .entry kernel(\n.param .u64 p0\n)\n.reqntid 32\n{{\n"
        ".reg .b32 %x, %y, %z, %nx, %ny, %nz, %i, %v; .reg .b64 %out; .reg .pred %p;\n"
        "mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z;\n"
        "mov.u32 %nx, %nctaid.x; mov.u32 %ny, %nctaid.y; mov.u32 %nz, %nctaid.z;\n"
        "mad.lo.s32 %i, %z, %ny, %y; mad.lo.s32 %i, %i, %nx, %x; ld.param.b64 %out, [p0];\n"
        "mad.wide.s32 %out, %i, 4, %out; mad.lo.s32 %v, %z, 100, %y; mad.lo.s32 %v, %v, 100, %x;\n"
        "mad.lo.s32 %v, %v, 100, %nz; mov.u32 %i, %laneid; setp.eq.u32 %p, %i, 0;\n"
        "@%p st.global.b32 [%out], %v;\nret;\n}\n"
    )
    with patch.object(execution, "LANES", lanes):
        made = run_ptx(text, grid, [out])
    assert not made.findings
    assert out.tolist() == [((k * 100 + j) * 100 + i) * 100 + z for k in range(z) for j in range(y) for i in range(x)]


@pytest.mark.parametrize("seed", range(30))
def test_batches_change_no_finding(seed: int) -> None:
    """One CTA at a time or all together: the kinds and lines of the findings are the same."""
    program = random_program(random.Random(1000 + seed))
    program.iterations = (program.iterations * 5)[:5]
    program.operations = [type(op)(op.what, (op.where * 5)[:5], op.width, op.number) for op in program.operations]
    found = []
    for lanes in (THREADS, 2 * THREADS, 3 * THREADS, 2048):
        with patch.object(execution, "LANES", lanes):
            made = run_ptx(program.ptx(), (5,), program.arguments(), shared_bytes=SHARED_BYTES)
        found.append({(finding.kind, finding.line) for finding in made.findings})
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize("name", ["vllm_fp8", "split_bf16", "merge", "softmax", "gguf_q4_k"])
def test_batches_change_no_bit(name: str, build_of: Callable[[str], Build]) -> None:
    """Compiled kernels give the same bytes with one CTA a batch as with all of them."""
    build = build_of(name)
    expected = build.outcome()[1]
    with patch.object(execution, "LANES", 1):
        made, results = build.outcome()
    assert not made.findings
    assert results == expected


def test_budget_is_that_of_all_batches_together() -> None:
    """As many instructions as the budget allows end well; one less, and the run is given up; the next is as before."""
    body = "mov.b32 %a, 0;\nLOOP: add.s32 %a, %a, 1; setp.lt.u32 %p, %a, 50;\n@%p bra LOOP;"
    made, results = run(body, ctas=3, lanes=64)
    assert results == [50] * 192
    with pytest.raises(EmulationStopped, match=f"more than {made.instructions - 1} instructions"):
        run(body, ctas=3, lanes=64, budget=made.instructions - 1)
    again, results = run(body, ctas=3, lanes=64, budget=made.instructions)
    assert again.instructions == made.instructions
    assert results == [50] * 192
