"""The records of races, early reads and uninitialised reads against the oracle, on random programs."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch

from mla_conformance.suites.emulator import Kind, execution, run_ptx

from .one_instruction import HEADER
from .oracle import Found, Oracle
from .random_programs import SHARED_BYTES, THREADS, Operation, Program, random_program

PROGRAMS = 25


def emulated(program: Program, lanes: int = 2048) -> Found:
    """What the emulator finds, in batches of so many lanes: kinds and PTX lines."""
    with patch.object(execution, "LANES", lanes):
        run = run_ptx(program.ptx(), (len(program.iterations),), program.arguments(), shared_bytes=SHARED_BYTES)
    return {(finding.kind, finding.line) for finding in run.findings}


@pytest.mark.parametrize("seed", range(12))
def test_findings_are_those_of_the_definition(seed: int) -> None:
    """On random programs the same kinds are found at the same instructions: no miss, and no false alarm."""
    draw = random.Random(seed)
    for _ in range(PROGRAMS):
        program = random_program(draw)
        text = program.ptx()
        found, expected = emulated(program, draw.choice((THREADS, 2 * THREADS, 2048))), program.judged()
        assert found == expected, f"missed {expected - found}, extra {found - expected}\n{program.iterations}\n{text}"


def test_random_programs_cover_every_kind() -> None:
    """The programs above hold every kind of fault often, and some hold none."""
    seen: dict[Kind, int] = {}
    clean = 0
    for seed in range(200):
        program = random_program(random.Random(seed))
        program.ptx()
        kinds = {kind for kind, _ in program.judged()}
        clean += not kinds
        for kind in kinds:
            seen[kind] = seen.get(kind, 0) + 1
    assert set(seen) == {
        Kind.UNINITIALISED_SHARED,
        Kind.PENDING_READ,
        Kind.PENDING_WRITE,
        Kind.PENDING_AT_EXIT,
        Kind.READ_AFTER_WRITE,
        Kind.WRITE_AFTER_READ,
        Kind.WRITE_AFTER_WRITE,
        Kind.UNEQUAL_LANES,
    }
    assert min(seen.values()) >= 8
    assert clean >= 8


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("write 0, barrier, read 40", None),
        ("write 0, read 40", Kind.READ_AFTER_WRITE),
        ("write 0, read 1", Kind.READ_AFTER_WRITE),
        ("write 0, warp, read 1", None),
        ("write 0, warp, read 40", Kind.READ_AFTER_WRITE),
        ("write 0, barrier, read 0, write 1", Kind.WRITE_AFTER_READ),
        ("write 0, write 40", Kind.WRITE_AFTER_WRITE),
        ("write 0, read 0, write 0", None),
        ("read 0", Kind.UNINITIALISED_SHARED),
        ("write 0, barrier, atomic 1, atomic 40", None),
        ("write 0, barrier, atomic 1, read 40", Kind.READ_AFTER_WRITE),
        ("issue 0, read 0", Kind.PENDING_READ),
        ("issue 0, write 40", Kind.PENDING_WRITE),
        ("issue 0, land 0, read 0", None),
        ("issue 0, land 0, read 40", Kind.READ_AFTER_WRITE),
        ("issue 0, barrier, land 0, read 40", Kind.READ_AFTER_WRITE),
        ("issue 0, land 0, barrier, read 40", None),
    ],
)
def test_oracle_by_example(steps: str, expected: Kind | None) -> None:
    """What the oracle says of a few sequences whose judgement is plain."""
    oracle = Oracle()
    for step in steps.split(", "):
        what, _, thread = step.partition(" ")
        if what == "barrier":
            oracle.barrier()
        elif what == "warp":
            oracle.warp_barrier(0)
        elif what == "land":
            oracle.land([(int(thread), 0, 4)])
        else:
            getattr(oracle, what)("here", [(int(thread), 0, 4)])
    assert {kind for kind, _ in oracle.found} == ({expected} if expected else set())


def test_copies_of_which_only_some_threads_wait_stay_pending() -> None:
    """A wait by one thread lands its copy and no other thread's, in later iterations too."""
    copy = [[-1] * THREADS]
    copy[0][5], copy[0][40] = 0, 16
    waiting = [[-1] * THREADS]
    waiting[0][40] = 0
    program = Program([Operation("copy", copy, 16), Operation("wait_all", waiting)], [2])
    program.ptx()
    line = program.lines[0]
    assert emulated(program) == {(Kind.PENDING_WRITE, line), (Kind.PENDING_AT_EXIT, line)} == program.judged()


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "b32"])
def test_lanes_that_store_the_same_nan_agree(kind: str) -> None:
    """Equal bits are equal values, whatever the type of the store says of them."""
    bits = {"f32": 32, "b32": 32, "f64": 64, "f16": 16}[kind]
    run = run_ptx(_store(kind, bits, "mov.b64 %rd, -1;"), (1,), [], shared_bytes=16)
    assert not run.findings


def test_lanes_that_store_zeros_of_either_sign_disagree() -> None:
    """Zeros that differ in their sign are different values to whoever reads them as bits."""
    negative = "mov.u32 %r, %tid.x; shl.b32 %r, %r, 31; cvt.u64.u32 %rd, %r;"
    run = run_ptx(_store("f32", 32, negative), (1,), [], shared_bytes=16)
    assert [finding.kind for finding in run.findings] == [Kind.UNEQUAL_LANES]


@pytest.mark.parametrize("differ", [False, True])
def test_lanes_that_copy_different_bytes_to_one_place_disagree(differ: bool) -> None:
    """Which of the copies lands last is not determined; copies of the same bytes are harmless."""
    source = torch.arange(128, dtype=torch.int32) if differ else torch.zeros(128, dtype=torch.int32)
    ptx = (
        f"{HEADER}.extern .shared .align 16 .b8 smem[];\n.visible .entry copy(\n.param .u64 p0\n)\n.reqntid 32\n{{\n"
        ".reg .b64 %rd<3>; .reg .b32 %r;\nld.param.u64 %rd0, [p0];\n"
        "mov.u32 %r, %tid.x; mad.wide.u32 %rd1, %r, 16, %rd0;\n"
        "cp.async.cg.shared.global [smem], [%rd1], 16;\ncp.async.wait_all;\nret;\n}\n"
    )
    run = run_ptx(ptx, (1,), [source], shared_bytes=16)
    unequal = [finding for finding in run.findings if finding.kind is Kind.UNEQUAL_LANES]
    assert [finding.text.split(".")[0] for finding in unequal] == (["cp"] if differ else [])


def _store(kind: str, bits: int, value: str) -> str:
    """Every lane of a warp stores the low bits of %rd to one address."""
    return (
        f"{HEADER}.extern .shared .align 16 .b8 smem[];\n.visible .entry store(\n)\n.reqntid 32\n{{\n"
        f".reg .b64 %rd; .reg .b32 %r; .reg .b{bits} %v;\n{value}\ncvt.u{bits}.u64 %v, %rd;\n"
        f"st.shared.{kind} [smem], %v;\nret;\n}}\n"
    )
