"""The GGUF reader withstands mutated files, and the fuzzer finds a reader that lacks a check."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_conformance.kernels.gguf.file_header import HeaderParser
from mla_conformance.kernels.gguf.file_types import Header, TensorEntry
from mla_conformance.suites.gguf.fuzz import SEEDS, Report, bound, run, try_one
from mla_conformance.suites.gguf.mutating import OPERATIONS, Mutation, every_hostile_field, mutate

MUTATIONS = st.builds(Mutation, st.sampled_from(list(OPERATIONS)), st.integers(0, 2**16), st.integers(0, 2**16))


@settings(max_examples=600, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(seed=st.sampled_from(SEEDS), mutations=st.lists(MUTATIONS, min_size=1, max_size=5))
def test_mutated_file_is_refused_or_means_its_bytes(seed: Any, mutations: list[Mutation]) -> None:
    """Drawn mutations of the valid files."""
    report = Report()
    try_one(mutate(seed, mutations), report, f"{seed.name} {mutations}")
    assert not report.findings


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(rest=st.binary(max_size=400), counts=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_any_bytes_behind_a_header_are_refused_or_mean_themselves(rest: bytes, counts: tuple[int, int]) -> None:
    """Drawn bytes where the keys and tensors should be."""
    report = Report()
    data = b"GGUF\3\0\0\0" + b"".join(count.to_bytes(8, "little") for count in counts) + rest
    try_one(data, report, "drawn")
    assert not report.findings


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.name)
def test_each_field_set_to_each_hostile_value(seed: Any) -> None:
    """One file in seven of the structured list, which is some thousands; the whole list takes minutes."""
    report = Report()
    for index, (name, data) in enumerate(every_hostile_field(seed)):
        if index % 7 == 0:
            try_one(data, report, name)
    assert report.tried > 100
    assert not report.findings


def test_random_run_has_no_findings_and_reaches_every_refusal() -> None:
    """What the command of a hundred thousand files does, for a few hundred; part of them through gguf-py."""
    report = run(600, seed=5)
    assert not report.findings, str(report)
    assert report.tried == 600
    assert report.on_disk == 30
    assert report.accepted > 50
    assert report.peak_share < 1
    assert {"overlap", "duplicate key", "duplicate tensor", "absurd length", "out of file"} <= set(report.refused)


class OverlapsPass(HeaderParser):
    """Tensors may share bytes."""

    def check_overlaps(self, tensors: dict[str, TensorEntry], fields: dict[str, int]) -> None:
        """Accept."""


class LengthsPass(HeaderParser):
    """A length is not held against what is left: a slice just ends."""

    def take(self, size: int, field: str) -> int:
        """Step without looking."""
        start = self.position
        self.position = start + size
        return start


class PlacesPass(HeaderParser):
    """A tensor may lie outside the file."""

    def check_place(self, entry: TensorEntry, start: int, data_start: int) -> None:
        """Accept."""


class CountsPass(HeaderParser):
    """Room is made for as many things as the file claims, up to a mebibyte."""

    def count(self, field: str, item_bytes: int, limit: int) -> int:
        """Allocate first, then check."""
        start = self.position
        room = bytearray(min(self.u64(field) * item_bytes, 2**20))
        self.position = start
        return super().count(field, item_bytes, limit) + 0 * len(room)


class SignedDimensions(HeaderParser):
    """The product of the dimensions wraps, as in 64-bit arithmetic."""

    def tensor(self, index: int) -> TensorEntry:
        """Lose what does not fit."""
        entry = super().tensor(index)
        return entry._replace(nbytes=entry.nbytes % 2**8)


class TypesAreMixed(HeaderParser):
    """A signed number is read as the unsigned one of its size."""

    def value(self, field: str) -> tuple[str, Any]:
        """Call an int8 a uint8."""
        value_type, value = super().value(field)
        if value_type == "int8" and isinstance(value, int):
            return "uint8", value % 256
        return value_type, value


PLANTED: dict[type[HeaderParser], str] = {
    OverlapsPass: "overlaps another",
    LengthsPass: "error:",
    PlacesPass: "bytes in the file",
    CountsPass: "allocates",
    SignedDimensions: "does not have",
    TypesAreMixed: "encodes to other bytes",
}


@pytest.mark.parametrize("parser", PLANTED, ids=lambda parser: parser.__name__)
def test_missing_check_is_found(parser: type[HeaderParser]) -> None:
    """A reader with one check left out, in a run of a few hundred files."""

    def parse(buffer: memoryview, name: str) -> Header:
        return parser(buffer, name).parse()

    report = run(600, seed=5, parse=parse)
    assert any(PLANTED[parser] in finding for finding in report.findings), str(report)


def test_slow_reader_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader over the time limit, which is set to nothing here."""
    monkeypatch.setattr("mla_conformance.suites.gguf.fuzz.SECONDS", 0.0)
    report = run(3, seed=5)
    assert len(report.findings) == 3
    assert bound(0) > 0
