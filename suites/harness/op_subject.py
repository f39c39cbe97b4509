"""A registered operator under test: one call of one implementation in one lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.lanes import Lane
from mla_conformance.suites.harness.op_call import OpCall
from mla_conformance.suites.harness.record import Record


@dataclass
class RegisteredOp:
    """One operator that an implementation registers, in one lane; tests run their check on it.

    Args:
        implementation: whose operator it is.
        lane: where it runs.
        call: the operator and its arguments, on the CPU.
    """

    implementation: Implementation
    lane: Lane
    call: OpCall
    record: Record = field(default_factory=Record)

    @property
    def id(self) -> str:
        """How test ids name it."""
        parts = (self.implementation.name, self.lane.name, self.target_name, self.call.name)
        return "-".join(filter(None, parts))

    @property
    def target_name(self) -> str:
        """The absent target that its lane stands in for, or ""."""
        return self.lane.target

    def start_record(self) -> None:
        """Forget the last test."""
        self.record = Record()

    def check(self, promise: Callable[[OpCall], None]) -> None:
        """Hold the operator to a promise, in the lane.

        Raises:
            Mismatch: it is broken; the message says how the caller would notice.
        """
        self.record.ran += 1
        self.lane.check_alive()
        with self.lane.running():
            promise(self.call.on(self.lane.device))
