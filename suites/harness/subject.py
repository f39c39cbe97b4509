"""A subject: one implementation in one lane, as tests see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mla_conformance.suites.harness.absorption_outcomes import HeadsProductOutcome
from mla_conformance.suites.harness.buffers import trespassed
from mla_conformance.suites.harness.cache_gather_outcomes import KVCacheGatherOutcome
from mla_conformance.suites.harness.cache_outcomes import KVCacheWriteOutcome
from mla_conformance.suites.harness.errors import Mismatch, Unsupported
from mla_conformance.suites.harness.gguf_outcomes import (
    DequantizeOutcome,
    KvBOutcome,
    LinearOutcome,
    MatmulOutcome,
    NamesOutcome,
    refusal,
)
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.lanes import Lane
from mla_conformance.suites.harness.merge_outcomes import MergeOutcome
from mla_conformance.suites.harness.operations import OPERATIONS
from mla_conformance.suites.harness.outcomes import Outcome
from mla_conformance.suites.harness.prefill_outcomes import MLAPrefillOutcome
from mla_conformance.suites.harness.problems import (
    AbsorbQueryProblem,
    GGUFDequantizeProblem,
    GGUFKvBProblem,
    GGUFLinearProblem,
    GGUFMatmulProblem,
    GGUFNamesProblem,
    KVCacheGatherProblem,
    KVCacheWriteProblem,
    MergeShardsProblem,
    MergeStatesProblem,
    MLADecodeProblem,
    MLAMultiTokenProblem,
    MLAPrefillProblem,
    Problem,
    VUpProjProblem,
)
from mla_conformance.suites.harness.record import Record


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

    def build(self, problem: Problem) -> Any:
        """Lay ``problem`` out where this subject runs, as a case of its operation.

        Raises:
            Unsupported: the implementation or the lane declares that it does not do this problem.
        """
        self.record.problem = str(problem)
        reason = self.implementation.declines(problem) or self.lane.declines(problem, self.implementation)
        if reason is not None:
            self.record.declined[reason] += 1
            raise Unsupported(reason)
        self.lane.check_alive()
        return OPERATIONS[problem.operation].build(problem, self.lane.device)

    def run(self, case: Any) -> Any:
        """Run one case in poisoned memory, check that nothing was written where it must not be; return its outcome.

        Raises:
            Mismatch: an input or a gap between rows was written, or the output is not the caller's buffer.
        """
        self.record.ran += 1
        operation = OPERATIONS[case.problem.operation]
        with self.lane.running():
            returned = operation.call(self.implementation, case)
        written = trespassed(case.buffers)
        if written:
            raise Mismatch(f"memory that must not change was written: {', '.join(written)}")
        return operation.outcome(case, returned, self.implementation, self.record)

    def mla_decode(self, problem: MLADecodeProblem) -> Outcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: Outcome = self.run(self.build(problem))
        return outcome

    def mla_decode_multi(self, problem: MLAMultiTokenProblem) -> Outcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: Outcome = self.run(self.build(problem))
        return outcome

    def mla_prefill(self, problem: MLAPrefillProblem) -> MLAPrefillOutcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: MLAPrefillOutcome = self.run(self.build(problem))
        return outcome

    def merge_states(self, problem: MergeStatesProblem) -> MergeOutcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: MergeOutcome = self.run(self.build(problem))
        return outcome

    def merge_shards(self, problem: MergeShardsProblem) -> MergeOutcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: MergeOutcome = self.run(self.build(problem))
        return outcome

    def kv_cache_write(self, problem: KVCacheWriteProblem) -> KVCacheWriteOutcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: KVCacheWriteOutcome = self.run(self.build(problem))
        return outcome

    def kv_cache_gather(self, problem: KVCacheGatherProblem) -> KVCacheGatherOutcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: KVCacheGatherOutcome = self.run(self.build(problem))
        return outcome

    def absorb_query(self, problem: AbsorbQueryProblem) -> HeadsProductOutcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: HeadsProductOutcome = self.run(self.build(problem))
        return outcome

    def v_up_proj(self, problem: VUpProjProblem) -> HeadsProductOutcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: HeadsProductOutcome = self.run(self.build(problem))
        return outcome

    def gguf_dequantize(self, problem: GGUFDequantizeProblem) -> DequantizeOutcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: DequantizeOutcome = self.run(self.build(problem))
        return outcome

    def gguf_matmul(self, problem: GGUFMatmulProblem) -> MatmulOutcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: MatmulOutcome = self.run(self.build(problem))
        return outcome

    def gguf_linear(self, problem: GGUFLinearProblem) -> LinearOutcome:
        """:meth:`build`, then :meth:`run`: load the shards, then one forward.

        Raises:
            Mismatch: loading raised, although there is nothing wrong with the problem.
        """
        outcome: LinearOutcome = self.run(self.build(problem))
        return outcome

    def gguf_linear_refusal(self, problem: GGUFLinearProblem) -> str:
        """Load the shards of a problem that must be refused while loading; return the words of the refusal.

        Raises:
            Mismatch: nothing was refused, or with an error that is none of the caller's (an assertion, say).
        """
        case = self.build(problem)
        self.record.ran += 1
        with self.lane.running():
            return refusal(self.implementation, case)

    def gguf_kv_b(self, problem: GGUFKvBProblem) -> KvBOutcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: KvBOutcome = self.run(self.build(problem))
        return outcome

    def gguf_names(self, problem: GGUFNamesProblem) -> NamesOutcome:
        """:meth:`build`, then :meth:`run`."""
        outcome: NamesOutcome = self.run(self.build(problem))
        return outcome
