"""Opens GGUF files: a validation layer that trusts nothing, then gguf-py's reader for the tensors.

The whole header is checked first, independently of gguf-py (``file_header``); then gguf-py maps the tensors of the same
open file, and each must lie where the validation found it.
"""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from mmap import ACCESS_READ, mmap
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import torch

from mla_conformance.kernels.gguf.file_header import ALIGNMENT_KEY, parse_header
from mla_conformance.kernels.gguf.file_types import GGUFError, Header, MetadataValue, TensorEntry, shown

__all__ = ["GGUFError", "GGUFFile", "TensorEntry", "open_gguf"]


class GGUFFile:
    """An open GGUF file. A context manager; ``close`` lets go of the file's mapping.

    Attributes:
        path: Where it was opened.
        version: 2 or 3.
        metadata: Plain values by key, in the file's order; arrays of numbers are read-only numpy arrays.
        metadata_types: The GGUF type by key, such as ``"uint32"`` or ``"array[string]"``.
        metadata_places: The byte of the file at which the value's type stands, by key.
        tensors: Entries by name, in the file's order.
    """

    def __init__(self, path: str, header: Header, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        self.path = path
        self.version = header.version
        self.metadata: dict[str, MetadataValue] = header.metadata
        self.metadata_types: dict[str, str] = header.metadata_types
        self.metadata_places: dict[str, int] = header.metadata_places
        self.tensors: dict[str, TensorEntry] = header.tensors
        self._arrays: dict[str, np.ndarray[Any, Any]] | None = arrays

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor's bytes: uint8 ``[*leading, rows, row_bytes]`` on the CPU, without copying.

        The tensor is the file's read-only mapping: it stays valid after ``close``, but writing to it, or truncating
        the file on disk, ends the process with a memory fault. Clone it to change it.

        Raises:
            ValueError: The file has no such tensor, or was closed.
        """
        if self._arrays is None:
            raise ValueError(f"{self.path} was closed; read {name!r} before")
        if name not in self._arrays:
            raise ValueError(f"name={name!r} is none of the {len(self._arrays)} tensors of {self.path}")
        data = np.asarray(self._arrays[name])
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns that numpy has; the docstring says it to whom it concerns.
            warnings.filterwarnings("ignore", message=".*not writable")
            return torch.from_numpy(data.view(np.uint8))

    def close(self) -> None:
        """Let go of the mapping; tensors read before stay valid."""
        self._arrays = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str], *, parse: Callable[[memoryview, str], Header] = parse_header) -> GGUFFile:
    """Open one GGUF file, of version 2 or 3 and little-endian; one part only of a split file (see ``open_gguf_split``).

    Time and memory are linear in the bytes of the header; the data is mapped, not read. ``parse`` is there for tests.

    Raises:
        GGUFError: The file is damaged, hostile or of an unsupported kind; names file, offset and field.
        OSError: The path cannot be opened.
        ModuleNotFoundError: gguf-py is not installed (``pip install gguf``).
    """
    name = os.fspath(path)
    # Opening a pipe to read would wait for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise GGUFError(name, 0, "file", "no regular file", "this is a pipe, a socket or a device, not a file")
        if status.st_size == 0:
            raise GGUFError(name, 0, "magic", "truncated", "the file is empty")
        header = parse(memoryview(mmap(file.fileno(), 0, access=ACCESS_READ)), name)
        return GGUFFile(name, header, _map_tensors(file, header, name))


def _map_tensors(file: BinaryIO, header: Header, name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return gguf-py's array of each tensor, after comparing its place with the header's."""
    try:
        reader = _tensor_reader()(file, header)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        refused = f"gguf-py does not read what was found valid: {error}"
        raise GGUFError(name, header.tensors_start, "tensors", "gguf-py refuses", refused) from error
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for tensor in reader.tensors:
        entry = header.tensors.get(tensor.name)
        found = TensorEntry(
            tensor.name,
            tensor.tensor_type.name,
            tuple(int(size) for size in reversed(tensor.shape)),
            tensor.data_offset,
            tensor.data.nbytes,
        )
        if found != entry:
            differs = f"gguf-py finds {found}, the validation {entry}"
            raise GGUFError(name, header.tensors_start, f"tensor {shown(tensor.name)}", "gguf-py disagrees", differs)
        arrays[tensor.name] = tensor.data
    if len(arrays) != len(header.tensors):
        differs = f"gguf-py finds {len(arrays)}, the validation {len(header.tensors)}"
        raise GGUFError(name, header.tensors_start, "tensor count", "gguf-py disagrees", differs)
    return arrays


def _tensor_reader() -> Callable[[BinaryIO, Header], Any]:
    """Return gguf-py's reader, told to take the metadata as read.

    Left to itself it makes several numpy views a string, which is seconds for a vocabulary of 150,000 tokens.
    """
    import gguf

    class TensorReader(gguf.GGUFReader):  # type: ignore[misc]
        def __init__(self, file: BinaryIO, header: Header) -> None:
            self.header = header
            super().__init__(file)

        def _build_fields(self, offs: int, count: int) -> int:
            alignment = np.array([self.header.alignment], np.uint32)
            kind = [gguf.GGUFValueType.UINT32]
            self._push_field(gguf.gguf_reader.ReaderField(offs, ALIGNMENT_KEY, [alignment], [0], kind), skip_sum=True)
            return self.header.tensors_start

    return TensorReader
