"""The Triton MLA decode kernels that ship in vLLM, called as its TRITON_MLA backend calls them."""

from __future__ import annotations

from importlib.metadata import version

import torch
from torch import Tensor
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

from mla_conformance.reference.tolerance import Arithmetic
from mla_conformance.suites.harness.buffers import poison_value
from mla_conformance.suites.harness.cases import DecodeCase
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.problems import MLADecodeProblem

SHIPPED_TOKENS_PER_SPLIT = 512
"""The backend's split rule, for short contexts: the next power of two of max_seq_len // 512."""


class Adapter(Implementation):
    """``decode_attention_fwd`` with ``is_mla=True``, its scratch poisoned, its LSE allocated as shipped."""

    name = "vllm"

    def version(self) -> str:
        """VLLM's version."""
        return version("vllm")

    def declines(self, problem: MLADecodeProblem) -> str | None:
        """The backend lists float16 and bfloat16 queries, and caches of the same dtype or e4m3."""
        if problem.dtype == "float32":
            return "dtype=float32: the TRITON_MLA backend lists float16 and bfloat16"
        if problem.cache_dtype not in (problem.dtype, "float8_e4m3fn"):
            return f"cache_dtype={problem.cache_dtype}: the queries' {problem.dtype} or float8_e4m3fn"
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
        scratch = torch.full(
            (batch, heads, splits, problem.kv_lora_rank + 1),
            poison_value(torch.float32, problem.poison),
            dtype=torch.float32,
            device=case.q.device,
        )
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


def _shipped_splits(max_seq_len: int) -> int:
    ideal: int = 1 << (max(1, max_seq_len // SHIPPED_TOKENS_PER_SPLIT) - 1).bit_length()
    return ideal
