"""The Triton MLA decode kernels that ship in vLLM, called as its TRITON_MLA backend calls them."""

from __future__ import annotations

from importlib.metadata import version

import torch
from torch import Tensor
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

from mla_conformance.reference.matmul_tolerance import MatmulArithmetic
from mla_conformance.reference.merge_tolerance import MergeArithmetic
from mla_conformance.reference.tolerance import Arithmetic
from mla_conformance.suites.harness.absorption_cases import HeadsProductCase
from mla_conformance.suites.harness.buffers import poison_value
from mla_conformance.suites.harness.cases import DecodeCase
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.merge_cases import MergeShardsCase, MergeStatesCase
from mla_conformance.suites.harness.multi_token_cases import MultiTokenCase, flattened
from mla_conformance.suites.harness.problems import (
    MergeShardsProblem,
    MergeStatesProblem,
    MLADecodeProblem,
    MLAMultiTokenProblem,
    Problem,
    VUpProjProblem,
)
from mla_conformance.suites.harness.problems.absorption import HeadsProductProblem
from mla_conformance.suites.harness.shipped import vllm_absorption, vllm_merges

SHIPPED_TOKENS_PER_SPLIT = 512
"""The backend's split rule, for short contexts: the next power of two of max_seq_len // 512."""


class Adapter(Implementation):
    """``decode_attention_fwd`` with ``is_mla=True``, its scratch poisoned, its LSE allocated as shipped."""

    name = "vllm"
    flattens_query_tokens = True
    without_kernels = frozenset({"v_up_proj"})

    def version(self) -> str:
        """VLLM's version."""
        return version("vllm")

    def declines(self, problem: Problem) -> str | None:
        """The backend lists float16 and bfloat16 queries, and caches of the same dtype or e4m3."""
        if isinstance(problem, MergeStatesProblem | MergeShardsProblem):
            return vllm_merges.declines(problem)
        if isinstance(problem, VUpProjProblem):
            return vllm_absorption.declines(problem)
        assert isinstance(problem, MLADecodeProblem)
        if problem.dtype == "float32":
            return "dtype=float32: the TRITON_MLA backend lists float16 and bfloat16"
        if problem.cache_dtype not in (problem.dtype, "float8_e4m3fn"):
            return f"cache_dtype={problem.cache_dtype}: the queries' {problem.dtype} or float8_e4m3fn"
        if isinstance(problem, MLAMultiTokenProblem) and problem.query_lens is not None:
            return f"query_lens={problem.query_lens}: the TRITON_MLA backend takes as many query tokens of each request"
        return None

    def arithmetic(self, problem: MLADecodeProblem) -> Arithmetic:
        """As the source says: fp8 values are scaled and rounded to the query dtype, and so is the LSE."""
        return Arithmetic(
            operands=problem.dtype,
            probabilities=problem.dtype,
            cache=problem.dtype if problem.is_fp8 else "float64",
            output=problem.dtype,
            lse=problem.dtype,
        )

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Call the kernels with what ``TritonMLAImpl.forward_mqa`` would pass, but for the poison."""
        problem = case.problem
        batch, heads, _ = case.q.shape
        splits = problem.num_splits or _shipped_splits(max(problem.lengths, default=0))
        scratch = self.scratch(case, (batch, heads, splits, problem.kv_lora_rank + 1))
        lse = torch.zeros(batch, heads, dtype=case.q.dtype, device=case.q.device)
        cache = case.kv_cache.unsqueeze(2)
        decode_attention_fwd(
            case.q,
            cache,
            cache[..., : problem.kv_lora_rank],
            case.out,
            lse,
            case.block_table,
            case.seq_lens,
            scratch,
            splits,
            problem.scale,
            problem.page_size,
            k_scale=case.k_scale,
            v_scale=case.k_scale,
            is_mla=True,
        )
        return case.out, lse

    def scratch(self, case: DecodeCase, shape: tuple[int, ...]) -> Tensor:
        """Float32 memory for partial results, poisoned."""
        poison = poison_value(torch.float32, case.problem.poison)
        return torch.full(shape, poison, dtype=torch.float32, device=case.q.device)

    def mla_decode_multi(self, case: MultiTokenCase) -> tuple[Tensor, Tensor]:
        """Flatten the query tokens to requests, as ``TritonMLAImpl.forward_mqa`` does before it calls the kernels."""
        flat = flattened(case)
        out, lse = self.mla_decode(flat)
        case.out.copy_(out.view_as(case.out))
        return case.out, lse.view_as(case.lse)

    def merge_arithmetic(self, problem: MergeStatesProblem | MergeShardsProblem) -> MergeArithmetic:
        """As :mod:`mla_conformance.suites.harness.shipped.vllm_merges` says."""
        return vllm_merges.arithmetic(problem)

    def merge_states(self, case: MergeStatesCase) -> tuple[Tensor, Tensor]:
        """Merge a prefix and a suffix with the Triton kernel."""
        return vllm_merges.merge_states(case)

    def merge_shards(self, case: MergeShardsCase) -> tuple[Tensor, Tensor]:
        """Correct each rank's output by the log-sum-exps of all, and add them."""
        return vllm_merges.merge_shards(case)

    def absorption_arithmetic(self, problem: HeadsProductProblem) -> MatmulArithmetic:
        """``torch.bmm``: float32 sums, one rounding."""
        return MatmulArithmetic(activations=problem.dtype, weights=problem.dtype, output=problem.dtype)

    def v_up_proj(self, case: HeadsProductCase) -> Tensor:
        """Run the attention layer's own method."""
        vllm_absorption.v_up_proj(case.x, case.weight, case.out)
        return case.out


def _shipped_splits(max_seq_len: int) -> int:
    ideal: int = 1 << (max(1, max_seq_len // SHIPPED_TOKENS_PER_SPLIT) - 1).bit_length()
    return ideal
