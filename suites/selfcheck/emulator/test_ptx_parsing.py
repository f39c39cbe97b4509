"""Parsing of PTX text: what compilers emit is understood, and what they do not is refused in words."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_conformance.suites.emulator import EmulatorError, PTXError, UnsupportedInstruction, run_ptx
from mla_conformance.suites.emulator.ptx import Instruction, parse, split_operands

from .builds import Build
from .one_instruction import HEADER


def module(body: str = "ret;", *, parameters: str = "", head: str = "", threads: str = ".reqntid 32") -> str:
    """A module with one entry, its body from PTX line 10 on if ``head`` is one line."""
    return f"{HEADER}{head}\n\n.visible .entry kernel(\n{parameters}\n)\n{threads}\n{{\n{body}\n}}\n"


def instructions(body: str, **others: str) -> list[Instruction]:
    """The instructions of a body."""
    return [ins for block in parse(module(body, **others)).blocks for ins in block]


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("%r1, %r2, 7", ("%r1", "%r2", "7")),
        ("{%r1, %r2}, [%rd1+8]", ("{%r1, %r2}", "[%rd1+8]")),
        ("{ _, %r2 }, {%a,%b,  %c}", ("{ _, %r2 }", "{%a,%b,  %c}")),
        ("%r1|%p1, %r2, 0x1f, -1", ("%r1|%p1", "%r2", "0x1f", "-1")),
        ("(%r1), f, (%r2, %r3)", ("(%r1)", "f", "(%r2, %r3)")),
        ("[%rd1, {%r1, %r2}], [%rd2]", ("[%rd1, {%r1, %r2}]", "[%rd2]")),
        ("", ()),
    ],
)
def test_operands_are_cut_at_outer_commas(text: str, operands: tuple[str, ...]) -> None:
    """Vectors, addresses and argument lists stay whole."""
    assert split_operands(text) == operands


def test_one_line_may_hold_several_statements_and_one_statement_several_lines() -> None:
    """Statements end at semicolons; an instruction has the number of the line on which it begins."""
    found = instructions(".reg .b32 %r<3>; mov.b32 %r0, 1; mov.b32\n  %r1,\n  %r0; // text; more\nret;")
    assert [(ins.opcode, ins.operands, ins.line) for ins in found] == [
        ("mov.b32", ("%r0", "1"), 11),
        ("mov.b32", ("%r1", "%r0"), 11),
        ("ret", (), 14),
    ]


def test_guards_are_read() -> None:
    """``@p`` and ``@!p`` are kept apart from the opcode, and stay in the text."""
    first, second = instructions(".reg .pred %p<2>; @%p0 bra END; @!%p1 ret;\nEND: ret;")[:2]
    assert (first.guard, first.negated, first.opcode, first.text) == ("%p0", False, "bra", "@%p0 bra END")
    assert (second.guard, second.negated, second.opcode) == ("%p1", True, "ret")


def test_scopes_of_inline_assembly_keep_equal_names_apart() -> None:
    """Two braces that declare %t have two registers, both hidden outside, and the outer one of that name is a third."""
    body = ".reg .b32 %t, %u;\n{ .reg .b64 %t; mov.b64 %t, 1; }\n{ .reg .b16 %t; mov.b16 %t, 2; { mov.b16 %t, 3; } }\n"
    body += "mov.b32 %t, %u;"
    names = [ins.operands[0] for ins in instructions(body)]
    entry = parse(module(body))
    assert [entry.register_type(name) for name in names] == ["b64", "b16", "b16", "b32"]
    assert names[1] == names[2]
    assert len(set(names)) == 3


def test_labels_of_inline_assembly_may_repeat() -> None:
    """Each scope's branch means its own label; a branch to a label outside finds that one."""
    body = "{ bra.uni done; done: }\n{ bra.uni done; done: }\n{ bra.uni LAST; }\nLAST: ret;"
    entry = parse(module(body))
    targets = [block[-1].operands[0] for block in entry.blocks if block and block[-1].parts[0] == "bra"]
    assert len(set(targets)) == 3
    assert all(target in entry.labels for target in targets)
    assert targets[2] == "LAST"


def test_source_lines_follow_loc_and_file() -> None:
    """A place is the base name and the line; inlined code names its caller too, and line 0 keeps the place before."""
    files = '.file 1 "/some/where/kernel.py"\n.file 2 "/else/math.py"'
    body = (
        ".reg .b32 %r;\nmov.b32 %r, 0;\n.loc 1 57 9 // kernel.py:57:9\nmov.b32 %r, 1;\n"
        ".loc 2 8 1, function_name $L__info_string0, inlined_at 1 60 5\nmov.b32 %r, 2;\n.loc 1 0 0\nmov.b32 %r, 3;\n"
        ".loc 1 70 5, function_name $L__info_string0, inlined_at 1 61 5\nmov.b32 %r, 4;"
    )
    places = [ins.source for ins in instructions(body, head=files)]
    assert places == ["", "kernel.py:57", "kernel.py:60 (in math.py:8)", "kernel.py:60 (in math.py:8)", "kernel.py:70"]


def test_files_may_be_listed_after_the_entry() -> None:
    """Triton writes ``.file`` behind the body."""
    text = module(".reg .b32 %r;\n.loc 1 5 1\nmov.b32 %r, 0;") + '\n.file 1 "/a/b" "late.py"\n'
    assert [ins.source for block in parse(text).blocks for ins in block] == ["late.py:5"]


def test_declarations_are_read() -> None:
    """Variables of every space, parameters with and without arrays, the target and the threads."""
    head = (
        ".extern .shared .align 16 .b8 smem[];\n.global .align 4 .b32 table[3] = {1, 0xff, -1};\n"
        ".const .align 8 .f64 pi = 0d400921FB54442D18;\n.shared .b16 few[8];"
    )
    parameters = ".param .u64 .ptr .global .align 1 a,\n.param .align 64 .b8 map[128],\n.param .f32 scale"
    entry = parse(
        module(".local .align 8 .b8 frame[24];\nret;", head=head, parameters=parameters, threads=".reqntid 64, 1, 1")
    )
    assert (entry.name, entry.target, entry.threads) == ("kernel", "sm_120a", 64)
    assert [(p.name, p.type, p.count) for p in entry.parameters] == [
        ("a", "u64", 1),
        ("map", "b8", 128),
        ("scale", "f32", 1),
    ]
    found = {name: (v.space, v.size, v.align) for name, v in entry.variables.items()}
    assert found == {
        "smem": ("shared", 0, 16),
        "table": ("global", 12, 4),
        "pi": ("const", 8, 8),
        "few": ("shared", 16, 2),
        "frame": ("local", 24, 8),
    }
    assert entry.variables["table"].initial == bytes([1, 0, 0, 0, 255, 0, 0, 0, 255, 255, 255, 255])
    assert entry.variables["pi"].initial == bytes.fromhex("182d4454fb210940")


MOV = ".reg .b32 %r; .reg .b16 %h; .reg .b64 %w;\n"
REFUSED: dict[str, tuple[str, str]] = {
    "nothing": ("", r"0 entries"),
    "prose": ("kernel = 5\n", r"0 entries"),
    "two entries": (module() + module(), r"2 entries"),
    "cut in the head": (module().split("{")[0], r"kernel has no body"),
    "cut in the body": (module(MOV + "mov.b32 %r")[:-5], r"kernel does not end: a closing brace"),
    "missing brace": (module().rstrip("}\n"), r"kernel does not end: a closing brace"),
    "open scope": (module("{ ret;"), r"kernel does not end: a closing brace"),
    "absurd register count": (module(".reg .b32 %r<99999999999>;"), r"PTX line 11: %r<99999999999>"),
    "many large register counts": (module(".reg .b32 %r<900000>;\n.reg .b32 %q<900000>;"), r"PTX line 12: more than"),
    "negative register count": (module(".reg .b32 %r<-3>;"), r"PTX line 11: %r<-3>"),
    "no register": (module(".reg .b32;"), r"PTX line 11: register declaration .*\.reg \.b32"),
    "unknown register type": (module(".reg .b33 %r;"), r"PTX line 11: registers of type \.b33"),
    "source line within a line": (module("ret; .loc 1 5 1\nret;"), r"PTX line 11: a line of its own .*\.loc"),
    "unknown directive": (module(".frobnicate 5;"), r"PTX line 11: directive not understood: \.frobnicate 5"),
    "undeclared target": (module("mov.b32 %q, 5;"), r"PTX line 11: %q is not declared: `mov\.b32 %q, 5`"),
    "number over the count": (module(".reg .b32 %r<3>;\nmov.b32 %r3, 5;"), r"PTX line 12: %r3 is not declared"),
    "narrow source": (module(MOV + "mov.b32 %r, %h;"), r"PTX line 12: %h is narrower than \.b32: `mov\.b32 %r, %h`"),
    "narrow target": (module(MOV + "add.u64 %r, %w, %w;"), r"PTX line 12: %r cannot hold \.u64"),
    "number as predicate": (module(MOV + "@%r ret;"), r"PTX line 12: %r is no \.pred: `@%r ret`"),
    "missing label": (module("bra NOWHERE;"), r"PTX line 11: no label NOWHERE: `bra NOWHERE`"),
    "branch to nothing": (module("bra;"), r"PTX line 11: no label"),
    "label twice": (module("L: ret;\nL: ret;"), r"PTX line 12: L is declared twice"),
    "variable twice": (module(head=".shared .b8 s[4]; \n.shared .b8 s[8];"), r"PTX line 5: s is declared twice"),
    "parameter twice": (module(parameters=".param .u32 a,\n.param .u32 a"), r"a is declared twice"),
    "too few operands": (module(MOV + "shl.b32 %r, %r;"), r"PTX line 12: .*`shl\.b32 %r, %r`"),
    "barrier that is none": (module("bar.sync 16;"), r"PTX line 11: .*`bar\.sync 16`"),
    "barrier of half a warp": (module("bar.sync 1, 16;"), r"PTX line 11: .*`bar\.sync 1, 16`"),
    "parameter read past its end": (
        module(".reg .b64 %x; ld.param.u64 %x, [a+8];", parameters=".param .u64 a"),
        r"PTX line 11: a has 8 bytes",
    ),
    "copy of 5 bytes": (
        module(MOV + "cp.async.ca.shared.global [%r], [%w], 5;"),
        r"PTX line 12: a copy has 4, 8 or 16",
    ),
    "huge variable": (module(head=".shared .b8 s[99999999999];"), r"PTX line 4: a \.shared variable has at most"),
    "huge frame": (module(".local .b8 s[99999999999];"), r"PTX line 11: a \.local variable has at most"),
    "huge constants": (module(head=".global .b8 s[99999999999];"), r"PTX line 4: a \.global variable has at most"),
    "alignment 0": (module(head=".shared .align 0 .b8 s[4];"), r"PTX line 4: .*aligned to a power of two"),
    "initial word": (module(head=".global .b32 s[2] = {here, 2};"), r"PTX line 4: an initial value .*here"),
    "too many initial values": (module(head=".global .b8 s[2] = {1, 2, 3};"), r"PTX line 4: 3 initial bytes for 2"),
    "huge parameter": (module(parameters=".param .b8 a[99999]"), r"PTX line 7: .*more than 32764 bytes"),
    "two-dimensional block": (module(threads=".reqntid 32, 2"), r"PTX line 9: blocks of more than one dimension"),
    "part of a warp": (module(threads=".reqntid 40"), r"40 threads .*whole warps"),
    "no threads": (module(threads=""), r"None threads .*whole warps"),
    "too many threads": (module(threads=".reqntid 2048"), r"2048 threads .*up to 1024"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_text_is_refused_in_words(case: str) -> None:
    """The error names the line and the text, or says of the whole what is missing."""
    text, message = REFUSED[case]
    with pytest.raises(PTXError, match=message):
        run_ptx(text, (1,), [0] * text.count(".param ."))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("frobnicate.b32 5;", r"PTX line 11: not implemented: `frobnicate\.b32 5`"),
        (".reg .b32 %r; mov.b32 %r, %undeclared;", r"PTX line 11: .*%undeclared is not declared"),
        ("@%p ret;", r"PTX line 11: .*%p is not declared"),
        ("bar.sync;", r"PTX line 11: .*`bar\.sync`"),
    ],
)
def test_what_is_not_implemented_is_named(body: str, message: str) -> None:
    """Unknown opcodes and names are given with their line and text."""
    with pytest.raises(UnsupportedInstruction, match=message):
        run_ptx(module(body), (1,), [])


def test_a_vector_has_as_many_registers_as_its_opcode_says() -> None:
    """A damaged text may have lost a brace; the access would be another one."""
    with pytest.raises(PTXError, match=r"PTX line 11: st\.shared\.v4\.b32 takes 4 registers, not %r: "):
        run_ptx(module(".reg .b32 %r; st.shared.v4.b32 [%r], %r;"), (1,), [])


@pytest.mark.parametrize(
    "grid", [(), (1, 1, 1, 1), (-1,), (1, -2), (2**40,), (2**20, 2**20), (1.5,), ("x",), None], ids=repr
)
def test_absurd_grid_is_refused(grid: Any) -> None:
    """A grid has one to three whole numbers, and no more CTAs than a run can end with."""
    with pytest.raises(PTXError, match="grid="):
        run_ptx(module(), grid, [])


@pytest.mark.parametrize(
    ("parameter", "arguments", "message"),
    [
        (".param .u64 a", [], r"kernel has 1 parameters, 0 arguments.*scratch"),
        ("", [1], r"kernel has 0 parameters, 1 arguments"),
        (".param .u64 a", [torch.zeros(1, device="meta")], r"argument a: a tensor on meta; .* CPU tensors"),
        (".param .u64 a", ["x"], r"argument a='x': the kernel takes \.u64"),
        (".param .u64 a", [None], r"argument a=None: the kernel takes \.u64"),
        (".param .u8 a", [1.5], r"argument a=1\.5: the kernel takes \.u8"),
        (".param .align 8 .b8 a[16]", [5], r"argument a=5: the kernel takes \.b8\[16\]"),
        (".param .align 8 .b8 a[16]", [b"123"], r"3 bytes for a parameter of 16"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(parameter: str, arguments: list[Any], message: str) -> None:
    """Count, device and type of the arguments are checked against the parameters."""
    with pytest.raises(PTXError, match=message):
        run_ptx(module(parameters=parameter), (1,), arguments)


def test_cuda_tensor_is_refused() -> None:
    """A tensor on a GPU has no bytes here; a stand-in serves where there is no GPU."""

    class OnAGPU:
        device = torch.device("cuda", 0)

        def untyped_storage(self) -> None:
            raise AssertionError("its storage must not be asked for")

    with pytest.raises(PTXError, match=r"a tensor on cuda:0; the emulator needs CPU tensors"):
        run_ptx(module(parameters=".param .u64 a"), (1,), [OnAGPU()])


@pytest.mark.parametrize("size", [-4, 2**45])
def test_absurd_shared_memory_is_refused(size: int) -> None:
    """Dynamic shared memory is a size that a machine can have."""
    with pytest.raises(PTXError, match=f"shared_bytes={size}"):
        run_ptx(module(), (1,), [], shared_bytes=size)


def mutated(lines: list[str], draw: random.Random) -> str:
    """A text with a few lines deleted, repeated, swapped, cut, or with a character or a word changed."""
    lines = list(lines)
    for _ in range(draw.randint(1, 3)):
        i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
        at = draw.randrange(len(lines[i]) + 1)
        match draw.randrange(7):
            case 0:
                del lines[i]
            case 1:
                lines.insert(j, lines[i])
            case 2:
                lines[i], lines[j] = lines[j], lines[i]
            case 3:
                lines = (
                    [*lines[:i], lines[i][:at]] if draw.random() < 0.3 else [*lines[:i], lines[i][:at], *lines[i + 1 :]]
                )
            case 4:
                lines[i] = lines[i][:at] + draw.choice("{}[]();,.%@!<>:019abx-+ _|/\"'\\$#") + lines[i][at:]
            case 5:
                lines[i] = lines[i][:at] + lines[i][at + 1 :]
            case 6:
                here, there = (re.findall(r"[%\w.$]+", lines[k]) for k in (i, j))
                if here and there:
                    lines[i] = lines[i].replace(draw.choice(here), draw.choice(there), 1)
        lines = lines or [""]
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["matmul_3", "softmax", "transpose_1_warp"])
@settings(max_examples=80, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_damaged_text_never_crashes(name: str, seed: int, build_of: Callable[[str], Build]) -> None:
    """Whatever is done to a real text, the run ends, or an error of this package says why it does not."""
    build = build_of(name)
    lines = build.ptx.split("\t.section")[0].splitlines()
    with suppress(EmulatorError):
        build.run(mutated(lines, random.Random(seed)), budget=2000)
