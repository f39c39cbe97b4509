"""vLLM 0.16.0's in-tree GGUF linear method, the last release before the code moved into a plugin that was looked at.

Two vLLM releases do not fit in one process, so :mod:`history_worker` runs in its own, with the folder that the
environment variable ``MLA_CONFORMANCE_VLLM_0_16`` names in front of its search path. The folder holds the Python files
and the ``dist-info`` of the wheel; compiled parts are not needed, because the product itself is
:func:`vllm_layers.exact_product`.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from mla_conformance.suites.harness.shipped import history_worker
from mla_conformance.suites.harness.shipped.vllm_layers import Linear, ShardId, ShippedError
from mla_conformance.suites.harness.worker import Worker

FOLDER_VARIABLE = "MLA_CONFORMANCE_VLLM_0_16"
VERSION = "0.16.0"
REQUEST_SECONDS = 300.0
"""The first request imports vLLM, which took 10 to 40 seconds on two busy cores."""
_numbers = itertools.count()


def available() -> str | None:
    """Why vLLM 0.16.0 cannot be run here, or None."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return f"{FOLDER_VARIABLE} is not set: name a folder with vLLM {VERSION}'s Python files and dist-info"
    if not (Path(folder) / "vllm" / "__init__.py").is_file():
        return f"{FOLDER_VARIABLE}={folder}: holds no vllm/__init__.py"
    if not (Path(folder) / f"vllm-{VERSION}.dist-info").is_dir():
        return f"{FOLDER_VARIABLE}={folder}: holds no vllm-{VERSION}.dist-info"
    return None


def linear(
    layer: Linear, shards: Mapping[ShardId, Tensor], x: Tensor, order: Sequence[ShardId] | None = None
) -> Tensor:
    """Build, fill and apply a real vLLM 0.16.0 layer in the worker: see :func:`gguf_plugin.linear`.

    Raises:
        ValueError: :func:`available` has a reason.
        ShippedError: vLLM's code raised; it has the stage.
        NoResult: the worker died or took too long.
    """
    reason = available()
    if reason is not None:
        raise ValueError(reason)
    worker, folder = _worker(os.environ[FOLDER_VARIABLE]), _folder()
    arrivals = list(shards if order is None else order)
    number = next(_numbers)
    tensors, result = Path(folder) / f"{number}.safetensors", Path(folder) / f"{number}.y.safetensors"
    save_file({"x": x.contiguous(), **{str(i): shards[shard].clone() for i, shard in enumerate(arrivals)}}, tensors)
    try:
        answer = worker.ask(history_worker.encode(layer, arrivals, str(tensors), str(result)))
        if "error" in answer:
            raise ShippedError(answer["error"], answer["kind"], answer["message"])
        if answer["vllm"] != VERSION:
            raise ValueError(f"{FOLDER_VARIABLE}: the worker found vLLM {answer['vllm']}, not {VERSION}")
        return load_file(result)["y"]
    finally:
        tensors.unlink()
        result.unlink(missing_ok=True)


@functools.cache
def _worker(packages: str) -> Worker:
    worker = Worker(history_worker.__name__, seconds=REQUEST_SECONDS, path=[packages])
    atexit.register(worker.close)
    return worker


@functools.cache
def _folder() -> str:
    folder = tempfile.TemporaryDirectory(prefix="mla-conformance-")
    atexit.register(folder.cleanup)
    return folder.name
