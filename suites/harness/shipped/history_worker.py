"""The process in which vLLM 0.16.0's files are the ones that ``import vllm`` finds.

:mod:`vllm_0_16` starts it and talks JSON with it, one line a request and one line an answer; tensors travel in
safetensors files.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from mla_conformance.suites.harness.shipped import vllm_layers
from mla_conformance.suites.harness.shipped.vllm_layers import Linear, Method, ShardId, ShippedError

IN_TREE = "vllm.model_executor.layers.quantization.gguf"


def encode(layer: Linear, order: list[ShardId], tensors: str, result: str) -> dict[str, Any]:
    """A request: the file ``tensors`` holds ``x`` and each arrival's bytes by number; ``result`` is to be written."""
    return {"layer": asdict(layer), "order": order, "tensors": tensors, "result": result}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request: ``vllm`` (its version), or ``error`` (the stage) with ``kind`` and ``message``."""
    layer = Linear(**{name: _tuples(value) for name, value in request["layer"].items()})
    order: list[ShardId] = [_tuples(shard) for shard in request["order"]]
    tensors = load_file(request["tensors"])
    try:
        made = vllm_layers.make(method(), layer)
        shards = {shard: tensors[str(index)] for index, shard in enumerate(order)}
        vllm_layers.load(made, shards, order)
        y = vllm_layers.apply(made, tensors["x"])
    except ShippedError as error:
        return {"error": error.stage, "kind": error.kind, "message": error.message}
    save_file({"y": y.contiguous()}, request["result"])
    return {"vllm": _version()}


@functools.cache
def method() -> Method:
    """The in-tree linear method; its kernels are not there, so ``kernel="shipped"`` cannot run."""
    module = importlib.import_module(IN_TREE)
    return Method(module, module._fused_mul_mat_gguf, types_first=True)


def _version() -> str:
    import vllm

    folder = Path(vllm.__path__[0]).parent
    found = next((entry.name for entry in folder.glob("vllm-*.dist-info")), "")
    return found.removeprefix("vllm-").removesuffix(".dist-info") or f"unknown ({folder})"


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def serve() -> None:
    """Answer requests until standard input ends."""
    # vLLM prints while it is imported; whatever reaches descriptor 1 from here on goes to standard error instead.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:
            reply = {"error": "worker", "message": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    serve()
