"""vLLM's GGUF plugin as shipped: its kernels, and its linear method in real vLLM layers."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.reference.matmul_tolerance import MatmulArithmetic
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.gguf_cases import DequantizeCase, MatmulCase
from mla_conformance.suites.harness.gguf_layer_cases import Forward, KvBCase, LinearCase, NamesCase
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.problems import (
    GGUFDequantizeProblem,
    GGUFKvBProblem,
    GGUFLinearProblem,
    GGUFMatmulProblem,
    GGUFNamesProblem,
    Problem,
)
from mla_conformance.suites.harness.shipped import gguf_plugin as shipped
from mla_conformance.suites.harness.shipped import vllm_layers
from mla_conformance.suites.harness.shipped.vllm_layers import PLAIN, ShardId, ShippedError

NAMES = {quant: str(dtype).removeprefix("torch.") for quant, dtype in PLAIN.items()}
CALLERS_FAULT = {kind.__name__: kind for kind in (ValueError, TypeError, KeyError, NotImplementedError)}
"""Exceptions that tell a caller what is wrong with the input."""


class Adapter(Implementation):
    """What ``vllm-gguf-plugin`` runs on the device at hand: its Triton kernels on a CPU lane.

    Layers are judged with the product itself replaced by an exact one (``vllm_layers.exact_product``), so that only the
    order and the slices of the weights can be wrong; the product is judged by itself.
    """

    name = "gguf_plugin"
    # They take five minutes for all types and targets; what they spill is in docs/findings.md.
    in_compile_lane = False

    def version(self) -> str:
        """The plugin's version, and that of its compiled library if another release's is used."""
        plugin = shipped.plugin_version()
        library = shipped.library_version().rpartition(" ")[2] if _has_cuda_kernels() else plugin
        return plugin if library == plugin else f"{plugin} with the library of {library}"

    def declines(self, problem: Problem) -> str | None:
        """Decline types that the plugin does not name, and layouts that it never makes."""
        if isinstance(problem, GGUFNamesProblem) and problem.model == "Kimi-K2":
            return (
                "model=Kimi-K2: transformers, which the plugin asks for the model's parameters, does not know kimi_k2"
            )
        missing = [quant for quant in _quants(problem) if quant not in shipped.supported() and quant not in PLAIN]
        if missing:
            return f"quant={missing[0]}: the plugin has no kernel for it"
        if isinstance(problem, GGUFDequantizeProblem | GGUFMatmulProblem) and problem.layout != "dense":
            return f"layout={problem.layout}: its weights are contiguous"
        if isinstance(problem, GGUFDequantizeProblem) and problem.quant in PLAIN:
            return f"quant={problem.quant}: the plugin never dequantises it"
        if isinstance(problem, GGUFDequantizeProblem) and problem.rows * problem.columns >= 2**31:
            return "it counts elements in 32 bits, and may take the device with it: see docs/findings.md"
        if isinstance(problem, GGUFDequantizeProblem | GGUFMatmulProblem) and problem.rows == 0:
            return "rows=0: its layers have rows"
        if isinstance(problem, GGUFMatmulProblem) and problem.quant in PLAIN and problem.dtype != NAMES[problem.quant]:
            return f"quant={problem.quant}: vLLM holds plain weights in the activations' dtype"
        if isinstance(problem, GGUFKvBProblem) and problem.form == "split":
            return "form=split: the plugin drops attn_k_b and attn_v_b (GGUF-NAM-01)"
        return None

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Call ``ops.ggml_dequantize``, which allocates its result."""
        return case.out.copy_(shipped.dequantize(case.data, case.problem.quant, case.problem.columns, case.out.dtype))

    def matmul_arithmetic(self, problem: GGUFMatmulProblem | GGUFLinearProblem) -> MatmulArithmetic:
        """Its Triton products round weights to the activations' dtype; its CUDA ones the activations to 8 bits."""
        if isinstance(problem, GGUFLinearProblem):
            return MatmulArithmetic(activations="float64", weights="float64", output=problem.dtype)
        if problem.quant in PLAIN or not _has_cuda_kernels() or _dequantises_first(problem):
            return MatmulArithmetic(activations=problem.dtype, weights=problem.dtype, output=problem.dtype)
        return MatmulArithmetic(activations="q8_1", weights="float64", output=problem.dtype)

    def gguf_matmul(self, case: MatmulCase) -> Tensor:
        """Call the linear method's product, which allocates its result."""
        return case.out.copy_(shipped.matmul(case.x, case.data, case.problem.quant))

    def gguf_linear(self, case: LinearCase) -> Forward:
        """Build the layer as vLLM does and load it as the plugin's model loader does."""
        try:
            return _loaded(case)
        except ShippedError as error:
            raise as_caller_sees_it(error) from error

    def gguf_kv_b(self, case: KvBCase) -> tuple[Tensor, Tensor]:
        """Let vLLM's ``MLAAttention`` absorb the plugin's layer."""
        problem = case.problem
        w_uk, w_uv = shipped.absorbed(
            case.tensors[0],
            problem.quants[0],
            problem.heads,
            problem.qk_nope_head_dim,
            problem.v_head_dim,
            problem.kv_lora_rank,
        )
        dtype = getattr(torch, problem.dtype)
        return w_uk.to(dtype), w_uv.to(dtype)

    def gguf_names(self, case: NamesCase) -> dict[str, list[str]]:
        """Ask the plugin's default weights adapter, which builds the model on the meta device."""
        config = {key: value for key, value in case.model.config.items() if key != "model_type"}
        names = shipped.name_map(case.model.config["model_type"], config)
        return {name: [names[name]] for name, *_ in case.tensors if name in names}


def _quants(problem: Problem) -> list[str]:
    """The types that a problem needs kernels for."""
    if isinstance(problem, GGUFLinearProblem):
        return [quant for quant, _ in problem.shards]
    if isinstance(problem, GGUFKvBProblem):
        return list(problem.quants)
    return [problem.quant] if isinstance(problem, GGUFDequantizeProblem | GGUFMatmulProblem) else []


def _has_cuda_kernels() -> bool:
    """Whether the plugin would use its compiled library in this process."""
    return torch.cuda.is_available() and shipped.cuda_library() is None


def _dequantises_first(problem: GGUFMatmulProblem) -> bool:
    """Whether so many tokens are multiplied with a dequantised copy: only IQ types have no other kernel for them.

    The limits are those of ``_fused_mul_mat_gguf`` in the plugin 0.0.5.
    """
    return problem.quant.startswith("IQ") and problem.tokens > (8 if problem.rows > 5120 else 16)


def as_caller_sees_it(error: ShippedError) -> Exception:
    """The exception that shipped code raised, as far as it tells its caller what is wrong with the input."""
    return CALLERS_FAULT.get(error.kind, RuntimeError)(str(error))


def layer_of(problem: GGUFLinearProblem) -> vllm_layers.Linear:
    """The vLLM layer that the problem describes."""
    rows = tuple(count for _, count in problem.shards)
    heads = [count // problem.head_dim for count in rows]
    return vllm_layers.Linear(
        problem.layer,  # type: ignore[arg-type]
        problem.columns,
        rows,
        tuple(quant for quant, _ in problem.shards),
        problem.tp_size,
        problem.tp_rank,
        problem.disable_tp,
        (heads[0], heads[1], problem.head_dim) if problem.layer == "qkv" else None,
        problem.dtype,
    )


def shard_id(given: object, problem: GGUFLinearProblem) -> ShardId:
    """The id under which vLLM's loaders know a shard: a letter for q, k and v, none where there is one shard."""
    if problem.layer == "qkv" and isinstance(given, int):
        return vllm_layers.QKV[given]
    if len(problem.shards) == 1 and given == 0:
        return None
    return given  # type: ignore[return-value]


def _loaded(case: LinearCase) -> Forward:
    layer = vllm_layers.make(shipped.method(), layer_of(case.problem), case.x.device)
    order = [shard_id(arrival.shard_id, case.problem) for arrival in case.arrivals]
    tensors = dict(zip(order, (arrival.data for arrival in case.arrivals), strict=True))
    vllm_layers.load(layer, tensors, order)

    def forward(x: Tensor) -> Tensor:
        try:
            return vllm_layers.apply(layer, x, "exact")
        except ShippedError as error:
            raise Mismatch(f"loaded without an error, and the forward raised {error.kind}: {error.message}") from error

    return forward
