"""Compile to PTX and stop: the emulator needs no machine code, and ptxas is up to a fifth of a compilation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.backends.nvidia.compiler import CUDABackend


@contextmanager
def without_assembler() -> Iterator[None]:
    """Inside, Triton's last stage gives no machine code.

    The backend's hash, which names entries of Triton's cache on disk, differs too: such a kernel must never be taken
    for a whole one. The cache is shared by processes, so each kernel is compiled once a machine.
    """
    add_stages, cache_name = CUDABackend.add_stages, CUDABackend.hash

    def stages_without_assembler(self: Any, stages: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        add_stages(self, stages, *args, **kwargs)
        stages["cubin"] = lambda source, metadata: b""

    with (
        patch.object(CUDABackend, "add_stages", stages_without_assembler),
        patch.object(CUDABackend, "hash", lambda self: f"{cache_name(self)}-ptx-only"),
    ):
        yield
