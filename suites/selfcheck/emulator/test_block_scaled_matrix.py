"""Block-scaled mma, and mma of 4- and 6-bit numbers, against PTX ISA 9.1, sections 9.7.14.3 and 9.7.14.5.

Codes are decoded with fractions; the scaled sum of a whole row is exact and rounded once. Scales stay within a factor
of 2**12 of each other, so that the emulator's float64 sum is exact too and every bit of the result is due.
"""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from mla_conformance.suites.emulator import UnsupportedInstruction

from .exact import E2M1, E2M3, E3M2, E4M3, E5M2, F32, UE8M0, Format, decode, encode, finite
from .one_instruction import execute

LANES = range(32)
FORMATS = {"e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2, "e4m3": E4M3, "e5m2": E5M2}
CODE_BITS = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8, "e5m2": 8}


def number(form: Format, code: int) -> Fraction:
    """The value of a finite code."""
    return decode(form, code).number


def finite_codes(name: str) -> list[int]:
    """Codes whose value is a number."""
    form = FORMATS[name]
    return [code for code in range(1 << CODE_BITS[name]) if decode(form, code).is_finite]


def contained(name: str, code: int) -> int:
    """A code in the 8-bit container of kind::f8f6f4 and kind::mxf8f6f4: a 4-bit one stands above two zero bits."""
    return code << 2 if name == "e2m1" else code


def registers(matrix: list[list[int]], width: int, *, rows: bool) -> list[list[int]]:
    """Fragments by register and lane: element j of register i of lane 4 g + t (figures of section 9.7.14.5).

    A: row g + 8 (i mod 2), column n (4 (i div 2) + t) + j, with n elements a register; B: the same of its column g.
    """
    per = 32 // width
    count = len(matrix[0]) // (4 * per) * (2 if rows else 1)
    found = []
    for i in range(count):
        half, block = (i % 2, i // 2) if rows else (0, i)
        words = []
        for lane in LANES:
            line, t = lane // 4 + 8 * half, lane % 4
            codes = [matrix[line][per * (4 * block + t) + j] for j in range(per)]
            words.append(sum(code << (width * j) for j, code in enumerate(codes)))
        found.append(words)
    return found


def accumulators(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2


def run(
    opcode: str, a: list[list[int]], b: list[list[int]], c: list[list[int]], tail: str, scales: list[list[int]]
) -> list[list[int]]:
    """Results [lane][i] of one instruction with the given registers."""
    inputs = {f"a{i}": ("b32", words) for i, words in enumerate(a)}
    inputs |= {f"b{i}": ("b32", words) for i, words in enumerate(b)}
    inputs |= {f"c{i}": ("b32", words) for i, words in enumerate(c)}
    inputs |= {f"s{i}": ("b32", words) for i, words in enumerate(scales)}
    names = [
        ", ".join(f"%{letter}{i}" for i in range(n)) for letter, n in (("d", 4), ("a", len(a)), ("b", len(b)), ("c", 4))
    ]
    line = f"{opcode} {', '.join('{' + n + '}' for n in names)}{tail};"
    return [list(row) for row in execute(line, inputs, {f"d{i}": "b32" for i in range(4)}, threads=32)]


def wanted(rows: list[list[Fraction]], columns: list[list[Fraction]], c: list[list[int]]) -> list[list[int]]:
    """[lane][i]: exact sums with the accumulator, rounded once to f32."""
    found = []
    for lane in LANES:
        line = []
        for i in range(4):
            row, column = accumulators(lane, i)
            total = sum((x * y for x, y in zip(rows[row], columns[column], strict=True)), number(F32, c[i][lane]))
            line.append(encode(F32, finite(total)))
        found.append(line)
    return found


def start_values(draw: random.Random) -> list[list[int]]:
    """Accumulators: small integers and fractions as f32."""
    values = [[Fraction(draw.randrange(-64, 65), 8) for _ in LANES] for _ in range(4)]
    return [[encode(F32, finite(x)) for x in line] for line in values]


SCALED = [
    *(("mxf8f6f4", 32, 1, "ue8m0", a, b) for a in FORMATS for b in FORMATS),
    ("mxf4", 64, 2, "ue8m0", "e2m1", "e2m1"),
    ("mxf4nvf4", 64, 2, "ue8m0", "e2m1", "e2m1"),
    ("mxf4nvf4", 64, 4, "ue4m3", "e2m1", "e2m1"),
]


def scale_codes(draw: random.Random, kind: str) -> list[int]:
    """Scale codes near one."""
    return [draw.randrange(121, 134) if kind == "ue8m0" else draw.randrange(32, 80) for _ in range(4)]


def scale_value(kind: str, code: int) -> Fraction:
    return number(UE8M0, code) if kind == "ue8m0" else number(E4M3, code & 127)


@pytest.mark.parametrize(("kind", "k", "blocks", "scale", "left", "right"), SCALED)
def test_blocks_are_scaled_by_the_selected_bytes_of_the_selected_threads(
    kind: str, k: int, blocks: int, scale: str, left: str, right: str
) -> None:
    """Every choice of byte and thread, with different scales in every byte of every lane."""
    draw = random.Random(f"{kind}{blocks}{left}{right}")
    width = 8 if kind == "mxf8f6f4" else 4
    a = [[draw.choice(finite_codes(left)) for _ in range(k)] for _ in range(16)]
    b = [[draw.choice(finite_codes(right)) for _ in range(k)] for _ in range(8)]
    pack = contained if width == 8 else lambda name, code: code
    a_registers = registers([[pack(left, code) for code in row] for row in a], width, rows=True)
    b_registers = registers([[pack(right, code) for code in row] for row in b], width, rows=False)
    c = start_values(draw)
    head = f"mma.sync.aligned.m16n8k{k}.row.col.kind::{kind}.block_scale"
    opcode = f"{head}.scale_vec::{blocks}X.f32.{left}.{right}.f32.{scale}"
    choices = [(byte, thread) for byte in range(0, 4, blocks) for thread in range(4)]
    if kind == "mxf8f6f4" and (left, right) != ("e4m3", "e2m1"):
        choices = draw.sample(choices, 2)
    for byte, thread in choices:
        codes = [[scale_codes(draw, scale) for _ in LANES] for _ in range(2)]
        thread_a = thread % 2
        rows = []
        for row in range(16):
            # The pair of threads 2 s and 2 s + 1 of a quad holds the scales of rows g and g + 8.
            mine = codes[0][4 * (row % 8) + 2 * thread_a + row // 8]
            rows.append(
                [
                    number(FORMATS[left], x) * scale_value(scale, mine[byte + j * blocks // k])
                    for j, x in enumerate(a[row])
                ]
            )
        columns = []
        for column in range(8):
            mine = codes[1][4 * column + thread]
            columns.append(
                [
                    number(FORMATS[right], x) * scale_value(scale, mine[byte + j * blocks // k])
                    for j, x in enumerate(b[column])
                ]
            )
        words = [[int.from_bytes(bytes(line), "little") for line in side] for side in codes]
        tail = f", %s0, {{{byte}, {thread_a}}}, %s1, {{{byte}, {thread}}}"
        assert run(opcode, a_registers, b_registers, c, tail, words) == wanted(rows, columns, c), (byte, thread)


@pytest.mark.parametrize(("left", "right"), [(a, b) for a in FORMATS for b in ("e2m1", "e2m3", "e3m2")])
def test_unscaled_products_of_small_numbers_are_exact(left: str, right: str) -> None:
    """kind::f8f6f4: codes of 4, 6 and 8 bits in 8-bit containers, mixed freely."""
    draw = random.Random(f"{left}{right}")
    a = [[draw.choice(finite_codes(left)) for _ in range(32)] for _ in range(16)]
    b = [[draw.choice(finite_codes(right)) for _ in range(32)] for _ in range(8)]
    c = start_values(draw)
    got = run(
        f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.{left}.{right}.f32",
        registers([[contained(left, code) for code in row] for row in a], 8, rows=True),
        registers([[contained(right, code) for code in row] for row in b], 8, rows=False),
        c,
        "",
        [],
    )
    rows = [[number(FORMATS[left], code) for code in row] for row in a]
    columns = [[number(FORMATS[right], code) for code in row] for row in b]
    assert got == wanted(rows, columns, c)


@pytest.mark.parametrize("scale", ["ue8m0", "ue4m3"])
def test_a_nan_scale_makes_its_whole_row_nan(scale: str) -> None:
    """The scale code of all ones is NaN; other rows stay numbers."""
    blocks, kind = (2, "mxf4") if scale == "ue8m0" else (4, "mxf4nvf4")
    nan, one = (0xFF, 0x7F) if scale == "ue8m0" else (0x7F, 0x38)
    a, b = [[2] * 64 for _ in range(16)], [[2] * 64 for _ in range(8)]
    ones = int.from_bytes(bytes([one] * 4), "little")
    left = [ones] * 32
    left[4 * 3 + 1] = ones & ~0xFF | nan
    opcode = (
        f"mma.sync.aligned.m16n8k64.row.col.kind::{kind}.block_scale.scale_vec::{blocks}X.f32.e2m1.e2m1.f32.{scale}"
    )
    zeros = [[0] * 32 for _ in range(4)]
    got = run(
        opcode,
        registers(a, 4, rows=True),
        registers(b, 4, rows=False),
        zeros,
        ", %s0, {0, 0}, %s1, {0, 0}",
        [left, [ones] * 32],
    )
    for lane in LANES:
        for i in range(4):
            row, _ = accumulators(lane, i)
            assert got[lane][i] == (0x7FFFFFFF if row == 8 + 3 else 0x42800000)


@pytest.mark.parametrize(
    ("kind", "suffix", "selectors"),
    [
        ("mxf4", "scale_vec::1X.f32.e2m1.e2m1.f32.ue8m0", ("{0, 0}", "{0, 0}")),
        ("mxf4", "scale_vec::2X.f32.e2m1.e2m1.f32.ue4m3", ("{0, 0}", "{0, 0}")),
        ("mxf4", "scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0", ("{1, 0}", "{0, 0}")),
        ("mxf4", "scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0", ("{0, 2}", "{0, 0}")),
        ("mxf4nvf4", "scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3", ("{0, 0}", "{2, 0}")),
    ],
)
def test_forms_that_do_not_exist_are_refused(kind: str, suffix: str, selectors: tuple[str, str]) -> None:
    """Scale vectors, scale types and selectors outside the manual's tables."""
    opcode = f"mma.sync.aligned.m16n8k64.row.col.kind::{kind}.block_scale.{suffix}"
    a, b, c = [[0] * 32] * 4, [[0] * 32] * 2, [[0] * 32] * 4
    with pytest.raises(UnsupportedInstruction):
        run(opcode, a, b, c, f", %s0, {selectors[0]}, %s1, {selectors[1]}", [[0] * 32] * 2)
