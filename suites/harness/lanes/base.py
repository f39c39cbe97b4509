"""What every lane offers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from mla_conformance.suites.harness.implementation import Implementation
    from mla_conformance.suites.harness.problems import Problem


class Lane:
    """Where a case runs."""

    name: ClassVar[str]
    executes: ClassVar[bool] = True
    """Whether it runs kernels in this process and gives numbers; at most one such lane a process."""

    device: str = "cpu"
    """Where the tensors of a case live."""

    repeats: int = 3
    """How often a determinism test repeats a call."""

    target: str = ""
    """The absent GPU that it compiles for and stands in for; none where kernels run on what is at hand."""

    shows: ClassVar[str] = ""
    """What a pass shows and what it does not, in one sentence for the report."""

    tells_refusals: ClassVar[bool] = False
    """Whether it knows, of each launch, that a card of ``target`` would refuse it."""

    tells_faults: ClassVar[bool] = False
    """Whether it fails a case for a race, a wild access, an early read or a use of what was never written."""

    refusals: list[str] | None = None
    """Why a card would refuse the launches of the last case."""

    def for_targets(self, targets: list[str]) -> list[Self]:
        """The lanes that ``--target`` makes of this one."""
        return [self]

    def missing(self, devices: list[str]) -> str | None:
        """Say what this machine lacks for the lane, given its visible GPUs, or None."""
        return None

    def environment(self) -> dict[str, str]:
        """Environment variables that must be set before torch, triton or vllm is imported."""
        return {}

    def prepare(self) -> None:
        """Set the imported libraries up; called once, before the first case."""

    def declines(self, problem: Problem, implementation: Implementation) -> str | None:
        """Say why this lane cannot give a trustworthy verdict on ``problem``, or None."""
        return None

    def check_alive(self) -> None:
        """Raise ``NoResult`` if the device was lost; asked before a case is laid out on it."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Surround one launch: synchronise, and turn what is nobody's fault into ``NoResult``."""
        yield
