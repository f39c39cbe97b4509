"""Real vLLM linear layers on one process: built, filled as a model loader fills them, and applied.

What is not real, and why it does not matter to what is judged:

* the tensor-parallel group is an object that holds a size and a rank; the layers, their parameters and the GGUF
  code all ask it and nobody communicates (a row-parallel layer is built with ``reduce_results=False``);
* with ``kernel="exact"`` the name ``fused_mul_mat_gguf`` that the linear method looks up is bound, during the call,
  to :func:`exact_product`, so that only the order and the slicing of the weights can be wrong.

The same code drives every vLLM release: a :class:`Method` says where the release keeps its GGUF linear method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

Kernel = Literal["exact", "shipped"]
Kind = Literal["merged", "qkv", "column", "row", "replicated"]
ShardId = int | str | tuple[int, ...] | None
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QKV = ("q", "k", "v")


class ShippedError(RuntimeError):
    """Shipped code raised.

    Attributes:
        stage: ``"make"``, ``"load"`` or ``"apply"``: in which of the three functions below.
        kind: name of the class of its exception.
    """

    def __init__(self, stage: str, kind: str, message: str) -> None:
        super().__init__(f"{stage}: {kind}: {message}")
        self.stage = stage
        self.kind = kind
        self.message = message


@dataclass(frozen=True)
class Method:
    """A release's GGUF linear method.

    Args:
        module: where its ``GGUFConfig`` is, and the ``fused_mul_mat_gguf`` that its linear method looks up.
        product: what ``fused_mul_mat_gguf`` runs, as a plain function.
        types_first: whether its reader yields the types of all tensors before any data.
    """

    module: ModuleType
    product: Callable[[Tensor, Tensor, int], Tensor]
    types_first: bool


@dataclass(frozen=True)
class Linear:
    """A linear layer, as one rank of a tensor-parallel group sees it.

    Args:
        kind: which layer class.
        columns: in-features of the whole layer.
        shard_rows: out-features of each shard of the whole layer, in declared order; one shard but for
            ``merged`` and ``qkv``.
        quants: ggml's type of each shard.
        qkv: heads, kv heads and head dimension of a ``qkv`` layer.
        dtype: of activations and plain parameters.
    """

    kind: Kind
    columns: int
    shard_rows: tuple[int, ...]
    quants: tuple[str, ...]
    tp_size: int = 1
    tp_rank: int = 0
    disable_tp: bool = False
    qkv: tuple[int, int, int] | None = None
    dtype: str = "float32"

    def quant(self, shard: ShardId) -> str:
        """Type of a shard; of the first one for an id that stands for several, of the last for one beyond the layer."""
        if isinstance(shard, int):
            return self.quants[min(shard, len(self.quants) - 1)]
        return self.quants[QKV.index(shard)] if isinstance(shard, str) else self.quants[0]


@dataclass(frozen=True)
class Layer:
    """A vLLM layer, and what it was built from."""

    module: Any
    linear: Linear
    method: Method


def make(method: Method, linear: Linear, device: torch.device | str = "cpu") -> Layer:
    """Build the layer, told by its types which modules the file leaves unquantised, as the model loader does it.

    Raises:
        ValueError: ``linear`` is not a layer.
        ShippedError: vLLM or the linear method refuses it.
    """
    _check(linear)
    names = [f"shard_{index}" for index in range(len(linear.quants))] if len(linear.quants) > 1 else ["proj"]
    unquantised = [f"layer.{name}" for name, quant in zip(names, linear.quants, strict=True) if quant in PLAIN]
    with _stage("make"), _world(linear), torch.device(device):
        config = method.module.GGUFConfig(unquantised)
        config.packed_modules_mapping = {"fused": names} if len(names) > 1 else {}
        prefix = "layer.fused" if len(names) > 1 else "layer.proj"
        module = _build(linear, {"quant_config": config, "prefix": prefix, "bias": False})
    return Layer(module, linear, method)


def load(layer: Layer, shards: Mapping[ShardId, Tensor], order: Sequence[ShardId] | None = None) -> None:
    """Give the layer's own weight loaders the file's tensors, then process them as the model loader does at its end.

    Args:
        layer: from :func:`make`, not loaded before.
        shards: per shard id (an index, ``"q"``, ``"k"``, ``"v"``; None for the only or the pre-fused tensor) the
            whole tensor's rows, uint8 [rows, row_bytes].
        order: in which they arrive; as in ``shards`` if not given.

    Raises:
        ShippedError: a weight loader or the processing raised.
    """
    arrivals = list(shards if order is None else order)
    tensors = [_file_tensors(layer.linear.quant(shard), shards[shard], shard) for shard in arrivals]
    flat = [tensor for pair in tensors for tensor in pair]
    if layer.method.types_first:
        flat.sort(key=lambda tensor: tensor[0] != "qweight_type")
    with _stage("load"), _world(layer.linear):
        parameters = dict(layer.module.named_parameters())
        for name, data, shard in flat:
            parameter = parameters[name]
            parameter.weight_loader(parameter, data, *(() if shard is None else (shard,)))
        layer.module.quant_method.process_weights_after_loading(layer.module)
        if hasattr(layer.module, "update_param_tp_status"):
            layer.module.update_param_tp_status()


def apply(layer: Layer, x: Tensor, kernel: Kernel = "exact") -> Tensor:
    """Return the rank's output [tokens, its rows] for ``x`` [tokens, its columns].

    Raises:
        ShippedError: the linear method or its kernel raised.
    """
    with running("apply", layer, kernel):
        output: Tensor = layer.module(x)[0]
    return output


@contextmanager
def running(stage: str, layer: Layer, kernel: Kernel) -> Iterator[None]:
    """The layer's rank, and its ``fused_mul_mat_gguf`` bound to the shipped or to the exact function.

    Raises:
        ShippedError: whatever was raised inside.
    """
    chosen = exact_product if kernel == "exact" else layer.method.product
    with _stage(stage), _world(layer.linear), patch.object(layer.method.module, "fused_mul_mat_gguf", chosen):
        yield


def exact_product(x: Tensor, qweight: Tensor, qweight_type: int) -> Tensor:
    """``x @ W.T`` in float64, W dequantised by gguf-py, rounded once to x's dtype; plain types as shipped."""
    import gguf

    quant = gguf.GGMLQuantizationType(int(qweight_type))
    if quant.name in PLAIN:
        return x @ qweight.T
    weight = torch.from_numpy(gguf.dequantize(qweight.detach().cpu().numpy(), quant)).to(x.device)
    return (x.double() @ weight.double().T).to(x.dtype)


def _check(linear: Linear) -> None:
    fused = linear.kind in ("merged", "qkv")
    if len(linear.shard_rows) != len(linear.quants) or (len(linear.quants) > 1 and not fused):
        raise ValueError(
            f"shard_rows={linear.shard_rows}, quants={linear.quants}: one type a shard, and one shard for {linear.kind}"
        )
    if linear.kind == "qkv":
        heads, kv_heads, head_dim = linear.qkv or (0, 0, 0)
        if linear.shard_rows != (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim):
            raise ValueError(f"shard_rows={linear.shard_rows}, qkv={linear.qkv}: rows must be heads * head_dim each")


def _build(linear: Linear, common: dict[str, Any]) -> Any:
    from vllm.model_executor.layers import linear as layers

    common["params_dtype"] = getattr(torch, linear.dtype)
    if linear.kind == "replicated":
        return layers.ReplicatedLinear(linear.columns, linear.shard_rows[0], **common)
    common["disable_tp"] = linear.disable_tp
    if linear.kind == "merged":
        return layers.MergedColumnParallelLinear(linear.columns, list(linear.shard_rows), **common)
    if linear.kind == "qkv":
        heads, kv_heads, head_dim = linear.qkv or (0, 0, 0)
        return layers.QKVParallelLinear(linear.columns, head_dim, heads, kv_heads, **common)
    if linear.kind == "column":
        return layers.ColumnParallelLinear(linear.columns, linear.shard_rows[0], **common)
    return layers.RowParallelLinear(linear.columns, linear.shard_rows[0], reduce_results=False, **common)


def _file_tensors(quant: str, data: Tensor, shard: ShardId) -> list[tuple[str, Tensor, ShardId]]:
    # As the releases' readers yield one tensor of a file: its type first, unless it is a plain one.
    if quant in PLAIN:
        return [("weight", data.contiguous().view(PLAIN[quant]), shard)]
    import gguf

    number = torch.tensor(int(gguf.GGMLQuantizationType[quant]))
    return [("qweight_type", number, shard), ("qweight", data, shard)]


@contextmanager
def _world(linear: Linear) -> Iterator[None]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    group = SimpleNamespace(world_size=linear.tp_size, rank_in_group=linear.tp_rank)
    with set_current_vllm_config(_vllm_config()), patch.object(parallel_state, "_TP", group):
        yield


@functools.cache
def _vllm_config() -> Any:
    from vllm.config import DeviceConfig, VllmConfig

    return VllmConfig(device_config=DeviceConfig(device="cpu"))


@contextmanager
def _stage(name: str) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ShippedError(name, type(error).__name__, str(error)) from error
