"""What a run of MLA decode gave, and what the float64 oracle says of the same inputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mla_conformance.reference.mla import DecodeResult, decode_absorbed
from mla_conformance.reference.tolerance import Arithmetic, Bound, decode_bound
from mla_conformance.suites.harness.cases import DecodeCase
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.record import Record


@dataclass
class Outcome:
    """What a run gave: ``out`` [batch, heads, kv_lora_rank], ``lse`` [batch, heads], and the case they came from."""

    case: DecodeCase
    out: Tensor
    lse: Tensor
    arithmetic: Arithmetic
    record: Record

    def expected(self, row: int) -> DecodeResult:
        """The float64 oracle's answer for request ``row``, from the dense low-precision inputs, widened."""
        return expected(self.case, row)

    def bound(self, row: int) -> Bound:
        """The derived bound for request ``row``."""
        problem = self.case.problem
        return decode_bound(*widened(self.case, row), softmax_scale=problem.scale, arithmetic=self.arithmetic)


def expected(case: DecodeCase, row: int) -> DecodeResult:
    """The float64 oracle's answer for request ``row`` of ``case``."""
    return decode_absorbed(*widened(case, row), softmax_scale=case.problem.scale)


def widened(case: DecodeCase, row: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Request ``row`` of ``case`` in float64: q_nope, q_pe, ckv, kpe, dequantised."""
    problem = case.problem
    keys = case.rows[row].double() * (problem.k_scale if problem.is_fp8 else 1.0)
    latent = problem.kv_lora_rank
    return case.q_nope[row].double(), case.q_pe[row].double(), keys[:, :latent], keys[:, latent:]


def decode_outcome(
    case: DecodeCase, returned: tuple[Tensor, Tensor], implementation: Implementation, record: Record
) -> Outcome:
    """Take what the implementation returned.

    Raises:
        Mismatch: the output is not the caller's buffer, or the log-sum-exp has another shape.
    """
    out, lse = returned
    in_place(out, case.out)
    if lse.shape != case.lse.shape:
        raise Mismatch(f"lse has shape {tuple(lse.shape)}, not [batch, heads] = {tuple(case.lse.shape)}")
    return Outcome(case, out, lse, implementation.arithmetic(case.problem), record)


def in_place(out: Tensor, buffer: Tensor) -> None:
    """Raise Mismatch unless ``out`` is the caller's ``buffer``."""
    if out.data_ptr() != buffer.data_ptr() or out.shape != buffer.shape or out.stride() != buffer.stride():
        raise Mismatch("the result is not in the caller's out buffer")
