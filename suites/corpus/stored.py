"""The file format of the corpus: one safetensors file a launch, everything in it.

Every tensor of a file is the xz stream of some bytes: ``ptx``, the text; ``N.before``, storage N as it was before
the launch; ``N.after``, the same storage after it, left out where nothing changed. The metadata entry ``launch``
is JSON: the launch parameters, the arguments in the order of the PTX parameters, and what made the file.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

DATA = Path(__file__).parent / "data"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Storage:
    """Memory behind one or more pointer arguments.

    Args:
        before: uint8 [bytes], before the launch.
        after: uint8 [bytes], after it; ``before`` itself if the launch changed nothing.
        dtype: of the elements, for comparing.
    """

    before: Tensor
    after: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class Pointer:
    """A pointer argument: ``offset`` bytes into storage number ``storage``."""

    name: str
    storage: int
    offset: int


@dataclass(frozen=True)
class Scalar:
    """A number argument of PTX type ``type`` as Triton names it (``i32``, ``fp32``), or a null pointer (``null``)."""

    name: str
    type: str
    value: int | float


@dataclass(frozen=True)
class StoredLaunch:
    """One launch as the GPU ran it.

    Args:
        case: name of the case that launched it.
        function: name of the ``@triton.jit`` function, which is that of the PTX entry.
        exact: whether the results are fixed bit for bit, as integers, copies, conversions and dequantisation are.
        grid: CTAs along x, y and z.
        num_warps: warps of one CTA.
        shared_bytes: dynamic shared memory of one CTA.
        arguments: one for each parameter of the PTX entry, in order.
        storages: what the pointers point into, each once.
        ptx: the text that Triton made.
        made_by: versions, card, driver and date.
    """

    case: str
    function: str
    exact: bool
    grid: tuple[int, int, int]
    num_warps: int
    shared_bytes: int
    arguments: tuple[Pointer | Scalar, ...]
    storages: tuple[Storage, ...]
    ptx: str
    made_by: dict[str, str]


def names(folder: Path = DATA) -> list[str]:
    """Return the names of the stored launches: the file names without ``.safetensors``, sorted."""
    return sorted(path.name.removesuffix(".safetensors") for path in folder.glob("*.safetensors"))


def read(name: str, folder: Path = DATA) -> StoredLaunch:
    """Read one launch.

    Raises:
        ValueError: no such file, or not one of this format.
    """
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        raise ValueError(f"name={name!r}: there is no {path.name} in the corpus; names() lists what there is")
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get("launch")
        if text is None:
            raise ValueError(f"name={name!r}: the file has no metadata entry 'launch', so it is no stored launch")
        tensors = {key: _unpack(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118
    launch: dict[str, Any] = json.loads(text)
    storages = []
    for i, dtype in enumerate(launch.pop("storages")):
        before = _as_tensor(tensors[f"{i}.before"])
        after = _as_tensor(tensors[f"{i}.after"]) if f"{i}.after" in tensors else before
        storages.append(Storage(before, after, getattr(torch, dtype)))
    arguments = [Pointer(**entry) if "storage" in entry else Scalar(**entry) for entry in launch.pop("arguments")]
    return StoredLaunch(
        arguments=tuple(arguments),
        storages=tuple(storages),
        ptx=tensors["ptx"].decode(),
        grid=tuple(launch.pop("grid")),
        **launch,
    )


def write(name: str, launch: StoredLaunch, folder: Path) -> Path:
    """Write one launch to ``folder`` and return the file."""
    tensors = {"ptx": _pack(launch.ptx.encode())}
    for i, storage in enumerate(launch.storages):
        tensors[f"{i}.before"] = _pack(storage.before.numpy().tobytes())
        if not torch.equal(storage.before, storage.after):
            tensors[f"{i}.after"] = _pack(storage.after.numpy().tobytes())
    text = json.dumps(
        {
            "case": launch.case,
            "function": launch.function,
            "exact": launch.exact,
            "grid": launch.grid,
            "num_warps": launch.num_warps,
            "shared_bytes": launch.shared_bytes,
            "arguments": [vars(argument) for argument in launch.arguments],
            "storages": [str(storage.dtype).removeprefix("torch.") for storage in launch.storages],
            "made_by": launch.made_by,
        }
    )
    path = folder / f"{name}.safetensors"
    save_file(tensors, path, metadata={"launch": text})
    return path


def manifest(folder: Path = DATA) -> dict[str, str]:
    """Return the sha256 of each file, by launch name, as written down when the corpus was made."""
    sha256: dict[str, str] = json.loads((folder / MANIFEST).read_text())
    return sha256


def write_manifest(folder: Path) -> None:
    """Write down the sha256 of every launch in ``folder``."""
    text = json.dumps({name: digest(name, folder) for name in names(folder)}, indent=1)
    (folder / MANIFEST).write_text(text + "\n")


def digest(name: str, folder: Path = DATA) -> str:
    """Return the sha256 of one launch's file as it is now."""
    return hashlib.sha256((folder / f"{name}.safetensors").read_bytes()).hexdigest()


def _pack(data: bytes) -> Tensor:
    return _as_tensor(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def _unpack(tensor: Tensor) -> bytes:
    return lzma.decompress(tensor.numpy().tobytes())


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
