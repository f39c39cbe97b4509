"""A compiler: one implementation compiled for one absent target, by a process of its own."""

from __future__ import annotations

import atexit
import functools
from dataclasses import dataclass, field
from typing import TypedDict

from mla_conformance.suites.harness.cubin import CompiledKernel
from mla_conformance.suites.harness.errors import Mismatch, Unsupported
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.lanes import Lane
from mla_conformance.suites.harness.problems import Problem
from mla_conformance.suites.harness.record import Record
from mla_conformance.suites.harness.targets import Target
from mla_conformance.suites.harness.worker import Worker

MODULE = "mla_conformance.suites.harness.compile_worker"


class LauncherError(RuntimeError):
    """The implementation raised for a problem that it had not declined. Status ``fail``, never expected."""


class Request(TypedDict):
    """What a worker is asked: which implementation, for which target, on which problem."""

    implementation: str
    target: str
    problem: str
    specialise: bool


@functools.cache
def shared_worker() -> Worker:
    """The worker of this process, closed at its end."""
    worker = Worker(MODULE)
    atexit.register(worker.close)
    return worker


@dataclass
class Compiler:
    """One implementation, compiled for one target; tests compile problems and judge the kernels.

    Args:
        spec: the ``--impl`` text that names the implementation, for the worker to load it.
        implementation: it, as loaded in this process, for its name and version.
        lane: the compile lane.
        target: the absent GPU.
        worker: the process that compiles; that of this process if not given.
    """

    spec: str
    implementation: Implementation
    lane: Lane
    target: Target
    record: Record = field(default_factory=Record, repr=False)
    worker: Worker | None = field(default=None, repr=False)

    @property
    def id(self) -> str:
        """How test ids name it."""
        return f"{self.implementation.name}-{self.lane.name}-{self.target.name}"

    @property
    def target_name(self) -> str:
        """The absent target that it is about."""
        return self.target.name

    def start_record(self) -> None:
        """Forget the last test."""
        self.record = Record()

    def compile(self, problem: Problem, *, specialise: bool = True) -> list[CompiledKernel]:
        """Return every distinct kernel that the launcher picks for ``problem``, in launch order.

        Args:
            problem: what the launcher is called with, on the CPU; the contents of tensors do not matter.
            specialise: as :func:`capture.capture` has it.

        Raises:
            Unsupported: the implementation declines the problem on this target.
            Mismatch: a kernel does not compile, or none is launched.
            LauncherError: the implementation itself raised.
            NoResult: the worker died or took too long.
        """
        self.record.problem = str(problem)
        request = Request(
            implementation=self.spec, target=self.target.name, problem=str(problem), specialise=specialise
        )
        answer = (self.worker or shared_worker()).ask(request)
        if "declined" in answer:
            self.record.declined[answer["declined"]] += 1
            raise Unsupported(answer["declined"])
        self.record.ran += 1
        if answer.get("error") == "compile":
            raise Mismatch(f"{self.target.name}: does not compile: {answer['message']}")
        if answer.get("error") == "launcher":
            raise LauncherError(f"{self.target.name}: the launcher raised {answer['message']}")
        if not answer["kernels"]:
            raise Mismatch(f"{self.target.name}: the launcher launched no Triton kernel")
        noted = self.record.kernels
        noted += [kernel for kernel in answer["kernels"] if kernel not in noted]
        return [CompiledKernel(**kernel) for kernel in answer["kernels"]]
