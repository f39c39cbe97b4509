"""This repository's fixed kernels."""

from __future__ import annotations

from importlib.metadata import version

from torch import Tensor

from mla_conformance.kernels.mla_decode import mla_decode
from mla_conformance.reference.tolerance import Arithmetic
from mla_conformance.suites.harness.cases import DecodeCase
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.problems import MLADecodeProblem


class Adapter(Implementation):
    """``mla_conformance.kernels``: every drawn problem is in its range."""

    name = "kernels"
    invalid_pages = "nan"

    def version(self) -> str:
        """This package's version."""
        return version("mla-conformance")

    def declines(self, problem: MLADecodeProblem) -> str | None:
        """Decline what ``mla_decode`` documents as out of range."""
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
        return None

    def arithmetic(self, problem: MLADecodeProblem) -> Arithmetic:
        """Probabilities are rounded to the query dtype for the second product; an fp8 cache is read exactly."""
        return Arithmetic(operands=problem.dtype, probabilities=problem.dtype, output=problem.dtype)

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
