"""Loads, stores, atomics and asynchronous copies against PTX ISA 9.1, sections 9.4.1, 9.7.9 and 9.7.13."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from mla_conformance.suites.emulator import run_ptx

from .exact import BF16, F16, F32, F64, Format, add, decode, encode, finite, mask, signed
from .one_instruction import bits, entry, execute, floats, integers, memory

THREADS = 128
FORMS: dict[str, object] = {}


def random_bytes(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.getrandbits(8) for _ in range(count)]


def read(data: list[int], address: int, size: int) -> int:
    return int.from_bytes(bytes(data[address : address + size]), "little")


def widened(kind: str, value: int, width: int) -> int:
    """A loaded value in a register at least as wide: sign extended for .s, zero extended for the rest (9.4.1)."""
    size = int(kind[1:])
    return signed(value, size) & mask(width) if kind[0] == "s" else value


SCALARS = [f"{letter}{width}" for width in (8, 16, 32, 64) for letter in "bus"] + ["f32", "f64"]
VECTORS = [(v, k) for v in (2, 4) for k in ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "f32")]
VECTORS += [(2, "b64"), (2, "u64"), (2, "f64"), (4, "b64"), (8, "b32"), (8, "f32")]
CACHE = ["ca", "cg", "cs", "lu", "cv", "nc", "L1::evict_last", "L1::evict_first", "L1::no_allocate", "L2::128B"]
LOADS: dict[str, tuple[int, str, str]] = {
    f"ld.{space}.{kind}": (1, kind, space) for space in ("global", "shared") for kind in SCALARS
}
LOADS |= {
    f"ld.{space}.v{n}.{kind}": (n, kind, space)
    for space in ("global", "shared")
    for n, kind in VECTORS
    if space == "global" or n * int(kind[1:]) <= 128
}
LOADS |= {f"ld.global.{cache}.b32": (1, "b32", "global") for cache in CACHE}
LOADS |= {f"ld.global.{cache}.v4.b32": (4, "b32", "global") for cache in ("ca", "cg", "nc", "L1::evict_first")}
LOADS |= {
    "ld.global.ca.b16": (1, "b16", "global"),
    "ld.global.cg.b16": (1, "b16", "global"),
    "ld.global.nc.L1::no_allocate.L2::256B.v4.b32": (4, "b32", "global"),
    "ld.volatile.global.b32": (1, "b32", "global"),
    "ld.relaxed.gpu.global.b32": (1, "b32", "global"),
    "ld.acquire.gpu.global.b32": (1, "b32", "global"),
    "ld.acquire.sys.global.b64": (1, "b64", "global"),
    "ld.shared::cta.b32": (1, "b32", "shared"),
    "ld.shared::cta.v4.b32": (4, "b32", "shared"),
    "ld.volatile.shared.b32": (1, "b32", "shared"),
}
FORMS |= LOADS


def register_kind(kind: str, wider: bool) -> str:
    width = max(16, int(kind[1:]))
    return f"b{min(64, width * 2) if wider and kind[0] != 'f' else width}"


# ptxas takes no eight 64-bit registers.
LOADS_AND_WIDTHS = [
    (opcode, wider) for opcode in LOADS for wider in (False, True) if not (LOADS[opcode][0] == 8 and wider)
]


@pytest.mark.parametrize(
    ("opcode", "wider"),
    LOADS_AND_WIDTHS,
    ids=[f"{'wider' if wider else 'same'}-{op}" for op, wider in LOADS_AND_WIDTHS],
)
def test_load_takes_the_bytes_at_the_address(opcode: str, wider: bool) -> None:
    """Each lane reads its own place through a register plus offset; wider registers get extended values."""
    count, kind, space = LOADS[opcode]
    size = int(kind[1:]) // 8
    stride = size * count
    data = random_bytes(opcode, 64 + stride * THREADS)
    register = register_kind(kind, wider)
    names = [f"d{i}" for i in range(count)]
    destination = "{" + ", ".join(f"%{name}" for name in names) + "}" if count > 1 else "%d0"
    buffer = memory(data, "b8")
    offset = 64 if space == "global" else 32
    lines = [f"mad.wide.s32 %to, %thread, {stride}, %buffer;", f"{opcode} {destination}, [%to+{offset}];"]
    if space == "shared":  # every thread copies its own bytes first
        lines = [
            "mov.b32 %base, global_smem;",
            f"mad.lo.s32 %base, %thread, {stride}, %base;",
            f"mad.wide.s32 %to, %thread, {stride}, %buffer;",
            *(f"ld.global.b8 %byte, [%to+{64 + i}]; st.shared.b8 [%base+{offset + i}], %byte;" for i in range(stride)),
            f"{opcode} {destination}, [%base+{offset}];",
        ]
    got = execute(
        lines,
        {},
        dict.fromkeys(names, register),
        registers=".reg .b64 %to; .reg .b32 %base; .reg .b16 %byte;",
        buffers={"buffer": buffer},
        shared_bytes=(32 + stride * THREADS) if space == "shared" else 0,
    )
    for thread, values in enumerate(got):
        for i, value in enumerate(values):
            stored = read(data, 64 + stride * thread + size * i, size)
            assert value == widened(kind, stored, int(register[1:])), f"{opcode} lane {thread} element {i}"


STORES: dict[str, tuple[int, str, str]] = {
    f"st.{space}.{kind}": (1, kind, space) for space in ("global", "shared") for kind in SCALARS
}
STORES |= {
    f"st.{space}.v{n}.{kind}": (n, kind, space)
    for space in ("global", "shared")
    for n, kind in VECTORS
    if kind[0] == "b" and (space == "global" or n * int(kind[1:]) <= 128)
}
STORES |= {f"st.global.{cache}.b32": (1, "b32", "global") for cache in ("wb", "cg", "cs", "wt", "L1::evict_last")}
STORES |= {f"st.shared::cta.{kind}": (1, kind, "shared") for kind in ("b8", "b16", "b32", "b64")}
STORES |= {f"st.shared::cta.v{n}.{kind}": (n, kind, "shared") for n in (2, 4) for kind in ("b8", "b16", "b32")}
STORES |= {
    "st.global.cs.v4.b32": (4, "b32", "global"),
    "st.volatile.global.b32": (1, "b32", "global"),
    "st.relaxed.gpu.global.b32": (1, "b32", "global"),
    "st.release.gpu.global.b32": (1, "b32", "global"),
    "st.volatile.shared.b32": (1, "b32", "shared"),
}
FORMS |= STORES


@pytest.mark.parametrize("opcode", STORES)
@pytest.mark.parametrize("wider", [False, True], ids=["same", "wider"])
def test_store_writes_the_low_bytes_and_nothing_else(opcode: str, wider: bool) -> None:
    """Each lane writes its own place; the gaps between places keep their fill."""
    count, kind, space = STORES[opcode]
    size = int(kind[1:]) // 8
    register = register_kind(kind, wider)
    width = int(register[1:])
    draw = random.Random(opcode)
    values = [[draw.getrandbits(width) for _ in range(THREADS)] for _ in range(count)]
    stride = 2 * size * count
    names = [f"v{i}" for i in range(count)]
    source = "{" + ", ".join(f"%{name}" for name in names) + "}" if count > 1 else "%v0"
    buffer = memory([0xA5] * (stride * THREADS), "b8")
    lines = [f"mad.wide.s32 %to, %thread, {stride}, %buffer;", f"{opcode} [%to], {source};"]
    if space == "shared":
        copy = [f"ld.shared.b8 %byte, [%base+{i}]; st.global.b8 [%to+{i}], %byte;" for i in range(size * count)]
        lines = [
            "mov.b32 %base, global_smem;",
            f"mad.lo.s32 %base, %thread, {stride}, %base;",
            lines[0],
            f"{opcode} [%base], {source};",
            *copy,
        ]
    execute(
        lines,
        {name: (register, column) for name, column in zip(names, values, strict=True)},
        {},
        registers=".reg .b64 %to; .reg .b32 %base; .reg .b16 %byte;",
        buffers={"buffer": buffer},
        shared_bytes=stride * THREADS if space == "shared" else 0,
    )
    want = b""
    for thread in range(THREADS):
        for column in values:
            want += (column[thread] & mask(8 * size)).to_bytes(size, "little")
        want += b"\xa5" * (stride - size * count)
    assert bytes(bits(buffer)) == want


# Triton's own spelling: guarded inline assembly with braces around a single register and "+ 0" in the address.
def test_guarded_access_in_tritons_spelling_leaves_other_lanes_alone() -> None:
    """A lane whose guard is false neither reads nor writes, even at an address outside every tensor."""
    source, target = memory(list(range(100, 228)), "b32"), memory([7] * THREADS, "b32")
    lines = [
        "mad.wide.s32 %from, %thread, 4, %source;",
        "mad.wide.s32 %to, %thread, 4, %target;",
        "and.b32 %odd, %thread, 1;",
        "setp.eq.b32 %p, %odd, 0;",
        "@!%p mov.b64 %from, 4096;",
        "@!%p mov.b64 %to, 4096;",
        "{ mov.u32 %value, 0x0; @%p ld.global.b32 { %value }, [ %from + 0 ]; }",
        "@%p st.global.b32 [ %to + 0 ], { %value };",
    ]
    registers = ".reg .b64 %from, %to; .reg .b32 %odd, %value; .reg .pred %p;"
    execute(lines, {}, {}, registers=registers, buffers={"source": source, "target": target})
    assert bits(target) == [7 if thread % 2 else 100 + thread for thread in range(THREADS)]


def test_addresses_sinks_and_immediate_operands() -> None:
    """Negative offsets, offsets from a symbol, ``_`` in a vector load, and literals as stored values."""
    data = memory(list(range(1000, 1000 + 4 * THREADS)), "b32")
    lines = [
        "mad.wide.s32 %from, %thread, 16, %data;",
        "add.s64 %from, %from, 64;",
        "ld.global.v4.b32 {%d, _, _, %e}, [%from+-64];",
        "mov.b32 %at, global_smem;",
        "mad.lo.s32 %own, %thread, 32, %at;",
        "add.s32 %own, %own, 16;",
        "st.shared.b32 [%own+-16], -2;",
        "st.shared.b32 [%own+-12], 0fBF800000;",
        "st.shared.v2.b32 [%own+-8], {7, %d};",
        "st.shared.b16 [%own], 0x1234;",
        "ld.shared.v4.b32 {%f, %g, %h, %i}, [%own+-16];",
        "ld.shared.b16 %k, [%own];",
        "bar.sync 0;",
        "ld.shared.b32 %j, [global_smem+12];",
    ]
    kinds = dict.fromkeys("defghij", "b32") | {"k": "b16"}
    registers = ".reg .b64 %from; .reg .b32 %at, %own;"
    got = execute(lines, {}, kinds, registers=registers, buffers={"data": data}, shared_bytes=32 * THREADS)
    for thread, (d, e, f, g, h, i, j, k) in enumerate(got):
        assert (d, e) == (1000 + 4 * thread, 1003 + 4 * thread)
        assert (f, g, h, i) == (mask(32) - 1, 0xBF800000, 7, d)
        assert (j, k) == (1000, 0x1234)


PARAMETERS = {
    "ld.param.b32": (".u32", 0x89ABCDEF, "b32", 0x89ABCDEF),
    "ld.param.u32": (".u32", 0x89ABCDEF, "b32", 0x89ABCDEF),
    "ld.param.s32": (".u32", -5, "b64", mask(64) - 4),
    "ld.param.b64": (".u64", -6, "b64", mask(64) - 5),
    "ld.param.u64": (".u64", 1 << 40, "b64", 1 << 40),
    "ld.param.s64": (".s64", -(1 << 50), "b64", mask(64) + 1 - (1 << 50)),
    "ld.param.f32": (".f32", 1.5, "b32", 0x3FC00000),
    "ld.param.b16": (".u16", 0x8001, "b16", 0x8001),
    "ld.param.u16": (".u16", 0x8001, "b32", 0x8001),
    "ld.param.s16": (".u16", 0x8001, "b32", 0xFFFF8001),
    "ld.param.b8": (".u8", 0x81, "b16", 0x81),
    "ld.param.s8": (".s8", -2, "b32", 0xFFFFFFFE),
    "ld.param.f64": (".f64", -2.5, "b64", 0xC004000000000000),
}
FORMS |= PARAMETERS


@pytest.mark.parametrize("opcode", PARAMETERS)
def test_parameter_arrives_with_its_bits(opcode: str) -> None:
    """An argument of each type, alone and after others, extended into a wider register as the load's type says."""
    kind, argument, register, want = PARAMETERS[opcode]
    out = torch.zeros(4, dtype=torch.int64)
    lines = [
        "ld.param.b64 %to, [p0];",
        "mov.u32 %t, %tid.x;",
        "setp.ne.b32 %p, %t, 0;",
        "@%p bra END;",
        f"{opcode} %v, [p1];",
        f"st.global.{register} [%to], %v;",
        f"{opcode} %w, [p3];",
        f"st.global.{register} [%to+8], %w;",
        "END:",
    ]
    registers = f".reg .{register} %v, %w; .reg .b64 %to; .reg .b32 %t; .reg .pred %p;"
    ptx = entry(lines, [".u64 .ptr .global .align 1", kind, ".u8", kind], threads=32, registers=registers)
    run = run_ptx(ptx, (1,), [out, argument, 1, argument])
    assert not run.findings
    assert bits(out)[:2] == [want, want]


FORMS |= dict.fromkeys(
    ["ld.const.b32", "ld.const.v2.b32", "mov.u64 (address of a variable)", "cvta", "ld.local.b32", "st.local.b32"]
)


def test_module_variables_hold_their_initialisers() -> None:
    """.const and .global arrays: symbol with an offset, register addresses, and vector loads."""
    module = (
        ".const .align 8 .b32 table[4] = {10, -20, 0x30, 40};\n"
        ".global .align 1 .b8 text_[5] = {72, 105, 33, 10, 0};\n"
        ".global .align 4 .u32 zeros[3];"
    )
    lines = [
        "ld.const.b32 %d, [table+4];",
        "ld.const.v2.b32 {%e, %f}, [table+8];",
        "and.b32 %i, %thread, 3;",
        "mov.u64 %c, table;",
        "mad.wide.s32 %c, %i, 4, %c;",
        "ld.const.u32 %g, [%c];",
        "mov.u64 %s, text_;",
        "cvt.u64.u32 %o, %i;",
        "add.s64 %s, %s, %o;",
        "ld.global.u8 %h, [%s];",
        "ld.global.b32 %j, [zeros+8];",
    ]
    names = dict.fromkeys("defghj", "b32")
    got = execute(lines, {}, names, registers=".reg .b32 %i; .reg .b64 %c, %s, %o;", module=module)
    table, text = [10, mask(32) - 19, 0x30, 40], [72, 105, 33, 10]
    assert got == [(table[1], 0x30, 40, table[t % 4], text[t % 4], 0) for t in range(THREADS)]


def test_generic_addresses_reach_the_space_they_came_from() -> None:
    """Cvta to and from generic for global, shared and const; ld and st without a space."""
    data = memory(list(range(500, 500 + THREADS)), "b32")
    lines = [
        "cvta.to.global.u64 %g, %buffer;",
        "mad.wide.s32 %g, %thread, 4, %g;",
        "ld.global.b32 %d, [%g];",
        "cvta.global.u64 %n, %g;",
        "ld.b32 %e, [%n];",
        "mov.b32 %small, global_smem;",
        "mad.lo.s32 %small, %thread, 4, %small;",
        "st.shared.b32 [%small], %d;",
        "cvt.u64.u32 %s, %small;",
        "cvta.shared.u64 %s, %s;",
        "ld.b32 %f, [%s];",
        "add.s32 %f, %f, 1;",
        "st.b32 [%s], %f;",
        "ld.shared.b32 %f, [%small];",
        "cvta.to.shared.u64 %s, %s;",
        "cvt.u32.u64 %h, %s;",
        "sub.s32 %h, %h, %small;",
        "mov.u64 %c, table;",
        "cvta.const.u64 %c, %c;",
        "ld.b32 %k, [%c+4];",
    ]
    registers = ".reg .b64 %g, %n, %s, %c; .reg .b32 %small;"
    names = dict.fromkeys("defhk", "b32")
    module = ".const .align 4 .b32 table[2] = {1, 77};"
    got = execute(
        lines, {}, names, registers=registers, module=module, buffers={"buffer": data}, shared_bytes=4 * THREADS
    )
    assert got == [(500 + t, 500 + t, 501 + t, 0, 77) for t in range(THREADS)]


def test_local_memory_is_each_threads_own() -> None:
    """A .local array as sin and cos use it: an address in a register, written and read by each thread alone."""
    lines = [
        "mov.b64 %l, depot;",
        "add.s32 %v, %index, 3;",
        "st.local.b32 [%l+4], %v;",
        "st.local.b32 [depot], %thread;",
        "ld.local.b32 %d, [depot+4];",
        "cvta.local.u64 %n, %l;",
        "ld.b32 %e, [%n];",
        "ld.local.v2.b32 {%f, %g}, [%l];",
    ]
    registers = ".local .align 8 .b8 depot[16];\n.reg .b64 %l, %n;\n.reg .b32 %v;"
    got = execute(lines, {}, dict.fromkeys("defg", "b32"), registers=registers)
    assert got == [(t + 3, t, t, t + 3) for t in range(THREADS)]


Rule = Callable[[int, int], int]


def in_floats(form: Format) -> Rule:
    return lambda old, new: encode(form, add(decode(form, old), decode(form, new)))


def in_halves(form: Format) -> Rule:
    one = in_floats(form)
    return lambda old, new: one(old & 0xFFFF, new & 0xFFFF) | one(old >> 16, new >> 16) << 16


def in_integers(kind: str, operation: Callable[[int, int], int]) -> Rule:
    width = int(kind[1:])

    def rule(old: int, new: int) -> int:
        values = [signed(v, width) if kind[0] == "s" else v for v in (old, new)]
        return operation(*values) & mask(width)

    return rule


# operation and type -> (register, the new content from the old one and the operand); section 9.7.13.5.
ATOMICS: dict[str, tuple[str, Rule]] = {
    "exch.b32": ("b32", lambda old, new: new),
    "exch.b64": ("b64", lambda old, new: new),
    "inc.u32": ("b32", lambda old, new: 0 if old >= new else old + 1),
    "dec.u32": ("b32", lambda old, new: new if old == 0 or old > new else old - 1),
    "add.f32": ("b32", in_floats(F32)),
    "add.f64": ("b64", in_floats(F64)),
    "add.noftz.f16": ("b16", in_floats(F16)),
    "add.noftz.bf16": ("b16", in_floats(BF16)),
    "add.noftz.f16x2": ("b32", in_halves(F16)),
    "add.noftz.bf16x2": ("b32", in_halves(BF16)),
}
for kind in ("u32", "s32", "u64"):
    ATOMICS[f"add.{kind}"] = (f"b{kind[1:]}", in_integers(kind, lambda x, y: x + y))
for kind in ("u32", "s32", "u64", "s64"):
    ATOMICS[f"min.{kind}"] = (f"b{kind[1:]}", in_integers(kind, min))
    ATOMICS[f"max.{kind}"] = (f"b{kind[1:]}", in_integers(kind, max))
for kind in ("b32", "b64"):
    ATOMICS[f"and.{kind}"] = (kind, lambda x, y: x & y)
    ATOMICS[f"or.{kind}"] = (kind, lambda x, y: x | y)
    ATOMICS[f"xor.{kind}"] = (kind, lambda x, y: x ^ y)
ATOMIC_FORMS = {f"atom.{space}.{name}": name for space in ("global", "shared") for name in ATOMICS}
ATOMIC_FORMS |= {f"red.global.{name}": name for name in ATOMICS if not name.startswith("exch")}
# The orders and scopes that Triton writes, before and after the space.
ATOMIC_FORMS |= {f"atom.global.gpu.{sem}.add.u32": "add.u32" for sem in ("relaxed", "acquire", "release", "acq_rel")}
ATOMIC_FORMS |= {
    "atom.global.sys.acq_rel.exch.b32": "exch.b32",
    "atom.global.cta.relaxed.add.f32": "add.f32",
    "atom.acq_rel.gpu.global.max.s32": "max.s32",
    "atom.relaxed.gpu.global.add.u64": "add.u64",
    "atom.shared.gpu.acq_rel.add.f32": "add.f32",
    "red.relaxed.gpu.global.add.f32": "add.f32",
    "red.global.gpu.relaxed.add.u32": "add.u32",
}
FORMS |= ATOMIC_FORMS


def atomic_operands(name: str, count: int) -> list[tuple[int, int]]:
    """Old content and operand. Global f32 sums flush subnormals on today's chips (9.7.13.5), so none are drawn."""
    register, _ = ATOMICS[name]
    kind = name.rsplit(".", 1)[1]
    formats = {"f32": F32, "f64": F64, "f16": F16, "bf16": BF16, "f16x2": F16, "bf16x2": BF16}
    if kind not in formats:
        return integers(int(register[1:]), int(register[1:]))[-count:]
    form = formats[kind]
    numbers = [encode(form, finite(i)) for i in (0, 1, -1, 3, -7, 100, -255)]
    numbers += [v for (v,) in floats(form) if 0.01 < abs(approximate(form, v)) < 200]
    draw = random.Random(name)
    pairs = [(draw.choice(numbers), draw.choice(numbers)) for _ in range(count)]
    if not kind.endswith("x2"):
        return pairs
    others = [(draw.choice(numbers), draw.choice(numbers)) for _ in range(count)]
    return [(a | c << 16, b | d << 16) for (a, b), (c, d) in zip(pairs, others, strict=True)]


def approximate(form: Format, value: int) -> float:
    number = decode(form, value)
    return 0.0 if number.is_nan or number.is_infinite else float(number.number)


@pytest.mark.parametrize("opcode", ATOMIC_FORMS)
def test_atomic_returns_the_old_value_and_stores_the_new(opcode: str) -> None:
    """Every lane on its own address: the old content comes back (atom) and the operation's result is stored."""
    name = ATOMIC_FORMS[opcode]
    register, rule = ATOMICS[name]
    size = int(register[1:]) // 8
    pairs = atomic_operands(name, THREADS)
    old, operand = (list(column) for column in zip(*pairs, strict=True))
    target = memory(old, register)
    returns = opcode.startswith("atom")
    address = [f"mad.wide.s32 %to, %thread, {size}, %target;"]
    if ".shared" in opcode:
        lines = [
            *address,
            "mov.b32 %at, global_smem;",
            f"mad.lo.s32 %at, %thread, {size}, %at;",
            f"ld.global.{register} %d, [%to];",
            f"st.shared.{register} [%at], %d;",
            f"{opcode} %d, [%at], %a;",
            f"ld.shared.{register} %e, [%at];",
            f"st.global.{register} [%to], %e;",
        ]
    else:
        lines = [*address, f"{opcode} {'%d, ' if returns else ''}[%to], %a;"]
    got = execute(
        lines,
        {"a": (register, operand)},
        {"d": register} if returns else {},
        registers=f".reg .b64 %to; .reg .b32 %at; .reg .{register} %e;",
        buffers={"target": target},
        shared_bytes=size * THREADS if ".shared" in opcode else 0,
    )
    want = [rule(x, y) for x, y in pairs]
    assert bits(target) == want
    assert not returns or [d for (d,) in got] == old


SWAPS = {f"atom.{space}.cas.b{width}": (space, width) for space in ("global", "shared") for width in (16, 32, 64)}
SWAPS["atom.global.gpu.acq_rel.cas.b32"] = SWAPS["atom.acquire.gpu.global.cas.b32"] = ("global", 32)
FORMS |= SWAPS


@pytest.mark.parametrize("opcode", SWAPS)
def test_compare_and_swap_stores_only_where_equal(opcode: str) -> None:
    """Half of the lanes compare equal; all get the old content."""
    space, width = SWAPS[opcode]
    register, size = f"b{width}", width // 8
    draw = random.Random(opcode)
    old = [draw.getrandbits(width) for _ in range(THREADS)]
    compared = [value if i % 2 else value ^ 1 << (i % width) for i, value in enumerate(old)]
    new = [draw.getrandbits(width) for _ in range(THREADS)]
    target = memory(old, register)
    lines = [f"mad.wide.s32 %to, %thread, {size}, %target;", f"{opcode} %d, [%to], %a, %b;"]
    if space == "shared":
        lines = [
            lines[0],
            "mov.b32 %at, global_smem;",
            f"mad.lo.s32 %at, %thread, {size}, %at;",
            f"ld.global.{register} %d, [%to];",
            f"st.shared.{register} [%at], %d;",
            f"{opcode} %d, [%at], %a, %b;",
            f"ld.shared.{register} %e, [%at];",
            f"st.global.{register} [%to], %e;",
        ]
    got = execute(
        lines,
        {"a": (register, compared), "b": (register, new)},
        {"d": register},
        registers=f".reg .b64 %to; .reg .b32 %at; .reg .{register} %e;",
        buffers={"target": target},
        shared_bytes=size * THREADS if space == "shared" else 0,
    )
    assert [d for (d,) in got] == old
    assert bits(target) == [n if x == c else x for x, c, n in zip(old, compared, new, strict=True)]


@pytest.mark.parametrize("opcode", ["atom.global.add.u32", "atom.global.gpu.acq_rel.add.u32", "atom.global.inc.u32"])
def test_atomics_on_one_address_see_each_other(opcode: str) -> None:
    """256 lanes of two CTAs on one word: the old values are all different and the last sum is complete."""
    target = memory([1000], "b32")
    operand = 2 if ".add" in opcode else 1 << 20
    got = execute(
        f"{opcode} %d, [%target], %a;", {"a": ("b32", [operand] * 256)}, {"d": "b32"}, buffers={"target": target}
    )
    step = 2 if ".add" in opcode else 1
    assert sorted(d for (d,) in got) == [1000 + step * i for i in range(256)]
    assert bits(target) == [1000 + step * 256]


def test_atomic_without_a_result_and_with_a_guard() -> None:
    """The sink ``_`` drops the old value; a false guard leaves memory alone."""
    target = memory([5] * THREADS, "b32")
    lines = [
        "mad.wide.s32 %to, %thread, 4, %target;",
        "and.b32 %odd, %thread, 1;",
        "setp.ne.b32 %p, %odd, 0;",
        "@%p atom.global.add.u32 _, [%to], 3;",
        "@!%p red.global.add.u32 [%to], 4;",
    ]
    execute(lines, {}, {}, registers=".reg .b64 %to; .reg .b32 %odd; .reg .pred %p;", buffers={"target": target})
    assert bits(target) == [8 if thread % 2 else 9 for thread in range(THREADS)]


VECTOR_ATOMICS = {
    "atom.global.add.v2.f32": (2, "b32", in_floats(F32), "add.f32"),
    "atom.global.add.v4.f32": (4, "b32", in_floats(F32), "add.f32"),
    "atom.global.gpu.relaxed.add.noftz.v2.f16": (2, "b16", in_floats(F16), "add.noftz.f16"),
    "atom.global.gpu.relaxed.add.noftz.v4.bf16x2": (4, "b32", in_halves(BF16), "add.noftz.bf16x2"),
    "red.global.add.v2.f32": (2, "b32", in_floats(F32), "add.f32"),
    "red.global.add.v4.f32": (4, "b32", in_floats(F32), "add.f32"),
}
FORMS |= VECTOR_ATOMICS


@pytest.mark.parametrize("opcode", VECTOR_ATOMICS)
def test_vector_atomic_works_on_each_element(opcode: str) -> None:
    """Neighbouring elements, each updated by its own operand (sm_90 and later)."""
    count, register, rule, name = VECTOR_ATOMICS[opcode]
    size = int(register[1:]) // 8
    pairs = atomic_operands(name, THREADS * count)
    target = memory([old for old, _ in pairs], register)
    operands = {f"a{i}": (register, [new for _, new in pairs[i::count]]) for i in range(count)}
    braces = "{" + ", ".join(f"%{n}" for n in operands) + "}"
    results = {f"d{i}": register for i in range(count)} if opcode.startswith("atom") else {}
    destination = "{" + ", ".join(f"%{n}" for n in results) + "}, " if results else ""
    lines = [f"mad.wide.s32 %to, %thread, {size * count}, %target;", f"{opcode} {destination}[%to], {braces};"]
    got = execute(lines, operands, results, registers=".reg .b64 %to;", buffers={"target": target})
    assert bits(target) == [rule(old, new) for old, new in pairs]
    assert not results or [value for row in got for value in row] == [old for old, _ in pairs]


COPIES = {f"cp.async.ca.shared.global ({size} bytes)": ("ca", size) for size in (4, 8, 16)}
COPIES["cp.async.cg.shared.global (16 bytes)"] = ("cg", 16)
FORMS |= COPIES | dict.fromkeys(["cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all"])


@pytest.mark.parametrize("form", COPIES)
@pytest.mark.parametrize("wait", ["cp.async.commit_group; cp.async.wait_group 0x0;", "cp.async.wait_all;"])
def test_asynchronous_copy_fills_with_zeros_past_the_source_size(form: str, wait: str) -> None:
    """A copy takes ``src-size`` bytes and zeros the rest; without that operand it takes all (9.7.9.25.3.1)."""
    cache, size = COPIES[form]
    data = random_bytes(form, size * THREADS)
    taken = [thread * 5 % (size + 1) for thread in range(THREADS)]
    words = [f"w{i}" for i in range(size // 4)]
    fulls = [f"f{i}" for i in range(size // 4)]
    opcode = f"cp.async.{cache}.shared.global"
    lines = [
        "mov.b32 %at, global_smem;",
        f"mad.lo.s32 %at, %thread, {2 * size}, %at;",
        f"mad.wide.s32 %from, %thread, {size}, %buffer;",
        f"{opcode} [ %at + 0 ], [ %from + 0 ], {size:#x}, %n;",
        f"{opcode} [%at+{size}], [%from], {size};",
        wait,
        *(f"ld.shared.b32 %{name}, [%at+{4 * i}];" for i, name in enumerate([*words, *fulls])),
    ]
    got = execute(
        lines,
        {"n": ("b32", taken)},
        dict.fromkeys([*words, *fulls], "b32"),
        registers=".reg .b64 %from; .reg .b32 %at;",
        buffers={"buffer": memory(data, "b8")},
        shared_bytes=2 * size * THREADS,
    )
    for thread, values in enumerate(got):
        whole = data[size * thread : size * (thread + 1)]
        part = whole[: taken[thread]] + [0] * (size - taken[thread])
        want = [read(part, 4 * i, 4) for i in range(size // 4)] + [read(whole, 4 * i, 4) for i in range(size // 4)]
        assert list(values) == want, f"{form} lane {thread}, {taken[thread]} bytes"


def test_cache_policy_does_not_change_the_value() -> None:
    """Createpolicy and an L2 cache hint on load and store, as Triton writes eviction policies."""
    data, out = memory(list(range(THREADS)), "b32"), memory([0] * THREADS, "b32")
    lines = [
        "mad.wide.s32 %from, %thread, 4, %data;",
        "mad.wide.s32 %to, %thread, 4, %out;",
        "createpolicy.fractional.L2::evict_first.b64 %policy, 1.0;",
        "ld.global.L1::evict_first.L2::cache_hint.b32 { %v }, [ %from + 0 ], %policy;",
        "st.global.L1::evict_last.L2::cache_hint.b32 [ %to + 0 ], { %v }, %policy;",
    ]
    registers = ".reg .b64 %from, %to, %policy; .reg .b32 %v;"
    execute(lines, {}, {}, registers=registers, buffers={"data": data, "out": out})
    assert bits(out) == list(range(THREADS))


FORMS |= dict.fromkeys(["createpolicy.fractional.L2::evict_first.b64", "ld.global.L1::evict_first.L2::cache_hint.b32"])


FENCES = [
    "fence.proxy.async.shared::cta",
    "fence.proxy.async",
    "fence.acq_rel.gpu",
    "fence.acq_rel.cta",
    "fence.sc.gpu",
    "membar.cta",
    "membar.gl",
]
FORMS |= dict.fromkeys(FENCES)


@pytest.mark.parametrize("fence", FENCES)
def test_fence_orders_and_changes_nothing(fence: str) -> None:
    """A value stored before the fence and the barrier is read by the neighbour after them."""
    lines = [
        "mov.b32 %at, global_smem;",
        "mad.lo.s32 %own, %thread, 4, %at;",
        "st.shared.b32 [%own], %index;",
        f"{fence};",
        "bar.sync 0;",
        "xor.b32 %other, %thread, 1;",
        "mad.lo.s32 %own, %other, 4, %at;",
        "ld.shared.b32 %d, [%own];",
    ]
    got = execute(lines, {}, {"d": "b32"}, registers=".reg .b32 %at, %own, %other;", shared_bytes=4 * THREADS)
    assert [d for (d,) in got] == [thread ^ 1 for thread in range(THREADS)]


def test_wrong_extension_fails() -> None:
    """The load test can fail: a sign-extended byte is not a zero-extended one."""
    data = memory([0x80 + i % 128 for i in range(THREADS)], "b8")
    lines = ["cvt.s64.s32 %to, %thread;", "add.s64 %to, %to, %buffer;", "ld.global.s8 %d, [%to];"]
    got = execute(lines, {}, {"d": "b32"}, registers=".reg .b64 %to;", buffers={"buffer": data})
    assert [d for (d,) in got] != [0x80 + i % 128 for i in range(THREADS)]
    assert [d for (d,) in got] == [signed(0x80 + i % 128, 8) & mask(32) for i in range(THREADS)]
