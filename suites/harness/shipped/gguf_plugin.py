"""vLLM's GGUF plugin (vllm-gguf-plugin), as installed: its kernels, its linear method, its name maps.

Its package is entered without its ``__init__``, which only registers with vLLM's engine and needs more packages.
Heavy imports happen when a function is called. The kernels' launchers insist on ``is_cuda`` tensors, which the lanes
without a GPU say of those on the CPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from mla_conformance.suites.harness.shipped import vllm_layers
from mla_conformance.suites.harness.shipped.vllm_layers import Kernel, Linear, Method, ShardId

Backend = Literal["cuda", "triton"]
PLUGIN = "vllm_gguf_plugin"
LIBRARY_VARIABLE = "MLA_CONFORMANCE_GGUF_LIBRARY"
"""Environment variable: a compiled library of the plugin to load in place of the installed one."""


def part(name: str) -> Any:
    """Import the plugin's module ``name`` (``"ops"``, ``"quantization.linear"``) without the package's ``__init__``.

    Raises:
        ModuleNotFoundError: the plugin, or a package that this module of it needs, is not installed.
    """
    if PLUGIN not in sys.modules:
        spec = importlib.util.find_spec(PLUGIN)
        if spec is None:
            raise ModuleNotFoundError(f"{PLUGIN} is not installed: pip install --no-deps vllm-gguf-plugin")
        package = ModuleType(PLUGIN)
        package.__path__ = list(spec.submodule_search_locations or ())
        sys.modules[PLUGIN] = package
        if os.environ.get(LIBRARY_VARIABLE):
            # Two libraries cannot register the same operations in one process.
            sys.modules[f"{PLUGIN}._C_gguf"] = None  # type: ignore[assignment]
    if not name.startswith(("ops", "triton")):
        _let_vllm_do_without_its_library()
    return importlib.import_module(f"{PLUGIN}.{name}")


@functools.cache
def _let_vllm_do_without_its_library() -> None:
    """Where vLLM sees a GPU but has no compiled library, tell it of no platform: its layers ask the library otherwise.

    Modules of vLLM that are imported already keep the platform that they found.
    """
    from vllm import platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    if platforms.current_platform.is_cuda() and not hasattr(torch.ops._C, "cutlass_scaled_mm_supports_block_fp8"):
        platforms._current_platform = UnspecifiedPlatform()


@functools.cache
def supported() -> frozenset[str]:
    """The quantised types that its Triton kernels declare; its CUDA kernels and linear method name the same ones."""
    import gguf

    declared = part("triton.gemm.utils").TRITON_SUPPORTED_TYPES
    return frozenset(gguf.GGMLQuantizationType(int(number)).name for number in declared)


@functools.cache
def cuda_library() -> str | None:
    """Load the compiled library into this process; return why that failed, or None.

    It is the installed plugin's own, or the file that ``MLA_CONFORMANCE_GGUF_LIBRARY`` names.
    """
    path = _library_path()
    if path is None:
        return f"{PLUGIN} holds no compiled library _C_gguf*.so"
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"{path.name} of {library_version()}: {error.__cause__ or error}"
    if not hasattr(torch.ops._C_gguf, "ggml_dequantize"):
        return f"{path.name} of {library_version()}: registers no operation _C_gguf::ggml_dequantize"
    return None


def library_version() -> str:
    """Release that the compiled library belongs to, as the ``dist-info`` beside it says."""
    path = _library_path()
    if path is None:
        return "no release"
    found = [found for found in distributions(path=[str(path.parent.parent)]) if found.name == "vllm-gguf-plugin"]
    return f"vllm-gguf-plugin {found[0].version}" if found else f"an unknown release ({path})"


def plugin_version() -> str:
    """The installed plugin's version."""
    return version("vllm-gguf-plugin")


def _library_path() -> Path | None:
    given = os.environ.get(LIBRARY_VARIABLE)
    if given:
        return Path(given).resolve()
    spec = importlib.util.find_spec(PLUGIN) if PLUGIN not in sys.modules else None
    folders = spec.submodule_search_locations if spec else sys.modules[PLUGIN].__path__
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("_C_gguf*.so"))), None)


def dequantize(data: Tensor, quant: str, columns: int, dtype: torch.dtype, backend: Backend | None = None) -> Tensor:
    """Run the plugin's ``ops.ggml_dequantize``.

    Args:
        data: uint8 [rows, row_bytes].
        quant: ggml's name of the type.
        columns: in-features.
        dtype: of the result.
        backend: ``"cuda"`` (the compiled library) or ``"triton"``; as the plugin itself would choose if not given.

    Returns:
        [rows, columns].

    Raises:
        ValueError: ``backend="cuda"`` and :func:`cuda_library` has a reason, or the tensors are on the CPU.
    """
    with _backend(backend, data):
        weight: Tensor = part("ops").ggml_dequantize(data, _number(quant), data.shape[0], columns, dtype)
    return weight


def matmul(x: Tensor, data: Tensor, quant: str, backend: Backend | None = None) -> Tensor:
    """Run the linear method's ``_fused_mul_mat_gguf``: x [tokens, columns], data uint8 [rows, row_bytes].

    Returns:
        [tokens, rows] of x's dtype.

    Raises:
        ValueError: as :func:`dequantize`.
    """
    if quant in vllm_layers.PLAIN:
        data = data.contiguous().view(vllm_layers.PLAIN[quant])
    with _backend(backend, x):
        y: Tensor = part("quantization.linear")._fused_mul_mat_gguf(x, data, _number(quant))
    return y


def _number(quant: str) -> int:
    import gguf

    return int(gguf.GGMLQuantizationType[quant])


@contextmanager
def _backend(backend: Backend | None, tensor: Tensor) -> Iterator[None]:
    on_gpu = tensor.device.type == "cuda"
    if backend == "cuda" and not on_gpu:
        raise ValueError(f"backend='cuda': the tensors are on {tensor.device}; move them, or use backend='triton'")
    wanted = on_gpu and backend != "triton"
    reason = cuda_library() if wanted else None
    if backend == "cuda" and reason is not None:
        raise ValueError(f"backend='cuda': {reason}")
    with patch.object(part("ops"), "_CUDA_ENABLED", wanted and reason is None):
        yield


@functools.cache
def method() -> Method:
    """Its linear method, for :mod:`vllm_layers`; ``kernel="shipped"`` runs :func:`matmul`'s function."""
    shipped = part("quantization.linear")._fused_mul_mat_gguf

    def product(x: Tensor, qweight: Tensor, qweight_type: int) -> Tensor:
        with _backend(None, x):
            y: Tensor = shipped(x, qweight, qweight_type)
        return y

    return Method(part("quantization"), product, types_first=False)


def linear(
    layer: Linear,
    shards: Mapping[ShardId, Tensor],
    x: Tensor,
    order: Sequence[ShardId] | None = None,
    kernel: Kernel = "exact",
) -> Tensor:
    """Build, fill and apply a real layer: :func:`vllm_layers.make`, ``load`` and ``apply`` on x's device.

    Raises:
        ValueError: ``layer`` is not a layer.
        ShippedError: shipped code raised; it has the stage.
    """
    made = vllm_layers.make(method(), layer, x.device)
    vllm_layers.load(made, shards, order)
    return vllm_layers.apply(made, x, kernel)


def name_map(model_type: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the GGUF tensor names that the plugin loads, and under which name; tensors outside are dropped silently.

    The default weights adapter's ``build_name_map`` runs on a configuration built in memory, its dummy model on the
    meta device. ``config`` overrides the model type's defaults in transformers.

    Raises:
        RuntimeError: the plugin refuses: an unknown architecture, or parameters that it cannot map.
    """
    from transformers import AutoConfig

    adapters = part("weights_adapter.default")
    built = AutoConfig.for_model(model_type, **config)
    names: dict[str, str] = adapters.GGUFWeightsAdapter(built).build_name_map(
        SimpleNamespace(hf_config=built, trust_remote_code=False)
    )
    return names


def read(file: Path, names: Mapping[str, str]) -> list[tuple[str, Tensor]]:
    """Return what the plugin's reader yields of a GGUF file: renamed tensors, each quantised one after its type.

    Args:
        file: an unsplit GGUF file.
        names: a map as :func:`name_map` gives it; tensors that it lacks are passed over without a word.
    """
    return list(part("weight_utils").gguf_quant_weights_iterator_multi([str(file)], dict(names)))


def absorbed(
    data: Tensor, quant: str, heads: int, nope: int, v: int, latent: int, kernel: Kernel = "exact"
) -> tuple[Tensor, Tensor]:
    """Load ``kv_b_proj`` into a real column-parallel layer and let vLLM's ``MLAAttention`` absorb it.

    The attention object is bare: its constructor, which chooses a backend for the machine, is not run. What
    :meth:`MLAAttention.process_weights_after_loading` reads is set by hand.

    Args:
        data: uint8 [heads * (nope + v), row_bytes of latent columns].
        quant: ggml's name of its type.
        heads: attention heads.
        nope: qk_nope_head_dim.
        v: v_head_dim.
        latent: kv_lora_rank.
        kernel: what multiplies the identity matrix by which vLLM dequantises.

    Returns:
        ``W_UK_T`` [heads, nope, latent] and ``W_UV`` [heads, latent, v], float32.

    Raises:
        ShippedError: shipped code raised.
    """
    shipped = method()  # before vLLM's attention is imported: it sees to it that vLLM can be
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention, set_default_quant_scales

    rows = heads * (nope + v)
    layer = vllm_layers.make(shipped, Linear("column", latent, (rows,), (quant,)), data.device)
    vllm_layers.load(layer, {None: data})
    attention = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(attention)
    settings = {
        "impl": SimpleNamespace(process_weights_after_loading=lambda dtype: None),
        "is_amx_bmm_enabled": False,
        "is_aiter_triton_fp4_bmm_enabled": False,
        "is_aiter_triton_fp8_bmm_enabled": False,
        "dcp_q_replicate": False,
        "quant_config": None,
        "kv_b_proj": layer.module,
        "kv_lora_rank": latent,
        "num_heads": heads,
        "qk_nope_head_dim": nope,
        "v_head_dim": v,
    }
    for name, value in settings.items():
        setattr(attention, name, value)
    set_default_quant_scales(attention, register_buffer=True)
    with vllm_layers.running("apply", layer, kernel):
        attention.process_weights_after_loading(torch.float32)
    return attention.W_UK_T.data, attention.W_UV.data
