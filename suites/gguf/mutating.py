"""Mutations of a valid GGUF file that know where its fields lie: what a fuzzer of plain bytes seldom reaches.

A mutation is three numbers' worth of data, so that random, hypothesis and atheris draw the same ones, and each prints
as the line that makes it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mla_conformance.suites.gguf.writing import Encoded, Span, TensorSpec, Typed, encode

_POWERS = (4, 5, 7, 8, 15, 16, 24, 28, 31, 32, 33, 40, 48, 60, 61, 62, 63, 64)
HOSTILE = tuple(sorted({2**power + change for power in _POWERS for change in (-1, 0, 1)} | set(range(16))))
MAX_GROWTH = 4096


class Mutation(NamedTuple):
    """What to do, to which field (counted, and wrapped round), and with which value."""

    operation: str
    where: int
    value: int


class SeedFile(NamedTuple):
    """A valid file and where its fields lie."""

    name: str
    data: bytes
    spans: tuple[Span, ...]


def seed_file(name: str, metadata: dict[str, object], tensors: Sequence[TensorSpec], version: int = 3) -> SeedFile:
    """Make a valid file whose tensors hold a counting pattern."""
    encoded: Encoded = encode(metadata, tensors, version=version)
    ends = [start + tensor.nbytes for start, tensor in zip(encoded.starts, tensors, strict=True)]
    data = encoded.header + bytes(
        byte % 256 for byte in range(max(ends, default=encoded.data_start) - len(encoded.header))
    )
    return SeedFile(name, data, encoded.spans)


def seed_files() -> list[SeedFile]:
    """Return small valid files that between them have every kind of field."""
    scalars: dict[str, object] = {
        "general.architecture": "deepseek2",
        "a.u8": Typed("uint8", 200),
        "a.i8": Typed("int8", -3),
        "a.u16": Typed("uint16", 60000),
        "a.i16": Typed("int16", -300),
        "a.i32": Typed("int32", -70000),
        "a.u64": Typed("uint64", 2**40),
        "a.i64": Typed("int64", -(2**40)),
        "a.f32": 0.5,
        "a.f64": Typed("float64", 1e-300),
        "a.bool": True,
    }
    arrays: dict[str, object] = {
        "general.architecture": "glm-dsa",
        "general.alignment": 64,
        "tokenizer.ggml.tokens": ["a", "bc", "dé", ""],
        "tokenizer.ggml.scores": [0.0, -1.0, 0.5],
        "tokenizer.ggml.token_type": [1, 2, 3],
        "flags": [True, False],
    }
    three = [
        TensorSpec("blk.0.attn_k_b.weight", "Q8_0", (2, 3, 32)),
        TensorSpec("blk.0.attn_norm.weight", "F32", (8,)),
        TensorSpec("blk.0.ffn_down.weight", "Q4_K", (2, 256)),
    ]
    split: dict[str, object] = {
        "split.no": Typed("uint16", 1),
        "split.count": Typed("uint16", 3),
        "split.tensors.count": Typed("int32", 7),
    }
    return [
        seed_file("scalars", scalars, three),
        seed_file("arrays", arrays, [*three, TensorSpec("ids", "I32", (1, 1, 1, 5))]),
        seed_file("split", split, three[:1], version=2),
        seed_file("many", {"general.architecture": "x"}, [TensorSpec(f"t{i}", "F16", (3, i + 1)) for i in range(12)]),
        seed_file("vocabulary", arrays, []),
    ]


class Working:
    """A file under mutation; the fields' places follow its changes."""

    def __init__(self, seed: SeedFile) -> None:
        self.data = bytearray(seed.data)
        self.spans = list(seed.spans)

    def replace(self, start: int, size: int, new: bytes) -> None:
        """Put ``new`` in the place of ``size`` bytes."""
        self.data[start : start + size] = new
        change = len(new) - size
        if change:
            moved = [s._replace(start=s.start + change) if s.start > start else s for s in self.spans]
            self.spans = [span for span in moved if span.start + span.size <= len(self.data)]

    def field(self, where: int, kind: str | None = None) -> Span:
        """Return the ``where``-th field, of a kind if given and there."""
        fields = [span for span in self.spans if kind is None or span.kind == kind] or self.spans
        return fields[where % len(fields)] if fields else Span("nothing", 0, 0)

    def number(self, span: Span) -> int:
        """Return a field's bytes as a number."""
        return int.from_bytes(self.data[span.start : span.start + span.size], "little")

    def put(self, span: Span, value: int) -> None:
        """Write a number into a field, cut to its bytes."""
        size = min(span.size, 16)
        self.replace(span.start, size, (value % 2 ** (8 * size)).to_bytes(size, "little"))


def _set(work: Working, where: int, value: int) -> None:
    work.put(work.field(where), HOSTILE[value % len(HOSTILE)])


def _nudge(work: Working, where: int, value: int) -> None:
    span = work.field(where)
    work.put(span, work.number(span) + value % 65 - 32)


def _copy(work: Working, where: int, value: int) -> None:
    into = work.field(where)
    source = work.field(value, into.kind)
    work.replace(into.start, into.size, bytes(work.data[source.start : source.start + source.size]))


def _flip(work: Working, where: int, value: int) -> None:
    if work.data:
        work.data[where % len(work.data)] ^= 1 << (value % 8)


def _truncate(work: Working, where: int, value: int) -> None:
    del work.data[where % (len(work.data) + 1) :]


def _delete(work: Working, where: int, value: int) -> None:
    work.replace(where % (len(work.data) + 1), value % 40, b"")


def _insert(work: Working, where: int, value: int) -> None:
    filling = (b"\0", b"\xff", b"\x01\0\0\0", b"\xc3(")[value % 4]
    work.replace(where % (len(work.data) + 1), 0, (filling * MAX_GROWTH)[: value // 4 % MAX_GROWTH])


def _entry(work: Working, where: int) -> tuple[Span, Span]:
    """Return an entry of either list and the field that counts them."""
    kind = ("key", "tensor")[where % 2]
    return work.field(where // 2, f"{kind} entry"), work.field(0, f"{kind} count")


def _repeat(work: Working, where: int, value: int) -> None:
    entry, count = _entry(work, where)
    work.put(count, work.number(count) + 1)
    work.replace(entry.start, 0, bytes(work.data[entry.start : entry.start + entry.size]))


def _drop(work: Working, where: int, value: int) -> None:
    entry, count = _entry(work, where)
    work.put(count, work.number(count) - 1)
    work.replace(entry.start, entry.size, b"")


def _grow_text(work: Working, where: int, value: int) -> None:
    """Lengthen or empty a text together with its length, so that the file still parses."""
    length = work.field(where, ("name length", "key length", "value length", "element length")[where % 4])
    old, new = work.number(length), value % 300
    work.put(length, new)
    work.replace(length.start + length.size, min(old, MAX_GROWTH), b"n" * new)


OPERATIONS: dict[str, Callable[[Working, int, int], None]] = {
    "set": _set,
    "nudge": _nudge,
    "copy": _copy,
    "flip": _flip,
    "truncate": _truncate,
    "delete": _delete,
    "insert": _insert,
    "repeat": _repeat,
    "drop": _drop,
    "grow text": _grow_text,
}


def mutate(seed: SeedFile, mutations: Sequence[Mutation]) -> bytes:
    """Apply mutations one after the other."""
    work = Working(seed)
    for mutation in mutations:
        OPERATIONS[mutation.operation](work, mutation.where, mutation.value)
    return bytes(work.data)


def draw(source: random.Random) -> list[Mutation]:
    """Draw one to four mutations."""
    names = list(OPERATIONS)
    count = source.choice((1, 1, 1, 2, 2, 3, 4))
    return [Mutation(source.choice(names), source.randrange(2**16), source.randrange(2**16)) for _ in range(count)]


def every_hostile_field(seed: SeedFile) -> Iterator[tuple[str, bytes]]:
    """Yield the file with each field in turn set to each hostile value that fits it, named by both."""
    for place, span in enumerate(seed.spans):
        for index, value in enumerate(HOSTILE):
            if value < 2 ** (8 * min(span.size, 16)) and not span.kind.endswith("entry"):
                yield f"{span.kind} {place} = {value}", mutate(seed, [Mutation("set", place, index)])
