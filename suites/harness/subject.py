"""A subject: one implementation in one lane, as tests see it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mla_conformance.reference.mla import DecodeResult, decode_absorbed
from mla_conformance.reference.tolerance import Arithmetic, Bound, decode_bound
from mla_conformance.suites.harness.cases import DecodeCase, build
from mla_conformance.suites.harness.errors import Mismatch, Unsupported
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.lanes import Lane
from mla_conformance.suites.harness.problems import MLADecodeProblem


@dataclass
class Record:
    """What one test did, for the report.

    Attributes:
        ran: launches, or compilations.
        declined: how often each reason was given for not running.
        problem: the last problem, printed.
        worst: per quantity the largest error over its bound, with the bound's terms and the problem.
        kernels: what the compiled kernels use of the target.
    """

    ran: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    problem: str = ""
    worst: dict[str, Any] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)

    def note_error(self, quantity: str, ratio: float, terms: dict[str, float]) -> None:
        """Keep the largest ratio of error to bound for ``quantity``, with the bound's terms."""
        if ratio >= self.worst.get(quantity, {"ratio": -1.0})["ratio"]:
            shares = {name: float(f"{share:.3g}") for name, share in terms.items()}
            self.worst[quantity] = {"ratio": float(f"{ratio:.4g}"), "terms": shares, "problem": self.problem}

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self) | {"declined": dict(self.declined)}


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


@dataclass
class Subject:
    """One implementation in one lane; tests call its operations and judge the outcome."""

    implementation: Implementation
    lane: Lane
    record: Record = field(default_factory=Record)

    @property
    def id(self) -> str:
        """How test ids name it."""
        return "-".join(filter(None, (self.implementation.name, self.lane.name, self.target_name)))

    @property
    def target_name(self) -> str:
        """The absent target that its lane stands in for, or ""."""
        return self.lane.target

    def start_record(self) -> None:
        """Forget the last test."""
        self.record = Record()

    def build(self, problem: MLADecodeProblem) -> DecodeCase:
        """Lay ``problem`` out where this subject runs.

        Raises:
            Unsupported: the implementation or the lane declares that it does not do this problem.
        """
        self.record.problem = str(problem)
        reason = self.implementation.declines(problem) or self.lane.declines(problem, self.implementation)
        if reason is not None:
            self.record.declined[reason] += 1
            raise Unsupported(reason)
        return build(problem, self.lane.device)

    def run(self, case: DecodeCase) -> Outcome:
        """Run one case in poisoned memory and check that nothing was written where it must not be.

        Raises:
            Mismatch: an input or a gap between rows was written, or the output is not the caller's buffer.
        """
        self.record.ran += 1
        with self.lane.running():
            out, lse = self.implementation.mla_decode(case)
        written = case.trespasses()
        if written:
            raise Mismatch(f"memory that must not change was written: {', '.join(written)}")
        if out.data_ptr() != case.out.data_ptr() or out.shape != case.out.shape:
            raise Mismatch("the result is not in the caller's out buffer")
        if lse.shape != case.lse.shape:
            raise Mismatch(f"lse has shape {tuple(lse.shape)}, not [batch, heads] = {tuple(case.lse.shape)}")
        return Outcome(case, out, lse, self.implementation.arithmetic(case.problem), self.record)

    def mla_decode(self, problem: MLADecodeProblem) -> Outcome:
        """:meth:`build`, then :meth:`run`."""
        return self.run(self.build(problem))
