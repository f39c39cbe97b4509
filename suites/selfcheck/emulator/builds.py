"""Kernel builds to plant faults in: the PTX of one launch, and the launch's arguments as they were before it.

``capture_builds.py`` makes them, in a process of its own: Triton is set up once a process, and the tests' own process
may be interpreting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mla_conformance.suites.emulator import Run, run_ptx

BUDGET = 200_000
"""Far above the few thousand instructions of any launch here."""


@dataclass(frozen=True)
class Build:
    """One launch as ``emulate`` saw it, its tensors as they were before."""

    ptx: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    shared_bytes: int
    threads: int

    def run(self, ptx: str | None = None, **changes: Any) -> Run:
        """Run the PTX, or an edited one, on fresh copies of the inputs."""
        return self.outcome(ptx, **changes)[0]

    def outcome(
        self,
        ptx: str | None = None,
        *,
        arguments: Sequence[Any] | None = None,
        grid: tuple[int, ...] | None = None,
        shared_bytes: int | None = None,
        budget: int = BUDGET,
    ) -> tuple[Run, list[bytes]]:
        """As :meth:`run`, with the bytes of every tensor afterwards."""
        fresh = copied(self.arguments if arguments is None else arguments)
        run = run_ptx(
            self.ptx if ptx is None else ptx,
            self.grid if grid is None else grid,
            fresh,
            shared_bytes=self.shared_bytes if shared_bytes is None else shared_bytes,
            threads=self.threads,
            budget=budget,
        )
        return run, [memory(value).numpy().tobytes() for value in fresh if isinstance(value, Tensor)]

    def sites(self, pattern: str) -> list[int]:
        """Numbers, from 1, of the PTX lines that the pattern matches."""
        lines = enumerate(self.ptx.splitlines(), 1)
        return [number for number, line in lines if re.search(pattern, line)]

    def line(self, number: int) -> str:
        """A line of the PTX."""
        return self.ptx.splitlines()[number - 1].strip()

    def edited(self, number: int, change: Callable[[str], str]) -> str:
        """The PTX with one line changed; no line moves."""
        lines = self.ptx.splitlines()
        lines[number - 1] = change(lines[number - 1])
        return "\n".join(lines)

    def without(self, number: int) -> str:
        """The PTX with one line emptied."""
        return self.edited(number, lambda line: "")


def memory(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's whole storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]


def copied(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with every tensor's storage copied; tensors that share one still do."""
    storages: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        fresh = storages.setdefault(storage.data_ptr(), storage.clone())
        return torch.empty(0, dtype=value.dtype).set_(fresh, value.storage_offset(), value.shape, value.stride())

    return tuple(copy(value) for value in arguments)


def write(build: Build, path: Path) -> None:
    """Write a build to a file: storages as bytes, the rest as JSON in the metadata."""
    tensors: dict[str, Tensor] = {"ptx": torch.frombuffer(bytearray(build.ptx.encode()), dtype=torch.uint8)}
    numbers: dict[int, str] = {}
    listed: list[Any] = []
    for value in build.arguments:
        if not isinstance(value, Tensor):
            listed.append(value)
            continue
        name = numbers.setdefault(value.untyped_storage().data_ptr(), str(len(numbers)))
        tensors[name] = memory(value)
        dtype = str(value.dtype).removeprefix("torch.")
        listed.append([name, dtype, value.storage_offset(), list(value.shape), list(value.stride())])
    text = json.dumps([build.grid, listed, build.shared_bytes, build.threads])
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"build": text})


def read(path: Path) -> Build:
    """Read what :func:`write` wrote."""
    with safe_open(path, framework="pt") as file:
        grid, listed, shared_bytes, threads = json.loads(file.metadata()["build"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def argument(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        name, dtype, *place = value
        return torch.empty(0, dtype=getattr(torch, dtype)).set_(tensors[name].untyped_storage(), *place)

    arguments = tuple(argument(value) for value in listed)
    return Build(bytes(tensors["ptx"].numpy()).decode(), tuple(grid), arguments, shared_bytes, threads)
