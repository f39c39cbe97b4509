"""GGUF files are read as gguf-py reads them, and whatever is wrong with one is refused by file, offset and field."""

from __future__ import annotations

import itertools
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mla_conformance.kernels.gguf import file_header
from mla_conformance.kernels.gguf.file import open_gguf
from mla_conformance.kernels.gguf.file_header import parse_header
from mla_conformance.kernels.gguf.file_types import GGUFError, Header
from mla_conformance.suites.gguf.fuzz import bound
from mla_conformance.suites.gguf.mutating import seed_files
from mla_conformance.suites.gguf.writing import TensorSpec, Typed, encode, write
from mla_conformance.suites.selfcheck.hostile_gguf import COSTLY, HOSTILE, KEY, U32, U64, header

ARCH = {"general.architecture": "glm-dsa"}


def pattern(spec: TensorSpec) -> TensorSpec:
    """Fill a tensor with bytes that differ between tensors."""
    return spec._replace(data=bytes((7 * place + len(spec.name)) % 251 for place in range(spec.nbytes)))


SMALL = [
    pattern(TensorSpec("blk.0.attn_k_b.weight", "Q8_0", (2, 3, 64))),
    pattern(TensorSpec("norm.weight", "F32", (5,))),
    pattern(TensorSpec("blk.0.ffn_down.weight", "Q4_K", (3, 256))),
    pattern(TensorSpec("half", "F16", (3, 7))),
    pattern(TensorSpec("brain", "BF16", (3, 7))),
    pattern(TensorSpec("ids", "I32", (1, 2, 3, 4))),
    pattern(TensorSpec("scaled", "NVFP4", (2, 64))),
]


def refused(data: bytes, kind: str | None = None) -> GGUFError:
    """Parse a file that must be refused, at once and with a message that names file, offset and field."""
    start = time.process_time()
    with pytest.raises(GGUFError) as caught:
        parse_header(memoryview(data), "some.gguf")
    error = caught.value
    assert time.process_time() - start < 0.25
    assert f"some.gguf: byte {error.offset}: {error.field}: " in str(error)
    assert 0 <= error.offset <= len(data)
    assert kind is None or error.kind == kind, error
    return error


def test_every_value_and_tensor_reads_as_gguf_py_reads_it(tmp_path: Path) -> None:
    """All value types and seven tensor types, beside gguf-py's unmodified reader."""
    metadata: dict[str, Any] = ARCH | {
        "u": 7,
        "i": -1,
        "big": Typed("uint64", 2**63),
        "f": 0.1,
        "d": Typed("float64", 0.1),
        "b": True,
        "words": ["é", "", "w" * 300],
        "numbers": [1, -2],
        "floats": [0.5, 1.5],
        "general.alignment": 128,
    }
    path = tmp_path / "small.gguf"
    write(path, metadata, SMALL)
    judge = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        for key, value in file.metadata.items():
            assert np.array_equal(np.asarray(value), np.asarray(judge.fields[key].contents()))
        assert list(file.metadata) == [key for key in judge.fields if not key.startswith("GGUF.")]
        assert list(file.tensors) == [tensor.name for tensor in judge.tensors]
        for tensor, spec in zip(judge.tensors, SMALL, strict=True):
            entry = file.tensors[tensor.name]
            assert (entry.quant, entry.offset, entry.nbytes) == (spec.quant, tensor.data_offset, tensor.n_bytes)
            assert entry.shape == spec.shape == tuple(reversed(tensor.shape.tolist()))
            read = file.read(tensor.name)
            assert read.shape[:-1] == spec.shape[:-1]
            assert read.numpy().tobytes() == spec.data == tensor.data.tobytes()


def test_closed_file_and_unknown_name_are_refused_and_read_tensors_stay(tmp_path: Path) -> None:
    """A tensor holds its mapping; the file's other tensors need an open file."""
    write(tmp_path / "small.gguf", ARCH, SMALL)
    with open_gguf(tmp_path / "small.gguf") as file:
        kept = file.read("half")
        with pytest.raises(ValueError, match="'other' is none of the 7"):
            file.read("other")
    assert kept.numpy().tobytes() == SMALL[3].data
    with pytest.raises(ValueError, match="was closed"):
        file.read("half")


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_writer_writes_the_bytes_of_gguf_py(tmp_path: Path, alignment: int | None) -> None:
    """The same keys and tensors through gguf-py's own writer."""
    theirs = gguf.GGUFWriter(tmp_path / "theirs.gguf", "glm-dsa")
    metadata: dict[str, Any] = dict(ARCH)
    if alignment is not None:
        theirs.add_custom_alignment(alignment)
        metadata["general.alignment"] = alignment
    theirs.add_uint32("u", 7)
    theirs.add_uint16("short", 8)
    theirs.add_float32("f", 0.1)
    theirs.add_bool("b", True)
    theirs.add_array("words", ["é", "w" * 300])
    theirs.add_array("numbers", list(range(100)))
    metadata |= {"u": 7, "short": Typed("uint16", 8), "f": 0.1, "b": True, "words": ["é", "w" * 300]}
    metadata["numbers"] = list(range(100))
    for spec in SMALL:
        assert spec.data is not None
        data = np.frombuffer(spec.data, np.uint8).reshape(*spec.shape[:-1], -1)
        theirs.add_tensor(spec.name, data, raw_dtype=gguf.GGMLQuantizationType[spec.quant])
    theirs.write_header_to_file()
    theirs.write_kv_data_to_file()
    theirs.write_tensors_to_file()
    theirs.close()
    write(tmp_path / "ours.gguf", metadata, SMALL)
    assert (tmp_path / "ours.gguf").read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_real_size_opens_within_two_seconds(tmp_path: Path) -> None:
    """GLM-5.2's 1809 tensors, its 154,880 tokens and twice as many merges, in a file of 400 GB that takes no disk."""
    experts = [TensorSpec(f"blk.{i}.ffn_up_exps.weight", "Q4_K", (256, 2048, 6144)) for i in range(225)]
    rest = [TensorSpec(f"blk.{i}.attn_output.weight", "Q8_0", (6144, 16384)) for i in range(1809 - 225)]
    words = {"tokenizer.ggml.tokens": [f"token{i}é" for i in range(154_880)]}
    merges = {"tokenizer.ggml.merges": [f"to{i} ken{i}" for i in range(320_000)]}
    kinds = {"tokenizer.ggml.token_type": [1] * 154_880}
    path = tmp_path / "large.gguf"
    write(path, ARCH | words | merges | kinds, [*experts, *rest], shape_only=True)
    assert path.stat().st_size > 500e9
    assert path.stat().st_blocks * 512 < 64e6
    start = time.process_time()
    with open_gguf(path) as file:
        assert time.process_time() - start < 2
        assert len(file.tensors) == 1809
        assert file.metadata["tokenizer.ggml.tokens"] == words["tokenizer.ggml.tokens"]
        assert file.read("blk.224.ffn_up_exps.weight").shape == (256, 2048, 6144 // 256 * 144)


@pytest.mark.parametrize("seed", seed_files(), ids=lambda seed: seed.name)
def test_truncation_at_every_byte_is_refused(seed: Any) -> None:
    """Each proper prefix of a valid file; one without tensors may lose the padding at its end."""
    parse_header(memoryview(seed.data), "whole.gguf")
    needed = max((span.start + span.size for span in seed.spans), default=0)
    has_tensors = any(span.kind == "tensor entry" for span in seed.spans)
    for size in range(len(seed.data) if has_tensors else needed):
        error = refused(seed.data[:size])
        assert error.kind in {"truncated", "absurd count", "out of file"}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused(name: str) -> None:
    """By kind, in milliseconds, within the memory of a small file."""
    data, kind = HOSTILE[name]
    tracemalloc.start()
    try:
        refused(data, kind)
        assert tracemalloc.get_traced_memory()[1] < bound(2048)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", COSTLY)
def test_memory_is_bounded_by_the_file(name: str) -> None:
    """Valid files of what costs a reader most memory for each byte."""
    data = COSTLY[name]()
    tracemalloc.start()
    try:
        parse_header(memoryview(data), "large.gguf")
        assert tracemalloc.get_traced_memory()[1] < bound(len(data))
    finally:
        tracemalloc.stop()


def test_header_past_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that goes on although the file does too."""
    monkeypatch.setattr(file_header, "MAX_HEADER_BYTES", 1000)
    words = [header(1, 0, KEY, U32(9), U32(8), U64(300), (U64(2) + b"ab") * 300), header(1, 0, KEY, U32(8), U64(999))]
    for data in (words[0], words[1] + bytes(2000)):
        refused(data + bytes(2000), "header too long")


def test_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """A pipe nobody writes to, a folder, an empty file, a path that leads nowhere."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, kind in {"pipe": "no regular file", "empty": "truncated"}.items():
        with pytest.raises(GGUFError) as caught:
            open_gguf(tmp_path / name)
        assert caught.value.kind == kind
    for name in ("missing", "loop", "."):
        with pytest.raises(OSError, match=str(tmp_path / name)):
            open_gguf(tmp_path / name)


def test_validation_is_held_against_gguf_py(tmp_path: Path) -> None:
    """A validation that finds a tensor elsewhere than gguf-py does is noticed."""
    write(tmp_path / "small.gguf", ARCH, SMALL)

    def elsewhere(buffer: memoryview, name: str) -> Header:
        found = parse_header(buffer, name)
        moved = found.tensors["half"]._replace(offset=found.tensors["half"].offset + 32)
        return found._replace(tensors=found.tensors | {"half": moved})

    with pytest.raises(GGUFError, match="tensor 'half': gguf-py finds"):
        open_gguf(tmp_path / "small.gguf", parse=elsewhere)


def test_tensors_at_any_places_are_accepted_unless_they_touch() -> None:
    """Gaps and any order are valid; two tensors one alignment apart are not, where the first is longer."""
    specs = [TensorSpec(name, "F32", (16,)) for name in "abc"]
    for offsets in itertools.permutations((0, 64, 160)):
        data = encode(ARCH, specs, offsets=offsets).header + bytes(160 + 64 + 31)
        found = parse_header(memoryview(data), "f")
        assert tuple(tensor.offset - found.data_start for tensor in found.tensors.values()) == offsets
        closer = [32 if offset == 64 else offset for offset in offsets]
        refused(encode(ARCH, specs, offsets=closer).header + bytes(160 + 64 + 31), "overlap")
