"""A compiler: one implementation compiled for one absent target, and the process that does the compiling."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Self, TypedDict

from mla_conformance.suites.harness.cubin import CompiledKernel
from mla_conformance.suites.harness.errors import Mismatch, NoResult, Unsupported
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.lanes import Lane
from mla_conformance.suites.harness.problems import MLADecodeProblem
from mla_conformance.suites.harness.subject import Record
from mla_conformance.suites.harness.targets import Target

REQUEST_SECONDS = 300.0
"""Longer than any kernel of any target took to compile here, by a factor of ten, imports included."""
_MODULE = "mla_conformance.suites.harness.compile_worker"
_UNSET = ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH")
# vLLM accepts a missing GPU only if none is visible. A worker that crashes says where.
_SET = {"TRITON_DEFAULT_FP_FUSION": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1"}


class LauncherError(RuntimeError):
    """The implementation raised for a problem that it had not declined. Status ``fail``, never expected."""


class Request(TypedDict):
    """What a worker is asked: which implementation, for which target, on which problem."""

    implementation: str
    target: str
    problem: str
    specialise: bool


class Worker:
    """The compiling process: started with the first request, and again after it died or took too long.

    Args:
        seconds: after so many seconds a request is given up.
    """

    def __init__(self, seconds: float = REQUEST_SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] | None = None
        self._answers: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, request: Request) -> dict[str, Any]:
        """Return the worker's answer; an equal request is answered from memory.

        Raises:
            NoResult: the worker died or exceeded its time, now or at an earlier equal request.
        """
        line = json.dumps(request)
        if line not in self._answers:
            try:
                self._answers[line] = json.loads(self._exchange(line.encode() + b"\n"))
            except NoResult as error:
                self._answers[line] = {"error": "worker", "message": str(error)}
        answer = self._answers[line]
        if answer.get("error") == "worker":
            raise NoResult(answer["message"])
        return answer

    def close(self) -> None:
        """End the process and everything that it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._process = None
        if self._complaints is not None:
            self._complaints.close()

    def _exchange(self, request: bytes) -> bytes:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request)
            process.stdin.flush()
        deadline = time.monotonic() + self.seconds
        answer = b""
        while not answer.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                self.close()
                raise NoResult(f"the compile worker gave no answer in {self.seconds:g} s")
            part = os.read(process.stdout.fileno(), 65_536)
            if not part:
                raise NoResult(self._obituary(process))
            answer += part
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            environment = {name: value for name, value in os.environ.items() if name not in _UNSET} | _SET
            # What this process can import, the worker can.
            environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
            self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env=environment,
                start_new_session=True,
            )
        return self._process

    def _obituary(self, process: subprocess.Popen[bytes]) -> str:
        status = process.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        complaints = ""
        if self._complaints is not None:
            self._complaints.seek(0)
            complaints = self._complaints.read().decode(errors="replace").strip()[-2000:]
        self.close()
        last = complaints.splitlines()[-1] if complaints else "it said nothing"
        return f"the compile worker died ({how}): {last}\n{complaints}".strip()


@functools.cache
def shared_worker() -> Worker:
    """The worker of this process, closed at its end."""
    worker = Worker()
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

    def compile(self, problem: MLADecodeProblem, *, specialise: bool = True) -> list[CompiledKernel]:
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
