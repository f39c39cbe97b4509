"""vLLM's merges of attention states, in Triton: of a prefix and a suffix, and of all context-parallel ranks.

What is not real: the collectives. The log-sum-exps that vLLM gathers from all ranks are handed in as they are, and the
outputs that it reduces and scatters are added here, in the order of the ranks and in their dtype.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states

from mla_conformance.reference.merge_tolerance import MergeArithmetic
from mla_conformance.suites.harness.merge_cases import MergeShardsCase, MergeStatesCase
from mla_conformance.suites.harness.problems import MergeShardsProblem, MergeStatesProblem


def declines(problem: MergeStatesProblem | MergeShardsProblem) -> str | None:
    """The kernel for ranks has ``tl.arange`` over ranks and width, and its launcher looks into the compiled kernel."""
    if isinstance(problem, MergeShardsProblem):
        if triton.knobs.runtime.interpret:
            return "correct_attn_out asks the kernel for its constexprs, which an interpreted one does not have"
        for name in ("shards", "width"):
            size = getattr(problem, name)
            if size & (size - 1):
                return f"{name}={size}: correct_attn_out compiles for powers of two only"
    return None


def arithmetic(problem: MergeStatesProblem | MergeShardsProblem) -> MergeArithmetic:
    """Of ranks, each weight is the exp of a difference of log-sum-exps, and each weighted output and sum is rounded."""
    if isinstance(problem, MergeShardsProblem):
        return MergeArithmetic(output=problem.dtype, contributions=problem.dtype, log_weights=True)
    return MergeArithmetic(output=problem.dtype)


def merge_states(case: MergeStatesCase) -> tuple[Tensor, Tensor]:
    """Call the kernel's launcher; its log-sum-exps are [heads, tokens]."""
    merge_attn_states(
        output=case.out,
        prefix_output=case.out_a,
        prefix_lse=case.lse_a.T,
        suffix_output=case.out_b,
        suffix_lse=case.lse_b.T,
        output_lse=case.lse.T,
    )
    return case.out, case.lse


def merge_shards(case: MergeShardsCase) -> tuple[Tensor, Tensor]:
    """Correct each rank's output, of which it has a dense tensor of its own, in place, and add them."""
    # Loads vLLM's distributed code, which the other operations do without.
    from vllm.v1.attention.ops.dcp import CPTritonContext, correct_attn_out

    total = torch.zeros(case.out.shape, dtype=case.out.dtype, device=case.out.device)
    for rank in range(case.problem.shards):
        own = case.outs[rank].clone(memory_format=torch.contiguous_format)
        corrected, lse = correct_attn_out(own, case.lses, rank, CPTritonContext())
        total += corrected
        case.lse.copy_(lse)
    return case.out.copy_(total), case.lse
