"""Record the corpus on a GPU: ``python -m mla_conformance.suites.corpus.record --out DIRECTORY``.

While a case runs, every Triton launch is stored with the memory that it could reach, before and after.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from mla_conformance.suites.corpus import launches, stored
from mla_conformance.suites.corpus.case import Case
from mla_conformance.suites.corpus.stored import Pointer, Scalar, Storage, StoredLaunch
from mla_conformance.suites.harness.capture import bound_arguments

REFUSED = ("wgmma", "tcgen05")
"""Instructions that only some GPUs have and the emulator does not run."""
SCRATCH_PARAMETERS = 2
"""Triton appends two pointers to every entry, to global and to profiling scratch; null where none is needed."""


class NotStored(Exception):
    """A launch that the corpus has no use for; the message says why."""


class Recorder:
    """Stores the launches of one case.

    Args:
        case: the case that is about to run.
        folder: where the files go.
        made_by: versions, card, driver and date.
        launch: what really launches; a stand-in for tests without a GPU.
        synchronise: waits for the GPU.
    """

    def __init__(
        self,
        case: Case,
        folder: Path,
        made_by: dict[str, str],
        launch: Callable[..., Any] = JITFunction.run,
        synchronise: Callable[[], None] = torch.cuda.synchronize,
    ) -> None:
        self.case = case
        self.folder = folder
        self.made_by = made_by
        self.rows: list[tuple[str, int, str]] = []
        self._launch = launch
        self._compile = JITFunction.run
        self._synchronise = synchronise

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Store every launch inside."""

        def run(fn: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if warmup:
                return self._compile(fn, *args, grid=grid, warmup=True, **kwargs)
            return self._record(fn, args, grid, kwargs)

        with patch.object(JITFunction, "run", run), deterministic_empty():
            yield

    def _record(self, fn: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Any:
        name = f"{self.case.name}.{fn.__name__.lstrip('_')}"
        if any(row[0] == name for row in self.rows):
            name += f".{len(self.rows)}"
        kernel = self._compile(fn, *args, grid=grid, warmup=True, **kwargs)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        named = bound_arguments(fn, args, kwargs)
        passed = passed_arguments(kernel, named)
        owners: dict[int, Tensor] = {}
        for _, _, value in passed:
            if isinstance(value, Tensor):
                owners.setdefault(_address(value), value)
        self._synchronise()
        before = {address: _bytes(tensor) for address, tensor in owners.items()}
        result = self._launch(fn, *args, grid=grid, warmup=False, **kwargs)
        self._synchronise()
        order = list(owners)
        storages = [Storage(before[a], _bytes(tensor), tensor.dtype) for a, tensor in owners.items()]
        try:
            sizes = grid(named) if callable(grid) else grid
            check_storable(kernel)
            made = StoredLaunch(
                case=self.case.name,
                function=fn.__name__,
                exact=self.case.exact,
                grid=(*(int(n) for n in sizes), *(1,) * (3 - len(sizes))),  # type: ignore[arg-type]
                num_warps=kernel.metadata.num_warps,
                shared_bytes=kernel.metadata.shared,
                arguments=(*(_argument(*entry, order) for entry in passed), *scratch(kernel, len(passed))),
                storages=tuple(storages),
                ptx=kernel.asm["ptx"],
                made_by=self.made_by,
            )
            path = stored.write(name, made, self.folder)
            self.rows.append((name, path.stat().st_size, outcome(made)))
        except NotStored as reason:
            self.rows.append((name, 0, f"not stored: {reason}"))
        return result


@contextmanager
def deterministic_empty() -> Iterator[None]:
    """Let ``torch.empty`` give NaN or the largest integer, so that what an output held before is reproducible."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def passed_arguments(kernel: Any, named: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Return name, Triton type and value of the arguments that are no compile-time constants, in order."""
    return [(name, kind, named[name]) for name, kind in kernel.src.signature.items() if kind != "constexpr"]


def check_storable(kernel: Any) -> None:
    """Raise :class:`NotStored` for a kernel that the emulator is not meant to run."""
    found = [word for word in REFUSED if word in kernel.asm["ptx"]]
    if found:
        raise NotStored(f"uses {', '.join(found)}")
    for size in ("global_scratch_size", "profile_scratch_size"):
        if getattr(kernel.metadata, size, 0):
            raise NotStored(f"wants {size} {getattr(kernel.metadata, size)}")
    if getattr(kernel.metadata, "num_ctas", 1) != 1:
        raise NotStored("uses clusters")


def scratch(kernel: Any, passed: int) -> list[Scalar]:
    """Return the null pointers for parameters of the PTX entry that no argument fills."""
    entry = re.search(r"\.entry[^(]*\((.*?)\)", kernel.asm["ptx"], re.DOTALL)
    parameters = entry.group(1).count(".param") if entry else 0
    if parameters not in (passed, passed + SCRATCH_PARAMETERS):
        raise NotStored(f"{passed} arguments for {parameters} parameters of the PTX entry")
    return [Scalar(f"scratch{i}", "null", 0) for i in range(parameters - passed)]


def outcome(made: StoredLaunch) -> str:
    """Say what a stored launch changed; a launch that changed nothing is suspicious."""
    changed = sum(int((s.before != s.after).sum()) for s in made.storages)
    return f"ok, {changed} bytes changed" if changed else "ok, but NOTHING CHANGED"


def made_by() -> dict[str, str]:
    """Return the versions of everything that shapes the PTX or the result."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    found = {
        "device": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    for package in ("vllm", "vllm-gguf-plugin", "gguf"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def record(
    cases: Iterable[Case], folder: Path, device: str, origin: dict[str, str], **how: Any
) -> list[tuple[str, str, int, str]]:
    """Run ``cases`` and store their launches; return rows of case, launch, bytes of the file and outcome.

    Args:
        cases: what to run; one that raises is reported and the others go on.
        folder: where the files go.
        device: the torch device of the inputs.
        origin: versions, card, driver and date.
        how: passed to :class:`Recorder`.
    """
    rows = []
    for case in cases:
        recorder = Recorder(case, folder, origin, **how)
        problem = ""
        try:
            with recorder.recording():
                case.run(torch.device(device))
        except Exception as error:
            # Whatever a kernel of somebody else raises, the other cases are worth having.
            problem = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[-160:]}"
        rows += [(case.name, *row) for row in recorder.rows]
        if problem or not recorder.rows:
            rows.append((case.name, "-", 0, problem or "FAILED: no launch"))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Record all cases, or those whose name starts with ``--only``; return 1 if one failed."""
    parser = argparse.ArgumentParser(description="Record the hardware corpus on the GPU of this machine.")
    parser.add_argument("--out", type=Path, required=True, help="an empty or new directory")
    parser.add_argument("--only", default="", help="only cases whose name starts with this")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        parser.error("this needs a GPU, and TRITON_INTERPRET must not be set")
    # Line tables name the files of the machine that compiled, and nothing here reads them.
    triton.knobs.compilation.disable_line_info = True
    options.out.mkdir(parents=True, exist_ok=True)
    origin = made_by()
    cases = [case for case in launches.cases() if case.name.startswith(options.only)]
    rows = record(cases, options.out, "cuda", origin)
    stored.write_manifest(options.out)
    for row in rows:
        print("{:28} {:58} {:>7} {}".format(*row))
    kept = [row for row in rows if row[2]]
    failed = sum(row[3].startswith(("FAILED", "not stored")) for row in rows)
    print(origin)
    print(f"{len(cases)} cases, {len(kept)} launches stored, {sum(row[2] for row in kept)} bytes, {failed} failed")
    return int(failed > 0)


def _argument(name: str, kind: str, value: Any, order: list[int]) -> Pointer | Scalar:
    if isinstance(value, Tensor):
        return Pointer(name, order.index(_address(value)), value.data_ptr() - _address(value))
    if not isinstance(value, int | float):
        raise NotStored(f"argument {name} is {type(value).__name__}, neither tensor nor number")
    return Scalar(name, kind, int(value) if isinstance(value, bool) else value)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).cpu().clone()


if __name__ == "__main__":
    raise SystemExit(main())
