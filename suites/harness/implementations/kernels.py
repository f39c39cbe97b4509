"""This repository's fixed kernels."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import torch
from torch import Tensor

from mla_conformance.kernels import absorption, gguf
from mla_conformance.kernels.gguf.linear import GGUFLinear, Parallel
from mla_conformance.kernels.gguf.loading_plan import plan_loading
from mla_conformance.kernels.gguf.mla import FusedKvB, SplitKvB, absorbed
from mla_conformance.kernels.gguf.model_config import ModelConfig
from mla_conformance.kernels.gguf.shards import ShardSpec, qkv_shards
from mla_conformance.kernels.kv_cache import write_kv_cache
from mla_conformance.kernels.kv_cache_gather import gather_kv_cache
from mla_conformance.kernels.merge_states import MAX_SHARDS, MAX_WIDTH, merge_shards, merge_states
from mla_conformance.kernels.mla_decode import mla_decode
from mla_conformance.kernels.mla_prefill import mla_prefill
from mla_conformance.reference.matmul_tolerance import MatmulArithmetic
from mla_conformance.reference.merge_tolerance import MergeArithmetic
from mla_conformance.reference.tolerance import Arithmetic
from mla_conformance.suites.harness.absorption_cases import HeadsProductCase
from mla_conformance.suites.harness.cache_cases import KVCacheWriteCase
from mla_conformance.suites.harness.cache_gather_cases import KVCacheGatherCase
from mla_conformance.suites.harness.cases import DecodeCase
from mla_conformance.suites.harness.gguf_cases import DequantizeCase, MatmulCase
from mla_conformance.suites.harness.gguf_layer_cases import Forward, KvBCase, LinearCase, NamesCase
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.merge_cases import MergeShardsCase, MergeStatesCase
from mla_conformance.suites.harness.multi_token_cases import MultiTokenCase
from mla_conformance.suites.harness.op_call import OpCall
from mla_conformance.suites.harness.prefill_cases import MLAPrefillCase, Part
from mla_conformance.suites.harness.problems import (
    GGUFLinearProblem,
    GGUFMatmulProblem,
    MergeShardsProblem,
    MergeStatesProblem,
    MLADecodeProblem,
    MLAMultiTokenProblem,
    MLAPrefillProblem,
    Problem,
)
from mla_conformance.suites.harness.problems.absorption import HeadsProductProblem

PARALLEL: dict[str, Parallel] = {"row": "row", "replicated": "replicated"}
"""How each kind of layer is cut; all others by rows."""


class Adapter(Implementation):
    """``mla_conformance.kernels``: every drawn problem is in its range."""

    name = "kernels"
    invalid_pages = "nan"

    def version(self) -> str:
        """This package's version."""
        return version("mla-conformance")

    def declines(self, problem: Problem) -> str | None:
        """Decline what decode, prefill and merges document as out of range; of GGUF, nothing."""
        if isinstance(problem, MLAPrefillProblem):
            return _out_of_prefills_range(problem)
        if isinstance(problem, MergeStatesProblem | MergeShardsProblem):
            return _out_of_merges_range(problem)
        if not isinstance(problem, MLADecodeProblem):
            return None
        if problem.heads > 128:
            return f"heads={problem.heads}: at most 128"
        if problem.page_size > 128:
            return f"page_size={problem.page_size}: at most 128"
        if problem.kv_lora_rank % 16 or not 64 <= problem.kv_lora_rank <= 512:
            return f"kv_lora_rank={problem.kv_lora_rank}: a multiple of 16 from 64 to 512"
        if problem.qk_rope_head_dim % 16 or problem.qk_rope_head_dim > 64:
            return f"qk_rope_head_dim={problem.qk_rope_head_dim}: 0, 16, 32, 48 or 64"
        if problem.cache_dtype not in (problem.dtype, "float8_e4m3fn"):
            return f"cache_dtype={problem.cache_dtype}: the queries' {problem.dtype} or float8_e4m3fn"
        if isinstance(problem, MLAMultiTokenProblem) and problem.query_tokens > 16:
            return f"query_tokens={problem.query_tokens}: at most 16"
        return None

    def arithmetic(self, problem: MLADecodeProblem) -> Arithmetic:
        """Probabilities are rounded to the query dtype for the second product; an fp8 cache is read exactly."""
        return Arithmetic(operands=problem.dtype, probabilities=problem.dtype, output=problem.dtype)

    def registered_ops(self) -> Sequence[OpCall]:
        """Every operator of ``mla_conformance.kernels.ops``."""
        # It builds cases of every operation, which a run of one need not load.
        from mla_conformance.suites.contracts import kernels_calls

        return kernels_calls.calls()

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Run the fixed kernel into the case's own buffers."""
        return mla_decode(
            case.q_nope,
            case.q_pe,
            case.kv_cache,
            case.block_table,
            case.seq_lens,
            softmax_scale=case.problem.scale,
            k_scale=case.k_scale,
            num_splits=case.problem.num_splits,
            out=case.out,
            lse=case.lse,
        )

    def mla_decode_multi(self, case: MultiTokenCase) -> tuple[Tensor, Tensor]:
        """Run the fixed kernel into the case's own buffers."""
        return mla_decode(
            case.q_nope,
            case.q_pe,
            case.kv_cache,
            case.block_table,
            case.seq_lens,
            softmax_scale=case.problem.scale,
            query_lens=case.query_lens,
            causal=case.problem.causal,
            k_scale=case.k_scale,
            num_splits=case.problem.num_splits,
            out=case.out,
            lse=case.lse,
        )

    def prefill_arithmetic(self, problem: MLAPrefillProblem) -> Arithmetic:
        """As a decode's: probabilities are rounded to the query dtype for the second product."""
        return Arithmetic(operands=problem.dtype, probabilities=problem.dtype, output=problem.dtype)

    def mla_prefill(self, case: MLAPrefillCase) -> tuple[Tensor, Tensor]:
        """Run the fixed kernel on the first part into the case's own buffers, then merge each further part into it."""
        first, *others = case.parts
        self._attend(case, first, case.out, case.lse)
        used = case.used_rows
        for part in others:
            out, lse = self._attend(case, part, None, None)
            merged, merged_lse = case.out[:used], case.lse[:used]
            merge_states(merged, merged_lse, out[:used], lse[:used], out=merged, lse=merged_lse)
        return case.out, case.lse

    def _attend(
        self, case: MLAPrefillCase, part: Part, out: Tensor | None, lse: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return mla_prefill(
            case.q_nope,
            case.q_pe,
            part.k_nope,
            part.k_pe,
            part.v,
            case.cu_seqlens_q,
            part.cu_seqlens_k,
            softmax_scale=case.problem.scale,
            causal=part.causal,
            max_seqlen_q=case.max_seqlen_q,
            out=out,
            lse=lse,
        )

    def merge_arithmetic(self, problem: MergeStatesProblem | MergeShardsProblem) -> MergeArithmetic:
        """Only the result is rounded to the outputs' dtype."""
        return MergeArithmetic(output=problem.dtype)

    def merge_states(self, case: MergeStatesCase) -> tuple[Tensor, Tensor]:
        """Run the fixed kernel into the case's own buffers."""
        return merge_states(case.out_a, case.lse_a, case.out_b, case.lse_b, out=case.out, lse=case.lse)

    def merge_shards(self, case: MergeShardsCase) -> tuple[Tensor, Tensor]:
        """Run the fixed kernel into the case's own buffers."""
        return merge_shards(case.outs, case.lses, out=case.out, lse=case.lse)

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Run the fixed kernel on the case's own cache."""
        write_kv_cache(case.ckv, case.kpe, case.kv_cache, case.slot_mapping, k_scale=case.k_scale)

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Run the fixed kernel into the case's own buffer."""
        return gather_kv_cache(
            case.kv_cache,
            case.block_table,
            case.cu_seqlens,
            out=case.out,
            seq_starts=case.seq_starts,
            k_scale=case.k_scale,
        )

    def absorption_arithmetic(self, problem: HeadsProductProblem) -> MatmulArithmetic:
        """Sums are float32, the result is rounded once."""
        return MatmulArithmetic(activations=problem.dtype, weights=problem.dtype, output=problem.dtype)

    def absorb_query(self, case: HeadsProductCase) -> Tensor:
        """Run the fixed kernel into the case's own buffer."""
        return absorption.absorb_query(case.x, case.weight, out=case.out)

    def v_up_proj(self, case: HeadsProductCase) -> Tensor:
        """Run the fixed kernel into the case's own buffer."""
        return absorption.v_up_proj(case.x, case.weight, out=case.out)

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Run the fixed kernel into the case's own buffer."""
        return gguf.dequantize(case.data, case.problem.quant, dtype=case.out.dtype, out=case.out)

    def matmul_arithmetic(self, problem: GGUFMatmulProblem | GGUFLinearProblem) -> MatmulArithmetic:
        """Weights are rounded once to the activations' dtype, sums are float32, the result is rounded once."""
        return MatmulArithmetic(activations=problem.dtype, weights=problem.dtype, output=problem.dtype)

    def gguf_matmul(self, case: MatmulCase) -> Tensor:
        """Run the fixed kernel into the case's own buffer."""
        return gguf.matmul(case.x, case.data, case.problem.quant, out=case.out)

    def gguf_linear(self, case: LinearCase) -> Forward:
        """Load a :class:`GGUFLinear` shard by shard, as they arrive."""
        problem = case.problem
        rows = [count for _, count in problem.shards]
        if problem.layer == "qkv":
            specs = qkv_shards(rows[0] // problem.head_dim, rows[1] // problem.head_dim, problem.head_dim)
        else:
            specs = tuple(ShardSpec(f"shard {i}", count) for i, count in enumerate(rows))
        layer = GGUFLinear(
            problem.columns,
            specs,
            parallel=PARALLEL.get(problem.layer, "column"),
            tp_rank=problem.tp_rank,
            tp_size=problem.tp_size,
            disable_tp=problem.disable_tp,
        )
        for arrival in case.arrivals:
            layer.load_shard(arrival.data, arrival.quant, arrival.shard_id)  # type: ignore[arg-type]
        layer.finish_loading()
        return layer

    def gguf_kv_b(self, case: KvBCase) -> tuple[Tensor, Tensor]:
        """Absorb with :func:`mla_conformance.kernels.gguf.mla.absorbed`."""
        problem = case.problem
        if problem.form == "fused":
            weight: FusedKvB | SplitKvB = FusedKvB(case.tensors[0], problem.quants[0])
        else:
            weight = SplitKvB(case.tensors[0], problem.quants[0], case.tensors[1], problem.quants[1])
        return absorbed(
            weight,
            problem.heads,
            problem.qk_nope_head_dim,
            problem.kv_lora_rank,
            problem.v_head_dim,
            dtype=getattr(torch, problem.dtype),
        )

    def gguf_names(self, case: NamesCase) -> dict[str, list[str]]:
        """Plan the loading, which refuses a file in which anything is left over or left out."""
        config = ModelConfig.from_hf(case.model.config)
        plan = plan_loading(case.model.arch, config, case.tensors, mtp=case.problem.mtp)
        fills: dict[str, list[str]] = {}
        for parameter, sources in plan.sources.items():
            for source in sources:
                fills.setdefault(source.tensor, []).append(parameter)
        return fills


def _out_of_merges_range(problem: MergeStatesProblem | MergeShardsProblem) -> str | None:
    if problem.width > MAX_WIDTH:
        return f"width={problem.width}: at most {MAX_WIDTH}"
    if problem.states > MAX_SHARDS:
        return f"shards={problem.states}: at most {MAX_SHARDS}"
    return None


def _out_of_prefills_range(problem: MLAPrefillProblem) -> str | None:
    if problem.heads > 128:
        return f"heads={problem.heads}: at most 128"
    if problem.qk_nope_head_dim % 16 or problem.qk_nope_head_dim > 256:
        return f"qk_nope_head_dim={problem.qk_nope_head_dim}: a multiple of 16 from 16 to 256"
    if problem.qk_rope_head_dim % 16 or problem.qk_rope_head_dim > 64:
        return f"qk_rope_head_dim={problem.qk_rope_head_dim}: 0, 16, 32, 48 or 64"
    if problem.v_head_dim % 16 or problem.v_head_dim > 256:
        return f"v_head_dim={problem.v_head_dim}: a multiple of 16 from 16 to 256"
    return None
