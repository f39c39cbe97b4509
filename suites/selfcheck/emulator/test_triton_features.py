"""What Triton emits for sm_120 beyond the decode kernels, run on CPU tensors and compared with torch in float64.

Tensor descriptors from host and device, scaled dots, small floats, atomics, library functions, assertions and prints.
Every kernel is compiled once; planted faults change its PTX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mla_conformance.suites.emulator import Emulation, Kind, UnsupportedInstruction, emulate, run_ptx
from mla_conformance.suites.emulator.descriptors import kernel_arguments

F64 = torch.float64
HALF_STEP = 2.0**-11
"""Of float16, relative: one rounding."""


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def clean(launch: Callable[[], Any], **options: Any) -> Emulation:
    """Run on sm_120; nothing may be found."""
    with emulate("sm_120", **options) as run:
        launch()
    assert not run.findings, run.report()
    return run


# ---- tensor descriptors

M, N, K = 100, 96, 80


@triton.jit
def host_matmul(
    a,
    b,
    c,
    k_size,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SPECIAL: tl.constexpr = False,
):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, k_size, BK, num_stages=STAGES, warp_specialize=SPECIAL):
        total = tl.dot(a.load([row, k]), b.load([k, column]), total)
    c.store([row, column], total.to(tl.float16))


@triton.jit
def device_matmul(
    a_ptr, b_ptr, c_ptr, m, n, k_size, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr
):  # type: ignore[no-untyped-def]
    a = tl.make_tensor_descriptor(a_ptr, [m, k_size], [k_size, 1], [BM, BK])
    b = tl.make_tensor_descriptor(b_ptr, [k_size, n], [n, 1], [BK, BN])
    c = tl.make_tensor_descriptor(c_ptr, [m, n], [n, 1], [BM, BN])
    tiles = tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(m, BM) * tiles, tl.num_programs(0)):
        row, column = tile // tiles * BM, tile % tiles * BN
        total = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, k_size, BK, num_stages=STAGES):
            total = tl.dot(a.load([row, k]), b.load([k, column]), total)
        c.store([row, column], total.to(tl.float16))


def matmul_problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        drawn(M, K, dtype=torch.float16),
        drawn(K, N, dtype=torch.float16, seed=1),
        torch.zeros(M, N, dtype=torch.float16),
    )


def assert_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """Half a step of float16, and float32's error of the sum before."""
    exact, size = a.to(F64) @ b.to(F64), a.to(F64).abs() @ b.to(F64).abs()
    assert ((c.to(F64) - exact).abs() <= HALF_STEP * exact.abs() + K * 2.0**-24 * size + 2.0**-25).all()


def launch_host(problem: tuple[torch.Tensor, ...], stages: int) -> None:
    a, b, c = (
        TensorDescriptor.from_tensor(x, box) for x, box in zip(problem, ([64, 32], [32, 64], [64, 64]), strict=True)
    )
    host_matmul[(2, 2)](a, b, c, K, 64, 64, 32, stages)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_matmul_with_host_descriptors_is_right(stages: int) -> None:
    """Tiles that stick out of every matrix, 64- and 128-byte swizzles, one to four stages."""
    problem = matmul_problem()
    run = clean(lambda: launch_host(problem, stages))
    assert "cp.async.bulk.tensor.2d" in run.launches[0].kernel.asm["ptx"]
    assert_product(*problem)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_matmul_with_device_descriptors_is_right(stages: int) -> None:
    """A persistent kernel whose descriptors are made in global scratch memory."""
    problem = matmul_problem()
    run = clean(lambda: device_matmul[(3,)](*problem, M, N, K, 64, 64, 32, stages))
    assert "tensormap.replace" in run.launches[0].kernel.asm["ptx"]
    assert_product(*problem)


def test_warp_specialised_code_runs_without_race_records() -> None:
    """Producer and consumer warps wait for each other's phases; with race records it is refused."""
    problem = (
        drawn(64, 128, dtype=torch.float16),
        drawn(128, 64, dtype=torch.float16, seed=1),
        torch.zeros(64, 64, dtype=torch.float16),
    )

    def launch() -> None:
        a, b, c = (
            TensorDescriptor.from_tensor(x, box) for x, box in zip(problem, ([64, 64], [64, 64], [64, 64]), strict=True)
        )
        host_matmul[(1, 1)](a, b, c, 128, 64, 64, 64, 2, True)

    run = clean(launch, check=False)
    assert "setmaxnreg" in run.launches[0].kernel.asm["ptx"]
    assert_product(*problem)
    with pytest.raises(UnsupportedInstruction, match="check=False"):
        clean(launch)


@triton.jit
def copy_block(source, target, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OPERATION: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    value = source.load([0, row, column])
    if OPERATION == 0:
        target.store([0, row, column], value)
    elif OPERATION == 1:
        target.atomic_add([0, row, column], value)
    else:
        target.atomic_max([0, row, column], value)


@pytest.mark.parametrize(
    ("dtype", "operation", "columns", "rule"),
    [
        (torch.float16, 0, 16, lambda old, new: new),
        (torch.uint8, 0, 128, lambda old, new: new),
        (torch.float32, 1, 32, torch.add),
        (torch.int32, 2, 4, torch.maximum),
    ],
)
def test_blocks_of_rank_three_are_copied_and_combined(
    dtype: torch.dtype, operation: int, columns: int, rule: Any
) -> None:
    """Loads, stores and reductions through descriptors; tensors that no box divides."""
    shape = (3, 20, 144)
    source, target = integers(1, 100, *shape).to(dtype), integers(1, 100, *shape, seed=1).to(dtype)
    before = target.clone()

    def launch() -> None:
        blocks = [TensorDescriptor.from_tensor(x, [4, 8, columns]) for x in (source, target)]
        copy_block[(3, -(-144 // columns))](*blocks, 8, columns, operation)

    clean(launch)
    assert torch.equal(target, rule(before, source))


@triton.jit
def gather_rows(table, index, out, COUNT: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.load(index + tl.arange(0, COUNT))
    block = table.gather(rows, 8)
    tl.store(out + tl.arange(0, COUNT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], block)


def test_a_descriptor_gathers_rows() -> None:
    """tile::gather4, with row numbers outside the table."""
    table, out = drawn(50, 40), torch.zeros(16, 32)
    index = integers(0, 50, 16)
    index[3], index[7] = 50, -1
    clean(lambda: gather_rows[(1,)](TensorDescriptor.from_tensor(table, [1, 32]), index, out, 16, 32))
    expected = table[index.clamp(0, 49).long(), 8:40] * ((index >= 0) & (index < 50))[:, None]
    assert torch.equal(out, expected)


# ---- planted faults

WAIT = "mbarrier.try_wait.parity"


def mutated(change: Callable[[str], str]) -> set[Kind]:
    """Findings of the two-stage matmul with changed PTX."""
    problem = matmul_problem()
    with emulate("sm_120") as run:
        launch_host(problem, 2)
    kernel = run.launches[0].kernel
    blocks = [
        TensorDescriptor.from_tensor(x, box) for x, box in zip(problem, ([64, 32], [32, 64], [64, 64]), strict=True)
    ]
    arguments = kernel_arguments(kernel, {"a": blocks[0], "b": blocks[1], "c": blocks[2], "k_size": K})
    ptx = kernel.asm["ptx"]
    changed = change(ptx)
    assert changed != ptx
    ran = run_ptx(changed, (2, 2), [*arguments, 0, 0], shared_bytes=kernel.metadata.shared)
    return {finding.kind for finding in ran.findings}


def without(words: str, number: int = 0) -> Callable[[str], str]:
    """Comment out one instruction that contains ``words``."""

    def change(ptx: str) -> str:
        lines = ptx.split("\n")
        found = [i for i, line in enumerate(lines) if words in line and not line.strip().startswith("//")]
        lines[found[number]] = f"// {lines[found[number]]}"
        if words == WAIT:
            # The branch of the loop that waits goes with it.
            lines[found[number] + 1] = f"// {lines[found[number] + 1]}"
        return "\n".join(lines)

    return change


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (without(WAIT), Kind.PENDING_READ),
        (lambda ptx: ptx.replace("], 8192;", "], 8208;"), Kind.MBARRIER),
        (lambda ptx: ptx.replace("], 8192;", "], 4096;"), Kind.PENDING_READ),
        (without("mbarrier.init"), Kind.MBARRIER),
        (without("expect_tx", 1), Kind.MBARRIER),
        (without("cp.async.bulk.tensor.2d.shared", 3), Kind.MBARRIER),
        (without("cp.async.bulk.wait_group"), Kind.PENDING_AT_EXIT),
        (lambda ptx: ptx.replace("bar.sync \t0;", ""), Kind.WRITE_AFTER_READ),
        (lambda ptx: ptx.replace("fence.proxy.async", "// "), Kind.READ_AFTER_WRITE),
    ],
    ids=[
        "no wait",
        "too many bytes",
        "too few bytes",
        "no init",
        "no expect",
        "no copy",
        "no group wait",
        "no barriers",
        "no fence",
    ],
)
def test_planted_faults_are_found(change: Callable[[str], str], kind: Kind) -> None:
    """One instruction deleted or one number changed in a kernel that is otherwise clean."""
    assert kind in mutated(change)


# ---- matrix products


@triton.jit
def scaled_dot(
    a,
    b,
    a_scale,
    b_scale,
    out,
    FORMAT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    PACK_A: tl.constexpr,
    PACK_B: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    DEPTH: tl.constexpr,
):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    left = tl.load(a + i[:, None] * (DEPTH // PACK_A) + tl.arange(0, DEPTH // PACK_A)[None, :])
    right = tl.load(b + i[None, :] * (DEPTH // PACK_B) + tl.arange(0, DEPTH // PACK_B)[:, None])
    blocks = tl.arange(0, DEPTH // BLOCK)
    scale = tl.load(a_scale + i[:, None] * (DEPTH // BLOCK) + blocks[None, :])
    other = tl.load(b_scale + i[:, None] * (DEPTH // BLOCK) + blocks[None, :])
    total = tl.dot_scaled(left, scale, FORMAT_A, right, other, FORMAT_B)
    tl.store(out + i[:, None] * SIZE + i[None, :], total)


SMALL = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FOUR_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=F64)


def operand(kind: str, rows: int, depth: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Storage and values; of 4-bit numbers the low nibble comes first."""
    if kind != "e2m1":
        stored = drawn(rows, depth, seed=seed).to(SMALL[kind])
        return stored, stored.to(F64)
    packed = integers(0, 256, rows, depth // 2, dtype=torch.uint8, seed=seed)
    return packed, FOUR_BITS[torch.stack([packed & 15, packed >> 4], -1).long()].reshape(rows, depth)


@pytest.mark.parametrize(
    ("left", "right", "block", "opcode"),
    [
        ("e2m1", "e2m1", 32, "kind::mxf4nvf4.block_scale.scale_vec::2X"),
        ("e2m1", "e2m1", 16, "scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"),
        ("e4m3", "e5m2", 32, "kind::mxf8f6f4.block_scale.scale_vec::1X"),
    ],
)
def test_scaled_dots_use_the_scale_of_each_block(left: str, right: str, block: int, opcode: str) -> None:
    """mxfp4, nvfp4 and mixed mxfp8, every block with a scale of its own."""
    size, depth = 32, 128
    a, a_values = operand(left, size, depth, 1)
    b, b_values = operand(right, size, depth, 2)
    scales = [integers(120, 135, size, depth // block, dtype=torch.uint8, seed=seed) for seed in (3, 4)]
    factors = [2.0 ** (scale.to(F64) - 127) for scale in scales]
    if block == 16:
        scales = [drawn(size, depth // block, seed=seed).abs().to(torch.float8_e4m3fn) for seed in (3, 4)]
        factors = [scale.to(F64) for scale in scales]
    out = torch.zeros(size, size)
    packs = (2 if left == "e2m1" else 1, 2 if right == "e2m1" else 1)
    run = clean(lambda: scaled_dot[(1,)](a, b, *scales, out, left, right, *packs, block, size, depth))
    assert opcode in run.launches[0].kernel.asm["ptx"]
    a_values, b_values = (
        v * f.repeat_interleave(block, 1) for v, f in ((a_values, factors[0]), (b_values, factors[1]))
    )
    exact, magnitude = a_values @ b_values.T, a_values.abs() @ b_values.abs().T
    assert ((out.to(F64) - exact).abs() <= depth * 2.0**-24 * magnitude).all()


@triton.jit
def plain_dot(a, b, out, SIZE: tl.constexpr, OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), out_dtype=OUT))


@pytest.mark.parametrize(
    ("dtype", "out", "sums"),
    [
        (torch.float8_e4m3fn, torch.float32, tl.float32),
        (torch.float8_e5m2, torch.float32, tl.float32),
        (torch.float16, torch.float16, tl.float16),
        (torch.int8, torch.int32, tl.int32),
    ],
)
def test_dots_of_other_types_are_right(dtype: torch.dtype, out: torch.dtype, sums: Any) -> None:
    """8-bit floats, float16 accumulators and 8-bit integers, with values whose sums are exact."""
    a, b = integers(-2, 3, 32, 32).to(dtype), integers(-2, 3, 32, 32, seed=1).to(dtype)
    got = torch.zeros(32, 32, dtype=out)
    clean(lambda: plain_dot[(1,)](a, b, got, 32, sums))
    assert torch.equal(got.to(F64), a.to(F64) @ b.to(F64))


# ---- atomics and what goes through shared memory


@triton.jit
def atomics(x, total, greatest, slots, swapped, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    value = tl.load(x + i)
    tl.atomic_add(total + i % COUNT, value)
    tl.atomic_max(greatest + i % 4, value)
    tl.atomic_xchg(slots + i, value)
    tl.store(swapped + i, tl.atomic_cas(slots + i, value, value + value))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_atomics_on_global_memory_count_every_lane(dtype: torch.dtype) -> None:
    """Sums (a vector where Triton makes one), max on crowded addresses, exchange and compare-and-swap."""
    x = integers(1, 50, 512).to(dtype)
    total, greatest, slots, swapped = (torch.zeros(size, dtype=dtype) for size in (256, 4, 512, 512))
    clean(lambda: atomics[(2,)](x, total, greatest, slots, swapped, 256))
    assert torch.equal(total, x[:256] + x[256:])
    assert torch.equal(greatest, x.reshape(-1, 4).max(0).values)
    assert torch.equal(swapped, x)
    assert torch.equal(slots, 2 * x)


@triton.jit
def half_atomics(x, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, COUNT)
    tl.atomic_add(out + i, tl.load(x + i))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_vector_atomics_of_half_precision_round_each_sum(dtype: torch.dtype) -> None:
    """atom.global.add.noftz.v4: one rounding to the type."""
    x, out = drawn(512, dtype=dtype), drawn(512, dtype=dtype, seed=1)
    expected = (out.to(F64) + x.to(F64)).to(dtype)
    run = clean(lambda: half_atomics[(1,)](x, out, 512))
    assert ".v4." in run.launches[0].kernel.asm["ptx"]
    assert torch.equal(out, expected)


@triton.jit
def orders(x, ranks, sorted_, sums, counts, picked, COUNT: tl.constexpr, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, COUNT)
    value, rank = tl.load(x + i), tl.load(ranks + i)
    tl.store(sorted_ + i, tl.sort(value))
    tl.store(sums + i, tl.cumsum(value, 0))
    tl.store(sums + COUNT, tl.sum(value, 0))
    tl.store(sums + COUNT + 1, tl.max(value, 0))
    tl.store(counts + tl.arange(0, BINS), tl.histogram(rank % BINS, BINS))
    tl.store(picked + i, tl.gather(value, rank, 0))


def test_sort_scan_reduce_histogram_and_gather_cross_warps() -> None:
    """Whole-block operations through shuffles, shared memory and shared atomics."""
    x, ranks = integers(-99, 99, 256), integers(0, 256, 256, seed=1)
    sorted_, sums, counts, picked = (torch.zeros(size, dtype=torch.int32) for size in (256, 258, 16, 256))
    clean(lambda: orders[(1,)](x, ranks, sorted_, sums, counts, picked, 256, 16))
    assert torch.equal(sorted_, x.sort().values)
    assert torch.equal(sums, torch.cat([x.cumsum(0), x.sum()[None], x.max()[None]]).int())
    assert torch.equal(counts, torch.bincount(ranks % 16, minlength=16).int())
    assert torch.equal(picked, x[ranks.long()])


# ---- functions


@triton.jit
def waves(x, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, COUNT)
    value = tl.load(x + i)
    tl.store(out + i, tl.sin(value))
    tl.store(out + COUNT + i, tl.cos(value))


def test_sine_and_cosine_reduce_huge_arguments() -> None:
    """The slow path keeps its table of 2/pi products in local memory and carries between words."""
    x = torch.cat([drawn(64) * 10, drawn(64, seed=1) * 1e6, drawn(64, seed=2) * 1e20, drawn(64, seed=3) * 1e38])
    out = torch.zeros(512)
    run = clean(lambda: waves[(1,)](x, out, 256))
    assert "st.local" in run.launches[0].kernel.asm["ptx"]
    exact = torch.cat([x.to(F64).sin(), x.to(F64).cos()])
    # Two units in the last place of a number near one: what CUDA promises of sinf and cosf.
    assert ((out.to(F64) - exact).abs() <= 2.0**-22).all()


@triton.jit
def wholes(x, y, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, COUNT)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a // b)
    tl.store(out + COUNT + i, a % b)
    word = tl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.b32 t, $1; lop3.b32 $0, t, 0x0f0f0f0f, 0x33333333, 0xe8; }",
        "=r,r",
        [a.to(tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    tl.store(out + 2 * COUNT + i, word.to(tl.int64))


def test_long_division_and_inline_assembly_are_exact() -> None:
    """64-bit quotients round towards zero as C's do; a lop3 with a scope of its own is a majority of three."""
    x = integers(-(2**62), 2**62, 128, dtype=torch.int64)
    y = integers(1, 2**40, 128, dtype=torch.int64, seed=1) * torch.tensor([1, -1]).repeat(64)
    out = torch.zeros(384, dtype=torch.int64)
    clean(lambda: wholes[(1,)](x, y, out, 128))
    quotient = torch.div(x, y, rounding_mode="trunc")
    low = x.int()
    majority = (low & 0x0F0F0F0F) | (low & 0x33333333) | (0x0F0F0F0F & 0x33333333)
    assert torch.equal(out, torch.cat([quotient, x - quotient * y, majority.long()]))


@triton.jit
def doubles(x, y, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a / b + tl.sqrt(b * b) * a)
    tl.store(out + SIZE * SIZE + at, tl.dot(a, b, out_dtype=tl.float64))


@pytest.mark.parametrize("target", ["sm_120", "sm_100"])
def test_float64_arithmetic_and_products_are_right(target: str) -> None:
    """Division, root, and tl.dot of float64: fma on sm_120, mma.m8n8k4 on sm_100."""
    a, b = drawn(16, 16, dtype=F64), drawn(16, 16, dtype=F64, seed=1)
    out = torch.zeros(2, 16, 16, dtype=F64)
    with emulate(target) as run:
        doubles[(1,)](a, b, out, 16)
    assert not run.findings, run.report()
    torch.testing.assert_close(out, torch.stack([a / b + b.abs() * a, a @ b]), rtol=1e-14, atol=1e-13)


# ---- assertions and prints


@triton.jit
def asserting(x, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    value = tl.load(x + tl.arange(0, COUNT))
    tl.device_assert(value > 0, "must be positive")


def test_a_failed_device_assertion_is_a_finding_with_its_message_and_line() -> None:
    """Two lanes fail; without them nothing is found."""
    x = torch.ones(256)
    clean(lambda: asserting[(1,)](x, 256, debug=True))
    x[200:202] = 0
    with emulate("sm_120") as run:
        asserting[(1,)](x, 256, debug=True)
    details = [finding.detail for finding in run.findings if finding.kind == Kind.TRAP]
    line = asserting.fn.__code__.co_firstlineno + 3
    assert any("must be positive" in detail and f"test_triton_features.py:{line}" in detail for detail in details), (
        details
    )


@triton.jit
def printing(x, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, COUNT)
    tl.device_print("pair", tl.load(x + i), i)


def test_device_print_prints_every_lane(capsys: pytest.CaptureFixture[str]) -> None:
    """A call of vprintf with a buffer in local memory: numbers and formats arrive whole."""
    x = drawn(128)
    clean(lambda: printing[(1,)](x, 128))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 256
    assert any(line.endswith(f"{float(x[77]):f}") and "( 77)" in line for line in lines)
    assert any(line.endswith(" 127") for line in lines)
