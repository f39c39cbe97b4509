"""mbarrier objects, bulk copies and tensor maps against PTX ISA 9.1, sections 9.7.13.15 and 9.7.9.25 to 9.7.9.28.

Tiles are computed element by element from the coordinates; the swizzles as the manual draws them: piece c of line r of
a 128-byte pattern is at piece c xor r mod 8, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from mla_conformance.suites.emulator import Kind, Run, UnsupportedInstruction, run_ptx
from mla_conformance.suites.emulator.tensormaps import HostTensorMap

THREADS = 64
SHARED = 8192
BARRIER = 8128
REGISTERS = ".reg .pred %p<8>;\n.reg .b16 %h<8>;\n.reg .b32 %r<40>;\n.reg .b64 %rd<20>;"
PUBLISHED = "global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
MAP = ".param .align 64 .b8 p{}[128]"
POINTER = ".param .u64 p{}"
PROLOGUE = """
mov.u32 %r0, %tid.x;
mov.b32 %r1, shm;
add.s32 %r2, %r1, 8128;
setp.eq.s32 %p0, %r0, 0;
setp.lt.s32 %p1, %r0, 32;
"""
INIT = "@%p0 mbarrier.init.shared::cta.b64 [%r2], {};\nfence.mbarrier_init.release.cluster;\nbar.sync 0;"
WAIT = (
    "{{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%r2], {};\n@!done bra.uni again;\n}}"
)
EXPECT = "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {};"
LOAD = "@%p0 cp.async.bulk.tensor.{}d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {{{}}}], [%r2];"
STORE = "@%p0 cp.async.bulk.tensor.{}d.global.shared::cta{}.bulk_group [%rd1, {{{}}}], [%r1];"
COMMIT = "@%p0 cp.async.bulk.commit_group;\n@%p0 cp.async.bulk.wait_group{} 0;"
TAKE_MAP = "mov.b64 %rd0, p0;\ncvta.param.u64 %rd1, %rd0;\nld.param.u64 %rd2, [p1];"
# Every thread copies 16 bytes a round between shared memory and the tensor of parameter 1.
EACH = """
shl.b32 %r10, %r0, 4;
cvt.u64.u32 %rd3, %r10;
add.s64 %rd4, %rd2, %rd3;
add.s32 %r11, %r1, %r10;
"""
GET = (
    "ld.shared.v4.b32 {{%r12, %r13, %r14, %r15}}, [%r11+{0}];\nst.global.v4.b32 [%rd4+{0}], {{%r12, %r13, %r14, %r15}};"
)
PUT = (
    "ld.global.v4.b32 {{%r12, %r13, %r14, %r15}}, [%rd4+{0}];\nst.shared.v4.b32 [%r11+{0}], {{%r12, %r13, %r14, %r15}};"
)


def launch(body: Sequence[str], parameters: Sequence[str], arguments: Sequence[object], *, check: bool = True) -> Run:
    listed = ",\n".join(text.format(index) for index, text in enumerate(parameters))
    ptx = (
        ".version 9.1\n.target sm_120a\n.address_size 64\n.extern .shared .align 128 .b8 shm[];\n"
        f".visible .entry k(\n{listed}\n)\n.reqntid {THREADS}\n{{\n{REGISTERS}\n{PROLOGUE}\n"
        + "\n".join(body)
        + "\nret;\n}\n"
    )
    return run_ptx(ptx, (1,), arguments, shared_bytes=SHARED, check=check)


def kinds(run: Run) -> set[Kind]:
    return {finding.kind for finding in run.findings}


# ---- mbarrier


def answers(body: Sequence[str], count: int, *, check: bool = False) -> tuple[list[int], Run]:
    """Words that the body left in %r20, %r21 and so on, in thread 0."""
    out = torch.zeros(count, dtype=torch.int32)
    stores = [f"@%p0 st.global.b32 [%rd2+{4 * i}], %r{20 + i};" for i in range(count)]
    run = launch(["ld.param.u64 %rd2, [p0];", *body, *stores], [POINTER], [out], check=check)
    return out.tolist(), run


def poll(register: int, parity: int) -> str:
    return f"mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r2], {parity};\nselp.b32 %r{register}, 1, 0, %p3;"


def test_a_phase_completes_with_its_last_arrival_and_flips_the_parity() -> None:
    """Three arrivals are due: two are not enough; then parity 0 is over, and parity 1 is the phase under way."""
    arrive = "@%p0 mbarrier.arrive.shared::cta.b64 _, [%r2]{};"
    body = [
        INIT.format(3),
        poll(20, 0),
        poll(21, 1),
        arrive.format(", 2"),
        poll(22, 0),
        arrive.format(""),
        poll(23, 0),
        poll(24, 1),
    ]
    got, run = answers(body, 5)
    assert got == [0, 1, 0, 1, 0]
    assert not run.findings


def test_a_phase_waits_for_arrivals_and_bytes() -> None:
    """Bytes alone and arrivals alone do not complete a phase; bytes may come before they are announced."""
    complete = "@%p0 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], {};"
    body = [INIT.format(1), complete.format(16), poll(20, 0), EXPECT.format(48), poll(21, 0)]
    body += [complete.format(16), poll(22, 0), complete.format(16), poll(23, 0)]
    got, run = answers(body, 4, check=True)
    assert got == [0, 0, 0, 1]
    assert not run.findings


def test_a_state_token_names_the_phase_of_its_arrival() -> None:
    """``try_wait`` with the token of an arrival passes when that phase is over."""
    body = [INIT.format(2), "mov.b64 %rd5, 0;", "@%p0 mbarrier.arrive.shared::cta.b64 %rd5, [%r2];"]
    body += ["@!%p0 bra OTHER;", "mbarrier.test_wait.shared::cta.b64 %p3, [%r2], %rd5;", "selp.b32 %r20, 1, 0, %p3;"]
    body += ["mbarrier.arrive.shared::cta.b64 %rd6, [%r2];", "mbarrier.try_wait.shared::cta.b64 %p3, [%r2], %rd5;"]
    body += ["selp.b32 %r21, 1, 0, %p3;", "OTHER:"]
    assert answers(body, 2)[0] == [0, 1]


def test_warps_that_wait_for_each_other_take_turns() -> None:
    """Warp 0 hands eight numbers to warp 1 through one slot, with a phase for 'full' and one for 'empty'."""
    full, empty = "[%r2]", "[%r2+8]"
    spin = WAIT.replace("[%r2]", "{}")
    body = [
        *(f"@%p0 mbarrier.init.shared::cta.b64 {place}, 32;" for place in (full, empty)),
        "bar.sync 0;",
        "mov.b32 %r4, 0;\nmov.b32 %r20, 0;",
        "@%p1 bra PRODUCE;",
        "CONSUME:",
        "and.b32 %r5, %r4, 1;",
        spin.format(full, "%r5"),
        "ld.shared.b32 %r6, [%r1];\nmad.lo.s32 %r20, %r20, 10, %r6;",
        f"mbarrier.arrive.shared::cta.b64 _, {empty};",
        "add.s32 %r4, %r4, 1;\nsetp.lt.s32 %p4, %r4, 8;\n@%p4 bra CONSUME;",
        "setp.eq.s32 %p5, %r0, 63;\n@%p5 st.global.b32 [%rd2], %r20;\nret;",
        "PRODUCE:",
        "not.b32 %r5, %r4;\nand.b32 %r5, %r5, 1;",
        spin.format(empty, "%r5"),
        "add.s32 %r7, %r4, 1;\n@%p0 st.shared.b32 [%r1], %r7;",
        f"mbarrier.arrive.shared::cta.b64 _, {full};",
        "add.s32 %r4, %r4, 1;\nsetp.lt.s32 %p4, %r4, 8;\n@%p4 bra PRODUCE;",
    ]
    out = torch.zeros(1, dtype=torch.int32)
    run = launch(["ld.param.u64 %rd2, [p0];", *body], [POINTER], [out], check=False)
    assert out.tolist() == [12345678]
    assert not run.findings


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([WAIT.format(0)], "no mbarrier"),
        ([INIT.format(1), WAIT.format(0)], "waits for ever"),
        ([INIT.format(1), EXPECT.format(16), WAIT.format(0)], "lacks 0 arrival(s) and 16 byte(s)"),
        ([INIT.format(1), INIT.format(1)], "valid mbarrier"),
        (
            [INIT.format(1), EXPECT.format(16), "bar.sync 0;\n@%p0 mbarrier.inval.shared::cta.b64 [%r2];"],
            "still missing",
        ),
        ([INIT.format(1), "@%p0 st.shared.b32 [%r2+4], 0;"], "writes over the mbarrier"),
        ([INIT.format(0)], "not positive"),
    ],
    ids=["uninitialised", "deadlock", "bytes missing", "twice", "busy at inval", "overwritten", "count"],
)
def test_misuse_is_reported(body: list[str], words: str) -> None:
    """Each misuse of an object is a finding of its own kind that says what is wrong, and the run ends."""
    run = launch(body, [], [])
    assert words in " ".join(finding.detail for finding in run.findings if finding.kind == Kind.MBARRIER), run.findings


def test_too_many_arrivals_are_reported() -> None:
    """Two threads arrive at an object that expects one."""
    run = launch([INIT.format(1), "mbarrier.arrive.shared::cta.b64 _, [%r2];"], [], [], check=False)
    assert "more arrivals" in run.findings[0].detail


def test_an_initialisation_that_no_barrier_orders_is_a_race() -> None:
    """Other threads use the object right after thread 0 made it."""
    body = [INIT.format(1).replace("bar.sync 0;", ""), EXPECT.format(0), WAIT.format(0)]
    assert kinds(launch(body, [], [])) == {Kind.WRITE_AFTER_WRITE}


def test_arrivals_that_order_threads_are_refused_while_races_are_recorded() -> None:
    """The records follow barriers of a CTA only, so warp-specialised code needs check=False."""
    with pytest.raises(UnsupportedInstruction, match="check=False"):
        launch([INIT.format(1), "@%p0 mbarrier.arrive.shared::cta.b64 _, [%r2];"], [], [])


# ---- tiles


def numbers(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Different values in all elements, none zero; the innermost row has a multiple of 16 bytes."""
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count) % 251 + 1).to(dtype).reshape(*shape)


CODES = {
    torch.uint8: 0,
    torch.float16: 6,
    torch.bfloat16: 10,
    torch.float32: 7,
    torch.int32: 3,
    torch.float64: 9,
    torch.int64: 5,
}


def tensor_map(base: torch.Tensor, box: Sequence[int], **options: object) -> HostTensorMap:
    code = CODES[base.dtype]
    return HostTensorMap(base, tuple(base.shape), base.stride(), tuple(box), code, base.element_size(), **options)  # type: ignore[arg-type]


def expected_tile(source: torch.Tensor, start: Sequence[int], box: Sequence[int], fill: float) -> torch.Tensor:
    """The box at ``start`` (outermost first), ``fill`` where it sticks out."""
    tile = torch.full(tuple(box), fill, dtype=source.dtype)
    for index in product(*(range(size) for size in box)):
        place = [first + i for first, i in zip(start, index, strict=True)]
        if all(0 <= p < size for p, size in zip(place, source.shape, strict=True)):
            tile[index] = source[tuple(place)]
    return tile


def piece_order(count: int, swizzle: int) -> list[int]:
    """Where the manual's swizzles put each 16-byte piece of a tile that starts at shared byte 0."""
    if swizzle == 0:
        return list(range(count))
    per_row = 2**swizzle
    rows_of_same = 8 // per_row
    found = []
    for piece in range(count):
        row, column = divmod(piece, per_row)
        found.append(row * per_row + (column ^ (row // rows_of_same % per_row)))
    return found


def load_body(rank: int, start: Sequence[int], size: int) -> list[str]:
    coordinates = ", ".join(f"%r{30 + i}" for i in range(rank))
    body = [TAKE_MAP, INIT.format(1), EXPECT.format(size)]
    body += [f"mov.b32 %r{30 + i}, {value};" for i, value in enumerate(reversed(start))]
    body += [LOAD.format(rank, coordinates), WAIT.format(0), EACH]
    rounds = -(-size // (16 * THREADS))
    guard = f"setp.lt.s32 %p6, %r10, {size};\n" if rounds == 1 else ""
    for i in range(rounds):
        lines = GET.format(16 * THREADS * i).split("\n")
        body.append(guard + "\n".join(f"@%p6 {line}" if guard else line for line in lines))
    return body


def tile_bytes(box: Sequence[int], base: torch.Tensor) -> int:
    return int(torch.tensor(box).prod()) * base.element_size()


TILES = [
    ((40,), torch.float32, (16,), (8,), 0),
    ((40,), torch.float32, (16,), (32,), 0),
    ((40,), torch.uint8, (32,), (-9,), 0),
    ((12, 24), torch.float16, (8, 8), (3, 5), 0),
    ((12, 24), torch.float16, (8, 8), (-2, 20), 0),
    ((40, 16), torch.float16, (32, 16), (3, 0), 1),
    ((40, 48), torch.float16, (16, 32), (30, 24), 2),
    ((40, 80), torch.bfloat16, (16, 64), (1, 33), 3),
    ((20, 128), torch.uint8, (16, 128), (9, 7), 3),
    ((20, 18), torch.float64, (8, 16), (1, 2), 3),
    ((9, 10), torch.int64, (4, 2), (7, -1), 0),
    ((3, 12, 24), torch.float16, (2, 8, 8), (2, -3, 5), 0),
    ((2, 3, 5, 8), torch.float32, (2, 2, 4, 4), (-1, 1, 3, 2), 0),
    ((2, 3, 4, 5, 8), torch.float16, (1, 2, 2, 2, 8), (1, 2, -1, 3, 4), 0),
]


@pytest.mark.parametrize(("shape", "dtype", "box", "start", "swizzle"), TILES)
def test_a_load_brings_the_tile_in_swizzled_order_with_zeros_outside(
    shape: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...], start: tuple[int, ...], swizzle: int
) -> None:
    """Ranks 1 to 5, widths 1 to 8, tiles that stick out on every side, and each swizzle."""
    source = numbers(shape, dtype)
    size = tile_bytes(box, source)
    out = torch.zeros(size, dtype=torch.uint8)
    run = launch(load_body(len(shape), start, size), [MAP, POINTER], [tensor_map(source, box, swizzle=swizzle), out])
    assert not run.findings, run.findings
    pieces = expected_tile(source, start, box, 0).reshape(-1).view(torch.uint8).reshape(-1, 16)
    assert torch.equal(out.reshape(-1, 16)[piece_order(len(pieces), swizzle)], pieces)


def test_nan_fill_fills_with_nan() -> None:
    """Elements outside are NaN where the map asks for it."""
    source = numbers((12, 24), torch.float16)
    out = torch.zeros(128, dtype=torch.uint8)
    run = launch(load_body(2, (8, 20), 128), [MAP, POINTER], [tensor_map(source, (8, 8), nan_fill=True), out])
    assert not run.findings
    expected = expected_tile(source, (8, 20), (8, 8), float("nan"))
    torch.testing.assert_close(out.view(torch.float16).reshape(8, 8), expected, rtol=0, atol=0, equal_nan=True)


def store_body(
    rank: int, start: Sequence[int], size: int, reduction: str = "", commit: str = COMMIT.format("")
) -> list[str]:
    coordinates = ", ".join(f"%r{30 + i}" for i in range(rank))
    body = [TAKE_MAP, EACH, f"setp.lt.s32 %p6, %r10, {size};"]
    body += ["\n".join(f"@%p6 {line}" for line in PUT.format(0).split("\n"))]
    body += ["fence.proxy.async.shared::cta;", "bar.sync 0;"]
    body += [f"mov.b32 %r{30 + i}, {value};" for i, value in enumerate(reversed(start))]
    store = STORE.format(rank, reduction, coordinates)
    return [*body, store.replace("cp.async", "cp.reduce.async") if reduction else store, commit]


@pytest.mark.parametrize(
    ("shape", "dtype", "box", "start", "swizzle"),
    [tile for tile in TILES if tile_bytes(tile[2], torch.empty(0, dtype=tile[1])) <= 1024],
)
def test_a_store_writes_what_is_inside_the_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, box: tuple[int, ...], start: tuple[int, ...], swizzle: int
) -> None:
    """The reverse of a load; what sticks out is dropped."""
    target = torch.zeros(shape, dtype=dtype)
    tile = numbers(box, dtype)
    pieces = tile.reshape(-1).view(torch.uint8).reshape(-1, 16)
    moved = torch.empty_like(pieces)
    moved[piece_order(len(pieces), swizzle)] = pieces
    run = launch(
        store_body(len(shape), start, moved.numel()), [MAP, POINTER], [tensor_map(target, box, swizzle=swizzle), moved]
    )
    assert not run.findings, run.findings
    expected = torch.zeros(shape, dtype=dtype)
    for index in product(*(range(size) for size in box)):
        place = tuple(first + i for first, i in zip(start, index, strict=True))
        if all(0 <= p < size for p, size in zip(place, shape, strict=True)):
            expected[place] = tile[index]
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("operation", "dtype", "rule"),
    [
        ("add", torch.float32, torch.add),
        ("add", torch.float16, torch.add),
        ("add", torch.bfloat16, torch.add),
        ("add", torch.int32, torch.add),
        ("max", torch.int32, torch.maximum),
        ("min", torch.int32, torch.minimum),
        ("and", torch.int32, torch.bitwise_and),
        ("or", torch.int32, torch.bitwise_or),
        ("xor", torch.int32, torch.bitwise_xor),
    ],
)
def test_a_reduction_combines_the_tile_with_the_tensor(operation: str, dtype: torch.dtype, rule: object) -> None:
    """Element by element, in the type of the map."""
    generator = torch.Generator().manual_seed(7)
    draw = [torch.randint(-900, 900, (8, 8), generator=generator).to(dtype) for _ in range(2)]
    target, tile = draw[0].clone(), draw[1].reshape(-1).view(torch.uint8)
    body = store_body(2, (0, 0), tile.numel(), f".{operation}")
    run = launch(body, [MAP, POINTER], [tensor_map(target, (8, 8)), tile])
    assert not run.findings, run.findings
    assert torch.equal(target, rule(draw[0], draw[1]))  # type: ignore[operator]


def test_gather_takes_four_rows() -> None:
    """``tile::gather4``: one column and four row numbers, one of them outside."""
    source = numbers((12, 24), torch.float16)
    out = torch.zeros(4 * 16, dtype=torch.uint8)
    body = load_body(5, (1, 40, 3, 11, 8), 64)
    body = [line.replace("tensor.5d", "tensor.2d.tile::gather4") for line in body]
    run = launch(body, [MAP, POINTER], [tensor_map(source, (1, 8)), out])
    assert not run.findings, run.findings
    rows = [expected_tile(source, (row, 8), (1, 8), 0) for row in (11, 3, 40, 1)]
    assert torch.equal(out.view(torch.float16).reshape(4, 8), torch.cat(rows))


def test_a_map_made_in_shared_memory_serves_after_it_was_published() -> None:
    """``tensormap.replace`` of every field, ``cp_fenceproxy`` to global memory, then a load with that map."""
    source = numbers((12, 24), torch.float16)
    space, out = torch.zeros(128, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)
    replace = "@%p0 tensormap.replace.tile.{}.shared::cta.b1024.b32 [%rd6], {};"
    fields = [("rank", "1"), ("box_dim", "0, 8"), ("box_dim", "1, 8"), ("global_dim", "0, 24"), ("global_dim", "1, 12")]
    fields += [("element_stride", "0, 1"), ("element_stride", "1, 1"), ("elemtype", "6"), ("interleave_layout", "0")]
    fields += [("swizzle_mode", "0"), ("fill_mode", "0")]
    make = [
        "ld.param.u64 %rd1, [p0];\nld.param.u64 %rd2, [p1];\nld.param.u64 %rd7, [p2];\ncvt.u64.u32 %rd6, %r1;",
        "shl.b32 %r9, %r0, 2;\nadd.s32 %r9, %r9, %r1;\n@%p1 st.shared.b32 [%r9], 0;\nbar.warp.sync -1;",
        "@%p0 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%rd6], %rd7;",
        "@%p0 tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%rd6], 0, 48;",
        *(replace.format(*field) for field in fields),
        f"@%p1 tensormap.cp_fenceproxy.{PUBLISHED} [%rd1], [%rd6], 128;",
        "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;\nfence.proxy.async.shared::cta;\nbar.sync 0;",
    ]
    run = launch([*make, *load_body(2, (3, 5), 128)[1:]], [POINTER] * 3, [space, out, source])
    assert not run.findings, run.findings
    assert torch.equal(out.view(torch.float16).reshape(8, 8), expected_tile(source, (3, 5), (8, 8), 0))


def test_copies_without_a_map_move_bytes() -> None:
    """``cp.async.bulk`` in both directions."""
    source, target = numbers((64,), torch.int32), torch.zeros(64, dtype=torch.int32)
    body = [
        "ld.param.u64 %rd1, [p0];\nld.param.u64 %rd2, [p1];",
        INIT.format(1),
        EXPECT.format(256),
        "@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 256, [%r2];",
        WAIT.format(0),
        "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], 256;",
        COMMIT.format(".read"),
    ]
    run = launch(body, [POINTER] * 2, [source, target])
    assert not run.findings, run.findings
    assert torch.equal(source, target)


# ---- faults around copies

SOURCE_SHAPE, BOX, SIZE = (12, 24), (8, 8), 128


def loaded(body: list[str]) -> Run:
    source, out = numbers(SOURCE_SHAPE, torch.float16), torch.zeros(SIZE, dtype=torch.uint8)
    return launch(body, [MAP, POINTER], [tensor_map(source, BOX), out])


def test_an_early_read_is_reported_and_sees_poison() -> None:
    """The wait is missing: the read is a finding, the value NaN, and nobody has waited at exit."""
    source, out = numbers(SOURCE_SHAPE, torch.float16), torch.zeros(SIZE, dtype=torch.uint8)
    body = [line for line in load_body(2, (0, 0), SIZE) if "try_wait" not in line]
    run = launch(body, [MAP, POINTER], [tensor_map(source, BOX), out])
    assert kinds(run) == {Kind.PENDING_READ, Kind.PENDING_AT_EXIT}
    assert out.view(torch.float16).isnan().all()


@pytest.mark.parametrize(("bytes_", "found"), [(SIZE + 16, Kind.MBARRIER), (SIZE - 16, Kind.MBARRIER)])
def test_a_wrong_byte_count_is_reported(bytes_: int, found: Kind) -> None:
    """Too many bytes announced: nobody ever passes. Too few: the same, since the count does not return to zero."""
    body = [line.replace(f"[%r2], {SIZE};", f"[%r2], {bytes_};") for line in load_body(2, (0, 0), SIZE)]
    assert found in kinds(loaded(body))


def test_a_thread_that_did_not_wait_may_not_read() -> None:
    """Only warp 0 waits: warp 1 reads early, unless a barrier of the CTA comes between."""
    body = load_body(2, (0, 0), 16 * THREADS)
    place = next(i for i, line in enumerate(body) if "try_wait" in line)
    only_first = [*body[:place], "@!%p1 bra SKIP;", body[place], "SKIP:", *body[place + 1 :]]
    ordered = [*body[:place], "@!%p1 bra SKIP;", body[place], "SKIP:", "bar.sync 0;", *body[place + 1 :]]
    source = numbers((64, 24), torch.float16)
    out = torch.zeros(16 * THREADS, dtype=torch.uint8)
    arguments = [tensor_map(source, (64, 8)), out]
    assert kinds(launch(only_first, [MAP, POINTER], arguments)) == {Kind.PENDING_READ}
    assert not launch(ordered, [MAP, POINTER], arguments).findings


def test_a_second_load_over_bytes_that_are_still_read_is_a_race() -> None:
    """Other threads read the tile with no barrier before the next copy into it is issued."""
    body = load_body(2, (0, 0), 16 * THREADS)
    again = [EXPECT.format(16 * THREADS), LOAD.format(2, "%r30, %r31"), WAIT.format(1)]
    source, out = numbers((64, 24), torch.float16), torch.zeros(16 * THREADS, dtype=torch.uint8)
    arguments = [tensor_map(source, (64, 8)), out]
    assert kinds(launch([*body, *again], [MAP, POINTER], arguments)) == {Kind.WRITE_AFTER_READ}
    assert not launch([*body, "bar.sync 0;", *again], [MAP, POINTER], arguments).findings


@pytest.mark.parametrize(
    ("commit", "found"),
    [
        (COMMIT.format(".read"), set()),
        ("@%p0 cp.async.bulk.commit_group;", {Kind.PENDING_WRITE, Kind.PENDING_AT_EXIT}),
        (
            "@%p0 cp.async.bulk.commit_group;\n@%p0 cp.async.bulk.wait_group.read 1;",
            {Kind.PENDING_WRITE, Kind.PENDING_AT_EXIT},
        ),
        ("@%p0 cp.async.bulk.wait_group.read 0;", {Kind.PENDING_WRITE, Kind.PENDING_AT_EXIT}),
    ],
    ids=["waited", "not waited", "one group too few", "not committed"],
)
def test_the_source_of_a_store_may_be_written_only_after_its_wait(commit: str, found: set[Kind]) -> None:
    """A later write over the source is reported unless the store's own thread waited and a barrier followed."""
    target, tile = torch.zeros(SOURCE_SHAPE, dtype=torch.float16), numbers((SIZE,), torch.uint8)
    body = [*store_body(2, (0, 0), SIZE, commit=commit), "bar.sync 0;", "@%p6 st.shared.b32 [%r11], %r0;"]
    assert kinds(launch(body, [MAP, POINTER], [tensor_map(target, BOX), tile])) == found


@pytest.mark.parametrize(
    ("fence", "found"),
    [
        ("fence.proxy.async.shared::cta;\nbar.sync 0;", set()),
        ("bar.sync 0;\n@%p0 fence.proxy.async;", set()),
        ("bar.sync 0;", {Kind.READ_AFTER_WRITE}),
        ("@%p0 fence.proxy.async.shared::cta;\nbar.sync 0;", {Kind.READ_AFTER_WRITE}),
        ("fence.proxy.async.global;\nbar.sync 0;", {Kind.READ_AFTER_WRITE}),
    ],
    ids=["by the writers", "after a barrier", "none", "by one too early", "of global memory"],
)
def test_a_store_needs_a_proxy_fence_after_the_writes_that_it_reads(fence: str, found: set[Kind]) -> None:
    """The copy unit sees a thread's write only after a fence of the writer, or one that a barrier orders after it."""
    target, tile = torch.zeros(SOURCE_SHAPE, dtype=torch.float16), numbers((SIZE,), torch.uint8)
    body = "\n".join(store_body(2, (0, 0), SIZE))
    changed = body.replace("fence.proxy.async.shared::cta;\nbar.sync 0;", fence)
    assert kinds(launch([changed], [MAP, POINTER], [tensor_map(target, BOX), tile])) == found


def test_a_load_needs_a_proxy_fence_after_the_writes_that_it_replaces() -> None:
    """A thread's write and the copy unit's are not ordered by a barrier alone."""
    body = load_body(2, (0, 0), SIZE)
    written = [body[0], "@%p0 st.shared.b32 [%r1], %r0;", *body[1:]]
    assert kinds(loaded(written)) == {Kind.WRITE_AFTER_WRITE}
    fenced = [*written[:2], "@%p0 fence.proxy.async.shared::cta;", *written[2:]]
    assert not loaded(fenced).findings


def test_a_write_after_the_wait_of_another_thread_needs_a_barrier() -> None:
    """The wait of thread 0 tells nothing to warp 1."""
    target, tile = torch.zeros((64, 24), dtype=torch.float16), numbers((16 * THREADS,), torch.uint8)
    body = [*store_body(2, (0, 0), 16 * THREADS), "@!%p1 st.shared.b32 [%r11], %r0;"]
    assert kinds(launch(body, [MAP, POINTER], [tensor_map(target, (64, 8)), tile])) == {Kind.WRITE_AFTER_READ}


def test_places_and_maps_that_the_hardware_refuses_are_reported() -> None:
    """A misaligned or outlying place in shared memory, a stride of odd bytes, a map over too short a storage."""
    body = load_body(2, (0, 0), SIZE)
    for offset, kind in ((16, Kind.MISALIGNED), (SHARED, Kind.SHARED_BOUNDS)):
        moved = [line.replace("[%r1], [%rd1", f"[%r1+{offset}], [%rd1") for line in body]
        assert kind in kinds(loaded(moved))
    crooked = numbers((12, 23), torch.float16)
    out = torch.zeros(SIZE, dtype=torch.uint8)
    assert Kind.MISALIGNED in kinds(launch(body, [MAP, POINTER], [tensor_map(crooked, BOX), out]))
    short = HostTensorMap(numbers((4, 24), torch.float16), (12, 24), (24, 1), BOX, 6, 2)
    assert kinds(launch(body, [MAP, POINTER], [short, out])) == {Kind.GLOBAL_BOUNDS}


def test_maps_that_convert_are_refused() -> None:
    """Rounding to tf32 while copying is not modelled, and says so."""
    source, out = torch.zeros(12, 8), torch.zeros(128, dtype=torch.uint8)
    with pytest.raises(UnsupportedInstruction, match="converts"):
        launch(load_body(2, (0, 0), 128), [MAP, POINTER], [HostTensorMap(source, (12, 8), (8, 1), (4, 8), 11, 4), out])
