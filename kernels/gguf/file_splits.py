"""Opens split GGUF files, ``NAME-00001-of-0000N.gguf``, as one; a part missing, doubled or foreign is refused.

Names and the keys ``split.no``, ``split.count`` and ``split.tensors.count`` are those of llama.cpp's gguf-split; parts
count from 1 in names and from 0 in ``split.no``, and only the first part has the other keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import NoReturn, Self

from torch import Tensor

from mla_conformance.kernels.gguf.file import GGUFFile, open_gguf
from mla_conformance.kernels.gguf.file_types import GGUFError, MetadataValue, TensorEntry, shown

_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
# split.count is a uint16.
MAX_PARTS = 2**16 - 1


class GGUFSplit:
    """The parts of a split file as one. A context manager; ``close`` closes every part.

    Attributes:
        parts: The open parts, in order.
        metadata: The first part's plain values by key.
        tensors: Entries of all parts by name, in the parts' order; an offset counts in the tensor's own part.
    """

    def __init__(self, parts: Sequence[GGUFFile]) -> None:
        self.parts = tuple(parts)
        self.metadata: dict[str, MetadataValue] = parts[0].metadata
        self.tensors: dict[str, TensorEntry] = {}
        self._part: dict[str, GGUFFile] = {}
        for part in parts:
            self.tensors.update(part.tensors)
            self._part.update(dict.fromkeys(part.tensors, part))

    def read(self, name: str) -> Tensor:
        """Return a tensor's bytes; see ``GGUFFile.read``.

        Raises:
            ValueError: No part has such a tensor, or the file was closed.
        """
        if name not in self._part:
            raise ValueError(f"name={name!r} is none of the {len(self._part)} tensors of {self.parts[0].path}")
        return self._part[name].read(name)

    def close(self) -> None:
        """Close every part."""
        for part in self.parts:
            part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_gguf_split(path: str | os.PathLike[str]) -> GGUFSplit:
    """Open all parts of a split file, given the path of any of them.

    Raises:
        GGUFError: The name is no part's name; a part is missing, cannot be opened, is another part under a second name
            or is itself refused; a part's keys contradict its name or the first part; a tensor is in two parts.
    """
    paths = _part_paths(os.fspath(path))
    _check_distinct(paths)
    with ExitStack() as opened:
        parts = []
        for name in paths:
            try:
                parts.append(opened.enter_context(open_gguf(name)))
            except OSError as error:
                raise GGUFError(name, 0, "file", "unreadable part", f"{error.strerror or error}") from error
        for number, part in enumerate(parts):
            _check_part(part, number, parts)
        _check_tensors(parts)
        opened.pop_all()
        return GGUFSplit(parts)


def _part_paths(path: str) -> list[str]:
    """Return the names of all parts of a split file by the name of one."""
    match = _NAME.fullmatch(path)
    if match is None:
        raise GGUFError(path, 0, "file name", "bad split name", "a part is named NAME-00001-of-0000N.gguf")
    number, count = int(match[2]), int(match[3])
    if not 1 <= number <= count <= MAX_PARTS:
        problem = f"part {number} of {count}; parts count from 1 and are at most {MAX_PARTS}"
        raise GGUFError(path, 0, "file name", "bad split name", problem)
    return [f"{match[1]}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]


def _check_distinct(paths: Sequence[str]) -> None:
    """Refuse parts that are missing, do not lead to a file, or lead to the same one."""
    missing = []
    seen: dict[tuple[int, int], str] = {}
    for name in paths:
        try:
            status = os.stat(name)
        except FileNotFoundError:
            missing.append(name)
            continue
        except OSError as error:
            raise GGUFError(name, 0, "file", "unreadable part", f"{error.strerror or error}") from error
        first = seen.setdefault((status.st_dev, status.st_ino), name)
        if first != name:
            raise GGUFError(name, 0, "file", "doubled part", f"it is the same file as {first}")
    if missing:
        named = ", ".join(os.path.basename(name) for name in missing[:5]) + (", ..." if len(missing) > 5 else "")
        problem = f"{len(missing)} of {len(paths)} parts are missing: {named}"
        raise GGUFError(missing[0], 0, "file", "missing part", problem)


def _fail(part: GGUFFile, key: str, kind: str, problem: str) -> NoReturn:
    raise GGUFError(part.path, part.metadata_places.get(key, 0), f"key {key!r}", kind, problem)


def _whole_number(part: GGUFFile, key: str) -> int:
    value = part.metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        found = "is missing" if value is None else f"is of type {part.metadata_types[key]}"
        _fail(part, key, "no split key", f"it {found}; every part of a split file has it as a whole number")
    return value


def _check_part(part: GGUFFile, number: int, parts: Sequence[GGUFFile]) -> None:
    """Hold a part's keys to its name, and its architecture, where it names one, to the first part's."""
    found = _whole_number(part, "split.no")
    if found != number:
        _fail(part, "split.no", "wrong part number", f"it is {found}; by its name the part must have {number}")
    found = _whole_number(part, "split.count")
    if found != len(parts):
        _fail(part, "split.count", "wrong part count", f"it is {found}; by its name there are {len(parts)} parts")
    key = "general.architecture"
    first = parts[0].metadata.get(key)
    if key in part.metadata and part.metadata[key] != first:
        other = f"it is {shown(str(part.metadata[key]))}, in the first part {shown(str(first))}"
        _fail(part, key, "mixed architectures", other)


def _check_tensors(parts: Sequence[GGUFFile]) -> None:
    """Refuse a tensor in two parts, and a total that is not what each part says."""
    owner: dict[str, GGUFFile] = {}
    for part in parts:
        for name, entry in part.tensors.items():
            if name in owner:
                both = f"it is in {owner[name].path} as well"
                raise GGUFError(part.path, entry.offset, f"tensor {shown(name)}", "tensor in two parts", both)
            owner[name] = part
    for part in parts:
        found = _whole_number(part, "split.tensors.count")
        if found != len(owner):
            claimed = f"it is {found}; the parts have {len(owner)} tensors together"
            _fail(part, "split.tensors.count", "wrong tensor count", claimed)
