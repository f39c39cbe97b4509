"""Run one PTX instruction on many inputs at once: every lane is a test vector.

A small entry loads each lane's operands from global memory into registers, executes the given lines and stores the
results. Registers are named as the caller names them (``%a``, ``%d``); kinds are b16, b32, b64 and pred.

Each test module lists what it covers in ``FORMS``; the opcode is a key's text up to the first space.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import torch

from mla_conformance.suites.emulator import run_ptx

from .exact import Format, is_nan, mask, signed

THREADS = 128
HEADER = ".version 9.3\n.target sm_120a\n.address_size 64\n"
KINDS = {"b8": (8, torch.int8), "b16": (16, torch.int16), "b32": (32, torch.int32), "b64": (64, torch.int64)}
Vector = tuple[int, ...]


def memory(values: Sequence[int], kind: str) -> torch.Tensor:
    """Bit patterns as a tensor of the kind's width; a predicate takes a 32-bit word."""
    width, dtype = KINDS["b32" if kind == "pred" else kind]
    return torch.tensor([signed(value, width) for value in values], dtype=dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    """The unsigned bit patterns of an integer tensor."""
    width = tensor.element_size() * 8
    return [value & mask(width) for value in tensor.flatten().tolist()]


def entry(
    body: Sequence[str], parameters: Sequence[str], *, threads: int = THREADS, registers: str = "", module: str = ""
) -> str:
    """A whole module with one entry; ``parameters`` are PTX types, named p0, p1 and so on."""
    listed = ",\n".join(f"\t.param {kind} p{index}" for index, kind in enumerate(parameters))
    lines = "\n\t".join(body)
    return (
        f"{HEADER}\n{module}\n.visible .entry one_instruction(\n{listed}\n)\n.reqntid {threads}\n"
        f"{{\n{registers}\n\t{lines}\n\tret;\n}}\n"
    )


def execute(
    lines: str | Sequence[str],
    inputs: Mapping[str, tuple[str, Sequence[int]]],
    outputs: Mapping[str, str],
    *,
    registers: str = "",
    module: str = "",
    threads: int = THREADS,
    buffers: Mapping[str, torch.Tensor] | None = None,
    shared_bytes: int = 0,
) -> list[tuple[int, ...]]:
    """Each lane's outputs, in the order of ``outputs``.

    Args:
        lines: PTX to execute, one instruction or several.
        inputs: register name without '%' -> (kind, one bit pattern a lane); all of one length.
        outputs: register name without '%' -> kind; a predicate gives 0 or 1.
        registers: further ``.reg`` lines that ``lines`` needs.
        module: module-scope declarations.
        threads: threads of a CTA; the grid covers the lanes, padded with the first one.
        buffers: register name without '%' -> a tensor whose address the register holds; written in place.
        shared_bytes: size of the dynamic shared memory, ``global_smem`` as in Triton's PTX.

    ``%index`` holds the lane's number in the grid, and ``%thread`` that in its CTA.
    """
    lanes = max((len(values) for _, values in inputs.values()), default=threads)
    padded = -(-lanes // threads) * threads
    declared = {name: kind for name, (kind, _) in inputs.items()} | dict(outputs)
    declarations = "\n".join(f"\t.reg .{kind} %{name};" for name, kind in declared.items())
    declarations += "".join(f"\n\t.reg .b64 %{name};" for name in buffers or {})
    declarations += f"\n\t.reg .b32 %index, %thread, %word_, %block_;\n\t.reg .b64 %at_;\n{registers}"
    body = ["mov.u32 %thread, %tid.x;", "mov.u32 %block_, %ctaid.x;"]
    body.append(f"mad.lo.s32 %index, %block_, {threads}, %thread;")
    tensors: list[torch.Tensor] = []

    def address(kind: str) -> None:
        body.append(f"ld.param.b64 %at_, [p{len(tensors)}];")
        body.append(f"mad.wide.s32 %at_, %index, {KINDS['b32' if kind == 'pred' else kind][0] // 8}, %at_;")

    for name, (kind, values) in inputs.items():
        address(kind)
        tensors.append(memory([*values, *[values[0]] * (padded - lanes)], kind))
        if kind == "pred":
            body += ["ld.global.b32 %word_, [%at_];", f"setp.ne.b32 %{name}, %word_, 0;"]
        else:
            body.append(f"ld.global.{kind} %{name}, [%at_];")
    for name, tensor in (buffers or {}).items():
        body.append(f"ld.param.b64 %{name}, [p{len(tensors)}];")
        tensors.append(tensor)
    if shared_bytes:
        module += "\n.extern .shared .align 16 .b8 global_smem[];"
    body += [lines] if isinstance(lines, str) else lines
    first_output = len(tensors)
    for name, kind in outputs.items():
        address(kind)
        tensors.append(memory([0x5A5A5A5A5A5A5A5A] * padded, kind))
        if kind == "pred":
            body += [f"selp.b32 %word_, 1, 0, %{name};", "st.global.b32 [%at_], %word_;"]
        else:
            body.append(f"st.global.{kind} [%at_], %{name};")
    ptx = entry(body, [".u64"] * len(tensors), threads=threads, registers=declarations, module=module)
    run = run_ptx(ptx, (padded // threads,), tensors, shared_bytes=shared_bytes)
    assert not run.findings, run.findings
    return list(zip(*(bits(tensor)[:lanes] for tensor in tensors[first_output:]), strict=True))


def same(got: int, expected: int | None) -> bool:
    """Bit for bit; an expectation of None allows anything (the manual leaves the case open)."""
    return expected is None or got == expected


def same_or_nan(form: Format, count: int = 1) -> Callable[[int, int | None], bool]:
    """Bit for bit in each of ``count`` packed elements, except that any NaN will do where a NaN is expected."""

    def accept(got: int, expected: int | None) -> bool:
        if expected is None:
            return True
        for index in range(count):
            one, other = ((value >> (index * form.width)) & mask(form.width) for value in (got, expected))
            if one != other and not (is_nan(form, one) and is_nan(form, other)):
                return False
        return True

    return accept


@dataclass(frozen=True)
class Form:
    """One instruction form: operand kinds, the rule of the manual, and the inputs to try."""

    operands: tuple[str, ...]
    result: str
    rule: Callable[..., int | None]
    vectors: Sequence[Vector]
    accept: Callable[[int, int | None], bool] = same
    text: str = ""
    registers: str = field(default="", repr=False)


def check(opcode: str, form: Form, rule: Callable[..., int | None] | None = None) -> None:
    """Execute the form on all its vectors and compare each result with the rule's.

    Operands are %a, %b, %c, %e; the result is %d. ``form.text`` replaces the line '<opcode> %d, %a, %b, ...;'.
    """
    names = "abce"[: len(form.operands)]
    line = form.text or f"{opcode} %d, {', '.join('%' + name for name in names)};"
    columns = list(zip(*form.vectors, strict=True))
    inputs = {n: (kind, column) for n, kind, column in zip(names, form.operands, columns, strict=True)}
    results = execute(line, inputs, {"d": form.result}, registers=form.registers)
    wrong = []
    for vector, (got,) in zip(form.vectors, results, strict=True):
        expected = (rule or form.rule)(*vector)
        if not form.accept(got, expected):
            wrong.append(f"{', '.join(map(hex, vector))} -> {got:#x}, not {expected:#x}")
    assert not wrong, f"{opcode}: {len(wrong)} of {len(results)} wrong: " + "; ".join(wrong[:5])


def integer_edges(width: int) -> list[int]:
    top = 1 << (width - 1)
    return [0, 1, 2, 7, top - 1, top, top + 1, mask(width) - 1, mask(width), mask(width) // 3, top // 2, 0x80, 0x7F]


def random_integer(draw: random.Random, width: int) -> int:
    """Uniform bits, or a number of few bits of either sign, so that small and large sizes both come up."""
    value = draw.getrandbits(width)
    if draw.random() < 0.5:
        value >>= draw.randrange(width)
        if draw.random() < 0.5:
            value = -value & mask(width)
    return value


@cache
def integers(*widths: int, count: int = 160, seed: str = "integers") -> list[Vector]:
    """Edge cases against each other (all pairs; triples thinned) and random operands."""
    draw = random.Random(f"{seed}{widths}")
    edges = [integer_edges(width) for width in widths]
    vectors: list[Vector] = [(e,) for e in edges[0]]
    for more in edges[1:]:
        vectors = [(*vector, value) for vector in vectors for value in more]
    if len(widths) > 2:
        vectors = draw.sample(vectors, 200)
    return vectors + [tuple(random_integer(draw, width) for width in widths) for _ in range(count)]


def float_specials(form: Format) -> list[int]:
    """Both zeros, ones, infinities, NaNs of several payloads, the ends of the subnormal and of the normal numbers."""
    step = 1 << form.unused
    one = form.bias << (form.mantissa_bits + form.unused)
    least_normal = 1 << (form.mantissa_bits + form.unused)
    sizes = [0, step, least_normal - step, least_normal, least_normal + step, one, one + step, one - step, form.largest]
    sizes += [one + (1 << (form.mantissa_bits + form.unused - 1)), one + least_normal, form.infinity]
    sizes += [form.infinity | step, form.infinity | (1 << (form.mantissa_bits + form.unused - 1)), form.sign_bit - 1]
    return sizes + [size | form.sign_bit for size in sizes]


def random_float(draw: random.Random, form: Format, near: int | None = None) -> int:
    """Uniform bits; half of the time with an exponent within a mantissa of ``near``'s, where sums round and cancel."""
    value = draw.getrandbits(form.width)
    if near is None or draw.random() < 0.5:
        return value
    low = form.mantissa_bits + form.unused
    exponent = (near & ~form.sign_bit) >> low
    exponent = min(
        max(exponent + draw.randint(-form.mantissa_bits - 2, form.mantissa_bits + 2), 0), mask(form.exponent_bits)
    )
    return (value & (form.sign_bit | mask(low))) | (exponent << low)


@cache
def floats(form: Format, operands: int = 1, count: int = 120, seed: str = "floats") -> list[Vector]:
    """Zeros, one, infinities and NaN in every combination, 200 of the other specials, and random operands.

    Many of the random ones are close in size to their neighbours.
    """
    draw = random.Random(f"{seed}{form}{operands}")
    specials = float_specials(form)
    if operands == 1:
        vectors = [(value,) for value in specials]
    else:
        one, nan = form.bias << (form.mantissa_bits + form.unused), form.sign_bit - 1
        core = [0, form.sign_bit, one, form.infinity, form.infinity | form.sign_bit, nan]
        vectors = list(product(core, repeat=operands))
        vectors += [tuple(draw.choices(specials, k=operands)) for _ in range(200)]
    for _ in range(count):
        vector: list[int] = []
        for index in range(operands):
            near = vector[draw.randrange(index)] if index else (form.bias << (form.mantissa_bits + form.unused))
            vector.append(random_float(draw, form, near))
        vectors.append(tuple(vector))
    return vectors


def paired(vectors: Sequence[Vector], width: int) -> list[Vector]:
    """Vectors of one half packed with those of the other half, so that low and high elements differ."""
    half = (len(vectors) + 1) // 2
    couples = zip(vectors[:half], vectors[-half:], strict=True)
    return [tuple(low | (high << width) for low, high in zip(a, b, strict=True)) for a, b in couples]
