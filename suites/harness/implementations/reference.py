"""The reference as an implementation: shows that a right answer passes, whatever the machine."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.reference import absorption, fused_linear
from mla_conformance.reference.cache_gather import gather_rows
from mla_conformance.reference.cache_write import write_rows
from mla_conformance.reference.gguf import dequantize
from mla_conformance.reference.matmul_tolerance import MatmulArithmetic
from mla_conformance.reference.merge_tolerance import MergeArithmetic
from mla_conformance.reference.mla import decode_paged
from mla_conformance.reference.prefill import prefill_ragged
from mla_conformance.reference.split_kv import merge_many, merge_states
from mla_conformance.reference.tolerance import Arithmetic
from mla_conformance.suites.harness.absorption_cases import HeadsProductCase
from mla_conformance.suites.harness.cache_cases import KVCacheWriteCase
from mla_conformance.suites.harness.cache_gather_cases import KVCacheGatherCase
from mla_conformance.suites.harness.cases import DecodeCase
from mla_conformance.suites.harness.gguf_cases import DequantizeCase, MatmulCase
from mla_conformance.suites.harness.gguf_layer_cases import Forward, KvBCase, LinearCase
from mla_conformance.suites.harness.gguf_outcomes import absorbed_weights, local_weight
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.merge_cases import MergeShardsCase, MergeStatesCase
from mla_conformance.suites.harness.multi_token_cases import MultiTokenCase, flattened
from mla_conformance.suites.harness.prefill_cases import MLAPrefillCase
from mla_conformance.suites.harness.problems import (
    GGUFDequantizeProblem,
    GGUFLinearProblem,
    GGUFMatmulProblem,
    MergeShardsProblem,
    MergeStatesProblem,
    MLADecodeProblem,
    MLAPrefillProblem,
    Problem,
)
from mla_conformance.suites.harness.problems.absorption import HeadsProductProblem

MAX_ELEMENTS = 2**28


class Adapter(Implementation):
    """Float64 PyTorch, reading the paged cache through the block table; only its result is rounded."""

    name = "reference"
    compiles_kernels = False
    invalid_pages = "refused"

    def version(self) -> str:
        """PyTorch's version: there is nothing else in it."""
        return str(torch.__version__)

    def declines(self, problem: Problem) -> str | None:
        """Decline matrices whose intermediate results would fill a card."""
        if isinstance(problem, GGUFDequantizeProblem) and problem.rows * problem.columns > MAX_ELEMENTS:
            return f"more than {MAX_ELEMENTS} elements: the reference has several integers for each"
        return None

    def arithmetic(self, problem: MLADecodeProblem) -> Arithmetic:
        """Only the output is rounded."""
        return Arithmetic(operands="float64", probabilities="float64", output=problem.dtype)

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Run :func:`mla_conformance.reference.mla.decode_paged` on widened inputs."""
        result = decode_paged(
            case.q_nope.double(),
            case.q_pe.double(),
            case.kv_cache,
            case.block_table,
            case.seq_lens,
            softmax_scale=case.problem.scale,
            cache_scale=case.problem.k_scale if case.problem.is_fp8 else 1.0,
        )
        case.out.copy_(result.out)
        return case.out, result.lse.float()

    def mla_decode_multi(self, case: MultiTokenCase) -> tuple[Tensor, Tensor]:
        """Run each query token as a request of its own."""
        flat = flattened(case)
        out, lse = self.mla_decode(flat)
        case.out.copy_(out.view_as(case.out))
        return case.out, lse.view_as(case.lse)

    def prefill_arithmetic(self, problem: MLAPrefillProblem) -> Arithmetic:
        """Only the output is rounded."""
        return Arithmetic(operands="float64", probabilities="float64", output=problem.dtype)

    def mla_prefill(self, case: MLAPrefillCase) -> tuple[Tensor, Tensor]:
        """Run :func:`mla_conformance.reference.prefill.prefill_ragged` on each part and merge the states."""
        first, *others = (
            prefill_ragged(
                case.q_nope.double(),
                case.q_pe.double(),
                part.k_nope.double(),
                part.k_pe.double(),
                part.v.double(),
                case.cu_seqlens_q,
                part.cu_seqlens_k,
                softmax_scale=case.problem.scale,
                causal=part.causal,
            )
            for part in case.parts
        )
        out, lse = first
        for other in others:
            out, lse = merge_states(out, lse, *other)
        used = case.used_rows
        case.out[:used].copy_(out[:used])
        return case.out, lse.float()

    def merge_arithmetic(self, problem: MergeStatesProblem | MergeShardsProblem) -> MergeArithmetic:
        """Only the results are rounded."""
        return MergeArithmetic(output=problem.dtype, weights="float64")

    def merge_states(self, case: MergeStatesCase) -> tuple[Tensor, Tensor]:
        """Run :func:`mla_conformance.reference.split_kv.merge_states` on widened states."""
        inputs = (case.out_a, case.lse_a, case.out_b, case.lse_b)
        merged = merge_states(*(tensor.double() for tensor in inputs))
        return case.out.copy_(merged.out), case.lse.copy_(merged.lse)

    def merge_shards(self, case: MergeShardsCase) -> tuple[Tensor, Tensor]:
        """Run :func:`mla_conformance.reference.split_kv.merge_many` on widened states."""
        merged = merge_many(case.outs.double(), case.lses.double())
        return case.out.copy_(merged.out), case.lse.copy_(merged.lse)

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Run :func:`mla_conformance.reference.cache_write.write_rows` on the case's own cache."""
        write_rows(case.ckv, case.kpe, case.kv_cache, case.slot_mapping, case.k_scale)

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Run :func:`mla_conformance.reference.cache_gather.gather_rows` into the case's own buffer."""
        gather_rows(case.kv_cache, case.block_table, case.cu_seqlens, case.out, case.seq_starts, case.k_scale)
        return case.out

    def absorption_arithmetic(self, problem: HeadsProductProblem) -> MatmulArithmetic:
        """Only the output is rounded."""
        return MatmulArithmetic(activations="float64", weights="float64", output=problem.dtype)

    def absorb_query(self, case: HeadsProductCase) -> Tensor:
        """Multiply in float64."""
        case.result.copy_(absorption.absorb_query(case.x.double(), case.weight.double()))
        return case.out

    def v_up_proj(self, case: HeadsProductCase) -> Tensor:
        """Multiply in float64."""
        case.result.copy_(absorption.project_output(case.x.double(), case.weight.double().transpose(1, 2)))
        return case.out

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Run :func:`mla_conformance.reference.gguf.dequantize` and round once."""
        return case.out.copy_(dequantize(case.data, case.problem.quant))

    def matmul_arithmetic(self, problem: GGUFMatmulProblem | GGUFLinearProblem) -> MatmulArithmetic:
        """Only the output is rounded."""
        return MatmulArithmetic(activations="float64", weights="float64", output=problem.dtype)

    def gguf_matmul(self, case: MatmulCase) -> Tensor:
        """Multiply in float64."""
        weight = dequantize(case.data, case.problem.quant)
        return case.out.copy_(fused_linear.linear(case.x.double(), weight.double()))

    def gguf_linear(self, case: LinearCase) -> Forward:
        """Own each shard by its id and slice elements: right by definition, whatever the blocks."""
        problem = case.problem
        owned: dict[int, Tensor] = {}
        for arrival in case.arrivals:
            if arrival.shard_id is None:
                whole = dequantize(arrival.data, arrival.quant).double()
                owned |= dict(enumerate(torch.split(whole, [rows for _, rows in problem.shards])))
                continue
            if not isinstance(arrival.shard_id, int) or not 0 <= arrival.shard_id < len(problem.shards):
                raise ValueError(f"shard id {arrival.shard_id!r} is none of 0 to {len(problem.shards) - 1}")
            if arrival.shard_id in owned:
                raise ValueError(f"shard {arrival.shard_id} arrived twice")
            owned[arrival.shard_id] = dequantize(arrival.data, arrival.quant).double()
        missing = [i for i in range(len(problem.shards)) if i not in owned]
        if missing:
            raise ValueError(f"shards {missing} never arrived")
        weight = local_weight(problem, [owned[i] for i in range(len(owned))])
        return lambda x: fused_linear.linear(x.double(), weight).to(x.dtype)

    def gguf_kv_b(self, case: KvBCase) -> tuple[Tensor, Tensor]:
        """Cut kv_b by its definition, :func:`mla_conformance.reference.absorption.split_kv_b`."""
        return absorbed_weights(case)
