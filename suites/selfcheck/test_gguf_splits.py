"""Split GGUF files open as one, and a part that is missing, doubled or foreign is refused by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_conformance.kernels.gguf.file_splits import open_gguf_split
from mla_conformance.kernels.gguf.file_types import GGUFError
from mla_conformance.suites.gguf.writing import TensorSpec, Typed, write

ARCH = {"general.architecture": "glm-dsa"}
SMALL = [
    TensorSpec(name, "F16", (3, 5), bytes([place]) * 30)
    for place, name in enumerate(("embed", "norm", "q_a", "q_b", "half", "output"))
]


def part(number: int, count: int = 3, total: int = 6, **more: object) -> dict[str, Any]:
    """Return the keys of one part of a split file."""
    keys = {"split.no": Typed("uint16", number), "split.count": Typed("uint16", count)}
    keys["split.tensors.count"] = Typed("int32", total)
    return (ARCH if number == 0 else {}) | keys | more


def write_split(folder: Path) -> list[Path]:
    """Write a valid file of three parts."""
    paths = [folder / f"model-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        write(path, part(number), SMALL[2 * number : 2 * number + 2])
    return paths


def test_split_file_opens_from_any_part(tmp_path: Path) -> None:
    """Tensors of all parts, in order, with the first part's keys; parts may be links, as in a download cache."""
    paths = write_split(tmp_path)
    paths[1].rename(tmp_path / "blob")
    paths[1].symlink_to(tmp_path / "blob")
    for path in paths:
        with open_gguf_split(path) as file:
            assert list(file.tensors) == [spec.name for spec in SMALL]
            assert file.metadata["general.architecture"] == "glm-dsa"
            assert all(file.read(spec.name).numpy().tobytes() == spec.data for spec in SMALL)
    with pytest.raises(ValueError, match="was closed"):
        file.read("half")


def replaced(metadata: dict[str, Any], tensors: list[TensorSpec]) -> Callable[[list[Path]], None]:
    """Return what writes another second part."""
    return lambda paths: write(paths[1], metadata, tensors)


def relinked(target: str) -> Callable[[list[Path]], None]:
    """Return what makes the second part a link."""

    def change(paths: list[Path]) -> None:
        paths[1].unlink()
        paths[1].symlink_to(paths[1].parent / target)

    return change


OWN = SMALL[2:4]
BROKEN: dict[str, tuple[Callable[[list[Path]], None], str]] = {
    "missing": (lambda paths: paths[1].unlink(), "missing part"),
    "linked to itself": (relinked("model-00002-of-00003.gguf"), "unreadable part"),
    "linked to another part": (relinked("model-00003-of-00003.gguf"), "doubled part"),
    "linked to nothing": (relinked("nothing"), "missing part"),
    "folder": (relinked("."), "unreadable part"),
    "copy of another part": (replaced(part(2), SMALL[4:6]), "wrong part number"),
    "cut": (lambda paths: os.truncate(paths[1], 98), "truncated"),
    "wrong number": (replaced(part(2), OWN), "wrong part number"),
    "wrong count": (replaced(part(1, count=4), OWN), "wrong part count"),
    "wrong total": (replaced(part(1, total=7), OWN), "wrong tensor count"),
    "a tensor less": (replaced(part(1), OWN[:1]), "wrong tensor count"),
    "another part's tensor": (replaced(part(1), [OWN[0], SMALL[0]]), "tensor in two parts"),
    "another architecture": (replaced(part(1) | {"general.architecture": "deepseek2"}, OWN), "mixed architectures"),
    "no keys": (replaced({}, OWN), "no split key"),
    "number as text": (replaced(part(1) | {"split.no": "1"}, OWN), "no split key"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_split_is_refused(tmp_path: Path, name: str) -> None:
    """One part of three is not what it should be; the error names it."""
    paths = write_split(tmp_path)
    change, kind = BROKEN[name]
    change(paths)
    with pytest.raises(GGUFError) as caught:
        open_gguf_split(paths[0])
    assert caught.value.kind == kind, caught.value
    # A doubled part is noticed at its second name; which part a missing tensor was in, nobody can tell.
    named = {"linked to another part": 2, "a tensor less": 0}.get(name, 1)
    assert caught.value.file == str(paths[named])


@pytest.mark.parametrize(
    "name", ["model.gguf", "m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-00001-of-00000.gguf", "m-1-of-3.gguf"]
)
def test_name_of_no_part_is_refused(tmp_path: Path, name: str) -> None:
    """Such a name does not say what the other parts are called."""
    write(tmp_path / name, part(0), SMALL[:2])
    with pytest.raises(GGUFError, match="file name"):
        open_gguf_split(tmp_path / name)


def test_split_of_many_claimed_parts_is_refused_at_once(tmp_path: Path) -> None:
    """A name that claims 65,535 parts."""
    write(tmp_path / "m-00001-of-65535.gguf", part(0), SMALL[:2])
    start = time.process_time()
    with pytest.raises(GGUFError, match="65534 of 65535 parts are missing"):
        open_gguf_split(tmp_path / "m-00001-of-65535.gguf")
    assert time.process_time() - start < 2
