"""The reference as an implementation: shows that a right answer passes, whatever the machine."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_conformance.reference.mla import decode_paged
from mla_conformance.reference.tolerance import Arithmetic
from mla_conformance.suites.harness.cases import DecodeCase
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.problems import MLADecodeProblem


class Adapter(Implementation):
    """Float64 PyTorch, reading the paged cache through the block table; only its result is rounded."""

    name = "reference"
    compiles_kernels = False
    invalid_pages = "refused"

    def version(self) -> str:
        """PyTorch's version: there is nothing else in it."""
        return str(torch.__version__)

    def declines(self, problem: MLADecodeProblem) -> str | None:
        """Decline nothing."""
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
