"""Mma of float64 against PTX ISA 9.1, sections 9.7.14.5.1 and 9.7.14.5.9 to 11: fragment layouts, exact sums."""

from __future__ import annotations

import random
import struct

import pytest

from .one_instruction import execute

SHAPES = [(8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)]


def bits(value: float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_product_of_whole_numbers_is_exact(m: int, n: int, k: int) -> None:
    """Small integers, so that every order of the sum gives the same: the layouts alone decide."""
    draw = random.Random(m * k)
    a = [[draw.randrange(-99, 100) for _ in range(k)] for _ in range(m)]
    b = [[draw.randrange(-99, 100) for _ in range(n)] for _ in range(k)]
    c = [[draw.randrange(-99, 100) for _ in range(n)] for _ in range(m)]
    lanes = range(32)
    halves = m // 8
    inputs = {}
    for i in range(halves * k // 4):
        row, column = 8 * (i % halves), 4 * (i // halves)
        inputs[f"a{i}"] = ("b64", [bits(a[lane // 4 + row][lane % 4 + column]) for lane in lanes])
    for i in range(k // 4):
        inputs[f"b{i}"] = ("b64", [bits(b[lane % 4 + 4 * i][lane // 4]) for lane in lanes])
    for i in range(2 * halves):
        inputs[f"c{i}"] = ("b64", [bits(c[lane // 4 + 8 * (i // 2)][2 * (lane % 4) + i % 2]) for lane in lanes])
    counts = {"d": 2 * halves, "a": halves * k // 4, "b": k // 4, "c": 2 * halves}
    names = ["{" + ", ".join(f"%{letter}{i}" for i in range(count)) + "}" for letter, count in counts.items()]
    line = f"mma.sync.aligned.m{m}n{n}k{k}.row.col.f64.f64.f64.f64 {', '.join(names)};"
    outputs = {f"d{i}": "b64" for i in range(2 * halves)}
    got = execute(line, inputs, outputs, threads=32)
    for lane in lanes:
        for i in range(2 * halves):
            row, column = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
            exact = sum(x * b[j][column] for j, x in enumerate(a[row])) + c[row][column]
            assert got[lane][i] == bits(exact)
