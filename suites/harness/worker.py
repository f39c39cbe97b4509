"""A process of one's own for what cannot share this one: another set-up of Triton, another release of a package."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

from mla_conformance.suites.harness.errors import NoResult

REQUEST_SECONDS = 300.0
"""Longer than any kernel of any target took to compile here, by a factor of ten, imports included."""
_UNSET = ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH")
# vLLM accepts a missing GPU only if none is visible. A worker that crashes says where.
_SET = {"TRITON_DEFAULT_FP_FUSION": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1"}


class Worker:
    """A process that runs a module: started with the first request, and again after it died or took too long.

    Args:
        module: what the process runs, ``python -m module``: it answers each line of JSON with one.
        seconds: after so many seconds a request is given up.
        path: folders that the process searches for packages before all others.
    """

    def __init__(self, module: str, seconds: float = REQUEST_SECONDS, path: Sequence[str] = ()) -> None:
        self.module = module
        self.seconds = seconds
        self.path = list(path)
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] | None = None
        self._answers: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
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

    @property
    def _name(self) -> str:
        return self.module.rpartition(".")[2].replace("_", " ")

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
                raise NoResult(f"the {self._name} gave no answer in {self.seconds:g} s")
            part = os.read(process.stdout.fileno(), 65_536)
            if not part:
                raise NoResult(self._obituary(process))
            answer += part
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            environment = {name: value for name, value in os.environ.items() if name not in _UNSET} | _SET
            # What this process can import, the worker can.
            environment["PYTHONPATH"] = os.pathsep.join([*self.path, *(path or os.getcwd() for path in sys.path)])
            self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module],
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
        return f"the {self._name} died ({how}): {last}\n{complaints}".strip()
