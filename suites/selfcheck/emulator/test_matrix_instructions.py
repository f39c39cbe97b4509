"""ldmatrix, stmatrix and mma against PTX ISA 9.1, section 9.7.14: the fragment layouts and exact dot products.

The manual leaves the order and rounding of a floating-point mma open. The emulator defines them: exact products, and
one rounding of the whole sum to the accumulator's type. Operands whose sum every order gives exactly come first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from .exact import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    TF32,
    Value,
    add,
    decode,
    encode,
    finite,
    is_nan,
    mask,
    multiply,
    signed,
)
from .one_instruction import execute

LANES = range(32)
WARPS = 4
FORMATS = {"f16": F16, "bf16": BF16, "tf32": TF32, "e4m3": E4M3, "e5m2": E5M2, "f32": F32, "f64": F64}
Place = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Shape:
    """Where element i of a lane's fragment sits in its matrix (sections 9.7.14.5.2 to 10)."""

    m: int
    n: int
    k: int
    a: Place
    b: Place
    c: Place
    a_count: int
    b_count: int
    c_count: int


def accumulator(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2


def shape(k: int, wide: int) -> Shape:
    """m16n8k<k> with ``wide`` neighbouring elements a register: 1 (tf32), 2 (16 bits) or 4 (8 bits).

    A register of A covers ``wide`` columns of one row; the next one is eight rows down, the one after that
    4 * wide columns right. B is the same without the step down.
    """

    def a(lane: int, i: int) -> tuple[int, int]:
        register, element = divmod(i, wide)
        return lane // 4 + 8 * (register % 2), lane % 4 * wide + element + 4 * wide * (register // 2)

    def b(lane: int, i: int) -> tuple[int, int]:
        register, element = divmod(i, wide)
        return lane % 4 * wide + element + 4 * wide * register, lane // 4

    return Shape(16, 8, k, a, b, accumulator, 16 * k // 32, 8 * k // 32, 4)


SHAPES = {
    ("m16n8k4", "tf32"): shape(4, 1),
    ("m16n8k8", "tf32"): shape(8, 1),
    ("m16n8k8", "bf16"): shape(8, 2),
    ("m16n8k8", "f16"): shape(8, 2),
    ("m16n8k16", "f16"): shape(16, 2),
    ("m16n8k16", "bf16"): shape(16, 2),
    ("m8n8k4", "f64"): Shape(
        8,
        8,
        4,
        lambda lane, i: (lane // 4, lane % 4),
        lambda lane, i: (lane % 4, lane // 4),
        lambda lane, i: (lane // 4, lane % 4 * 2 + i),
        1,
        1,
        2,
    ),
}
for kind in ("e4m3", "e5m2", "s8", "u8"):
    SHAPES["m16n8k16", kind] = shape(16, 4)
    SHAPES["m16n8k32", kind] = shape(32, 4)


@dataclass(frozen=True)
class Product:
    """One mma form: its shape and the types of A, B and of both accumulators."""

    shape: Shape
    a: str
    b: str
    c: str
    satfinite: bool = False

    def width(self, kind: str) -> int:
        return FORMATS[kind].width if kind in FORMATS else int(kind[1:])


FORMS: dict[str, object] = {}
for (name, kind), layout in SHAPES.items():
    head = f"mma.sync.aligned.{name}.row.col"
    if kind in ("s8", "u8"):
        for other in ("s8", "u8"):
            for satfinite in ("", ".satfinite"):
                FORMS[f"{head}{satfinite}.s32.{kind}.{other}.s32"] = Product(
                    layout, kind, other, "s32", bool(satfinite)
                )
    elif kind in ("e4m3", "e5m2"):
        for other in ("e4m3", "e5m2"):
            for sums in ("f32", "f16"):
                FORMS[f"{head}.{sums}.{kind}.{other}.{sums}"] = Product(layout, kind, other, sums)
    else:
        for sums in {"f16": ("f32", "f16"), "f64": ("f64",)}.get(kind, ("f32",)):
            FORMS[f"{head}.{sums}.{kind}.{kind}.{sums}"] = Product(layout, kind, kind, sums)
PRODUCTS = dict(FORMS)
Matrix = list[list[int]]


def registers_of(matrix: Matrix, place: Place, count: int, width: int, lane: int) -> list[int]:
    """A lane's fragment packed into 32-bit registers (64-bit ones for f64), lowest element first."""
    elements = [matrix[row][column] for row, column in (place(lane, i) for i in range(count))]
    whole = sum(element << (width * i) for i, element in enumerate(elements))
    size = max(32, width)
    return [whole >> (size * i) & mask(size) for i in range(width * count // size)]


def multiply_matrices(opcode: str, problems: list[tuple[Matrix, Matrix, Matrix]]) -> list[Matrix]:
    """Run the mma on one problem a warp and put D together again."""
    form = PRODUCTS[opcode]
    layout = form.shape
    fragments = {
        "a": (0, layout.a, layout.a_count, form.width(form.a)),
        "b": (1, layout.b, layout.b_count, form.width(form.b)),
        "c": (2, layout.c, layout.c_count, form.width(form.c)),
    }
    inputs: dict[str, tuple[str, list[int]]] = {}
    names: dict[str, list[str]] = {}
    for letter, (index, place, count, width) in fragments.items():
        lanes = [registers_of(problem[index], place, count, width, lane) for problem in problems for lane in LANES]
        names[letter] = [f"{letter}{i}" for i in range(len(lanes[0]))]
        for i, name in enumerate(names[letter]):
            inputs[name] = (f"b{max(32, width)}", [registers[i] for registers in lanes])
    outputs = {name.replace("c", "d"): inputs[name][0] for name in names["c"]}
    braced = ["{" + ", ".join(f"%{name}" for name in group) + "}" for group in (list(outputs), *names.values())]
    got = execute(f"{opcode} {', '.join(braced)};", inputs, outputs)
    width = form.width(form.c)
    results = []
    for warp in range(len(problems)):
        matrix = [[0] * layout.n for _ in range(layout.m)]
        for lane in LANES:
            whole = sum(value << (max(32, width) * i) for i, value in enumerate(got[warp * 32 + lane]))
            for i in range(layout.c_count):
                row, column = layout.c(lane, i)
                matrix[row][column] = whole >> (width * i) & mask(width)
        results.append(matrix)
    return results


def expected(form: Product, a: Matrix, b: Matrix, c: Matrix, row: int, column: int) -> int:
    """Exact dot product plus c, rounded once (floats) or wrapped or clamped (integers)."""
    pairs = [(a[row][k], b[k][column]) for k in range(form.shape.k)]
    if form.c == "s32":
        read = {"s8": lambda v: signed(v, 8), "u8": lambda v: v}
        total = signed(c[row][column], 32) + sum(read[form.a](x) * read[form.b](y) for x, y in pairs)
        return (max(-(1 << 31), min((1 << 31) - 1, total)) if form.satfinite else total) & mask(32)
    total_value: Value = decode(FORMATS[form.c], c[row][column])
    for x, y in pairs:
        total_value = add(total_value, multiply(decode(FORMATS[form.a], x), decode(FORMATS[form.b], y)))
    return encode(FORMATS[form.c], total_value)


def small_integer(draw: random.Random, kind: str) -> int:
    """An integer that every type here holds, with products and sums that f16 holds."""
    value = draw.randint(-4, 4)
    if kind in FORMATS:
        return encode(FORMATS[kind], finite(value))
    return (value if kind == "s8" else abs(value)) & mask(int(kind[1:]))


def moderate(draw: random.Random, kind: str) -> int:
    """Random bits; a float's exponent within a few powers of two of one, so that the sum needs rounding."""
    if kind not in FORMATS:
        return draw.getrandbits(int(kind[1:]))
    form = FORMATS[kind]
    exponent = form.bias + draw.randint(-5, 2)
    field = exponent << form.mantissa_bits | draw.getrandbits(form.mantissa_bits)
    return (field << form.unused) | draw.choice([0, form.sign_bit])


def problem(
    form: Product, draw: random.Random, element: Callable[[random.Random, str], int]
) -> tuple[Matrix, Matrix, Matrix]:
    layout = form.shape
    sizes = ((layout.m, layout.k, form.a), (layout.k, layout.n, form.b), (layout.m, layout.n, form.c))
    a, b, c = ([[element(draw, kind) for _ in range(columns)] for _ in range(rows)] for rows, columns, kind in sizes)
    return a, b, c


def compare(opcode: str, problems: list[tuple[Matrix, Matrix, Matrix]]) -> None:
    form = PRODUCTS[opcode]
    wrong = []
    for (a, b, c), got in zip(problems, multiply_matrices(opcode, problems), strict=True):
        for row in range(form.shape.m):
            for column in range(form.shape.n):
                want = expected(form, a, b, c, row, column)
                nans = form.c in FORMATS and is_nan(FORMATS[form.c], want) and is_nan(FORMATS[form.c], got[row][column])
                if got[row][column] != want and not nans:
                    wrong.append(f"({row}, {column}): {got[row][column]:#x}, not {want:#x}")
    assert not wrong, f"{opcode}: {len(wrong)} wrong: " + "; ".join(wrong[:5])


@pytest.mark.parametrize("opcode", PRODUCTS)
def test_product_of_small_integers_is_exact(opcode: str) -> None:
    """Sums that every order of addition gives exactly: a wrong element place or a lost term is seen."""
    draw = random.Random(opcode)
    form = PRODUCTS[opcode]
    compare(opcode, [problem(form, draw, small_integer)])


@pytest.mark.parametrize("opcode", PRODUCTS)
def test_single_nonzero_elements_land_in_their_place(opcode: str) -> None:
    """One nonzero element of A and of B, at every k and at moving rows and columns, gives one nonzero result."""
    form = PRODUCTS[opcode]
    layout = form.shape
    two, three, six = (
        encode(FORMATS[kind], finite(number)) if kind in FORMATS else number
        for kind, number in ((form.a, 2), (form.b, 3), (form.c, 6))
    )

    def single(rows: int, columns: int, row: int, column: int, value: int) -> Matrix:
        return [[value * (i == row and j == column) for j in range(columns)] for i in range(rows)]

    places = [((5 * k + 3) % layout.m, (3 * k + 1) % layout.n) for k in range(layout.k)]
    zeros = single(layout.m, layout.n, 0, 0, 0)
    problems = [
        (single(layout.m, layout.k, row, k, two), single(layout.k, layout.n, k, column, three), zeros)
        for k, (row, column) in enumerate(places)
    ]
    for (row, column), got in zip(places, multiply_matrices(opcode, problems), strict=True):
        assert got == single(layout.m, layout.n, row, column, six), f"{opcode}: not ({row}, {column}) alone"


@pytest.mark.parametrize("opcode", [name for name, form in PRODUCTS.items() if form.a != "f64"])
def test_product_of_random_operands_is_rounded_once(opcode: str) -> None:
    """Random operands: the exact rational sum, rounded once; integers wrap, or clamp with .satfinite."""
    draw = random.Random(opcode)
    form = PRODUCTS[opcode]
    problems = [problem(form, draw, moderate)]
    if form.c == "s32":
        edge = [[draw.choice([0x7FFFFFFF, 0x80000000, 0x7FFFFF00]) for _ in range(8)] for _ in range(16)]
        problems.append((*problems[0][:2], edge))
    compare(opcode, problems)


@pytest.mark.parametrize("opcode", [name for name, form in PRODUCTS.items() if form.c != "s32" and form.a != "f64"])
def test_infinity_and_nan_pass_through_the_product(opcode: str) -> None:
    """An infinity in c, a NaN in a row of A and a NaN in c reach the results that depend on them and no other."""
    draw = random.Random(opcode)
    form = PRODUCTS[opcode]
    a, b, c = problem(form, draw, small_integer)
    sums = FORMATS[form.c]
    c[2][3] = sums.infinity
    c[4][5] = sums.infinity | sums.sign_bit
    c[6][7] = sums.canonical_nan
    a[9][1] = FORMATS[form.a].canonical_nan
    compare(opcode, [(a, b, c)])


@pytest.mark.parametrize("opcode", ["mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"])
def test_low_bits_of_tf32_operands_do_not_count(opcode: str) -> None:
    """tf32 has 10 bits of mantissa: the 13 bits below are ignored."""
    draw = random.Random(opcode)
    form = PRODUCTS[opcode]
    a, b, c = problem(form, draw, moderate)
    dirty = [[[element | draw.getrandbits(13) for element in row] for row in matrix] for matrix in (a, b)]
    clean, noisy = multiply_matrices(opcode, [(a, b, c), (*dirty, c)])
    assert clean == noisy


STORE_ROW = [
    "mov.b32 %at, global_smem;",
    "shl.b32 %row, %thread, 4;",
    "add.s32 %row, %at, %row;",
    "add.s32 %at, %at, %offset;",
]
MEMORY_REGISTERS = ".reg .b32 %at, %row;"


def rows_of(draw: random.Random) -> list[list[int]]:
    """128 rows of eight 16-bit numbers, one a thread."""
    return [[draw.getrandbits(16) for _ in range(8)] for _ in range(128)]


def offsets_of(draw: random.Random) -> list[int]:
    """Each warp's 32 rows in random order, as byte offsets."""
    return [16 * (32 * warp + row) for warp in range(WARPS) for row in draw.sample(range(32), 32)]


def words_of(rows: list[list[int]]) -> dict[str, tuple[str, list[int]]]:
    """Each thread's row as four 32-bit registers."""
    return {f"s{i}": ("b32", [row[2 * i] | row[2 * i + 1] << 16 for row in rows]) for i in range(4)}


def element(fragment: int, lane: int, half: int, trans: bool) -> tuple[int, int]:
    """Address lane and place in its row of one element of a fragment (sections 9.7.14.5.15 and 16)."""
    row, column = (lane % 4 * 2 + half, lane // 4) if trans else (lane // 4, lane % 4 * 2 + half)
    return 8 * fragment + row, column


LOADS = {f"ldmatrix.sync.aligned.m8n8.x{n}{t}.shared.b16": (n, bool(t)) for n in (1, 2, 4) for t in ("", ".trans")}
STORES = {f"stmatrix.sync.aligned.m8n8.x{n}{t}.shared.b16": (n, bool(t)) for n in (1, 2, 4) for t in ("", ".trans")}
LOADS["ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16"] = (4, False)
STORES["stmatrix.sync.aligned.m8n8.x4.shared::cta.b16"] = (4, False)
FORMS |= LOADS | STORES


@pytest.mark.parametrize("opcode", LOADS)
def test_ldmatrix_gathers_the_rows_that_lanes_point_at(opcode: str) -> None:
    """Rows in random order: lane 8 * j + i gives the address of row i of matrix j."""
    count, trans = LOADS[opcode]
    draw = random.Random(opcode)
    rows, offsets = rows_of(draw), offsets_of(draw)
    braces = ", ".join(f"%d{i}" for i in range(count))
    lines = [
        *STORE_ROW,
        "st.shared.v4.b32 [%row], {%s0, %s1, %s2, %s3};",
        "bar.sync 0;",
        f"{opcode} {{{braces}}}, [%at];",
    ]
    got = execute(
        lines,
        words_of(rows) | {"offset": ("b32", offsets)},
        {f"d{i}": "b32" for i in range(count)},
        registers=MEMORY_REGISTERS,
        shared_bytes=2048,
    )
    for thread, registers in enumerate(got):
        for fragment, register in enumerate(registers):
            for half in (0, 1):
                address_lane, column = element(fragment, thread % 32, half, trans)
                row = rows[offsets[thread // 32 * 32 + address_lane] // 16]
                assert register >> (16 * half) & 0xFFFF == row[column], (opcode, thread, fragment, half)


@pytest.mark.parametrize("opcode", STORES)
def test_stmatrix_scatters_into_the_rows_that_lanes_point_at(opcode: str) -> None:
    """The inverse of ldmatrix; rows that no lane of the first 8 * x points at keep what they held."""
    count, trans = STORES[opcode]
    draw = random.Random(opcode)
    rows, offsets = rows_of(draw), offsets_of(draw)
    fragments = [[draw.getrandbits(32) for _ in range(count)] for _ in range(128)]
    inputs = {f"f{i}": ("b32", [registers[i] for registers in fragments]) for i in range(count)}
    braces = ", ".join(f"%f{i}" for i in range(count))
    lines = [
        *STORE_ROW,
        "st.shared.v4.b32 [%row], {%s0, %s1, %s2, %s3};",
        "bar.sync 0;",
        f"{opcode} [%at], {{{braces}}};",
        "bar.sync 0;",
        "ld.shared.v4.b32 {%d0, %d1, %d2, %d3}, [%row];",
    ]
    got = execute(
        lines,
        words_of(rows) | inputs | {"offset": ("b32", offsets)},
        {f"d{i}": "b32" for i in range(4)},
        registers=MEMORY_REGISTERS,
        shared_bytes=2048,
    )
    want = [list(row) for row in rows]
    for thread, registers in enumerate(fragments):
        for fragment, register in enumerate(registers):
            for half in (0, 1):
                address_lane, column = element(fragment, thread % 32, half, trans)
                want[offsets[thread // 32 * 32 + address_lane] // 16][column] = register >> (16 * half) & 0xFFFF
    assert [[w >> s & 0xFFFF for w in row for s in (0, 16)] for row in got] == want


def test_wrong_layout_fails() -> None:
    """The placement test can fail: rows and columns of the accumulator exchanged are seen."""
    opcode = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    draw = random.Random(3)
    form = PRODUCTS[opcode]
    a, b, c = problem(form, draw, small_integer)
    (got,) = multiply_matrices(opcode, [(a, b, c)])
    moved = [a[(row + 8) % 16] for row in range(16)]
    assert any(got[r][n] != expected(form, moved, b, c, r, n) for r in range(16) for n in range(8))
    assert all(got[r][n] == expected(form, a, b, c, r, n) for r in range(16) for n in range(8))
