"""Fuzzes the GGUF reader: ``python -m mla_conformance.suites.gguf.fuzz --files 100000 --seed 1``.

A file must be refused with ``GGUFError``, or be accepted and then mean exactly its bytes. A finding is anything else:
any other exception, more than a second, more memory than ``bound``, an accepted header that encodes to other bytes,
tensors that overlap or leave the file, and a tensor that does not read as its bytes. One file in ``ON_DISK`` also goes
through ``open_gguf``, and so through gguf-py.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import signal
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import numpy as np

from mla_conformance.kernels.gguf.file import open_gguf
from mla_conformance.kernels.gguf.file_header import parse_header
from mla_conformance.kernels.gguf.file_types import GGUFError, Header
from mla_conformance.suites.gguf.mutating import Mutation, draw, mutate, seed_files
from mla_conformance.suites.gguf.writing import TensorSpec, Typed, encode

# Of the processor for one reading; the alarm, by the clock, is for what never ends.
SECONDS = 1.0
ALARM = 20.0
ON_DISK = 20
Parse = Callable[[memoryview, str], Header]


def bound(size: int) -> int:
    """Bytes that a reading of a file of ``size`` bytes may allocate.

    Entries with empty arrays cost most, 17 bytes for one of the file (measured); twice that is allowed. The constant is
    for one message, its exception and the parser.
    """
    return 32 * 1024 + 32 * size


class Hang(BaseException):
    """A reading took too long; no Exception, so that nothing on the way catches it."""


@dataclass
class Report:
    """What a fuzz run found.

    Attributes:
        tried: Files read.
        on_disk: How many of them also went through ``open_gguf``.
        accepted: Files found valid.
        refused: Files refused, by the error's kind.
        findings: One line a finding, with the index of its file.
        seconds: Seconds for the run.
        slowest: Seconds of the processor for the slowest reading.
        peak: Most bytes that one reading allocated.
        peak_share: The highest share of ``bound`` that one reading allocated.
    """

    tried: int = 0
    on_disk: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest: float = 0.0
    peak: int = 0
    peak_share: float = 0.0

    def __str__(self) -> str:
        lines = [f"tried {self.tried} ({self.on_disk} also from disk through gguf-py), accepted {self.accepted}"]
        lines += [f"refused {sum(self.refused.values())}:"]
        lines += [f"  {count:7d} {kind}" for kind, count in self.refused.most_common()]
        lines += [f"findings {len(self.findings)}", *(f"  {finding}" for finding in self.findings[:50])]
        lines += [f"{self.seconds:.1f} s, slowest reading {self.slowest * 1e3:.1f} ms"]
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        lines += [f"most allocated by one reading {self.peak / 1024:.0f} KiB ({self.peak_share:.0%} of its bound)"]
        return "\n".join([*lines, f"peak resident memory of the process {resident:.0f} MiB"])


def judge(header: Header, data: bytes) -> str | None:
    """Say what is wrong with an accepted file, by means of this module's own."""
    entries = list(header.tensors.values())
    specs = [TensorSpec(entry.name, entry.quant, entry.shape) for entry in entries]
    covered = np.zeros(len(data), bool)
    for entry, spec in zip(entries, specs, strict=True):
        bytes_covered = covered[entry.offset : entry.offset + spec.nbytes]
        if entry.nbytes != spec.nbytes or len(bytes_covered) != spec.nbytes:
            return f"tensor {entry.name!r} does not have {spec.nbytes} bytes in the file: {entry}"
        if bytes_covered.any():
            return f"tensor {entry.name!r} overlaps another"
        if entry.offset % header.alignment:
            return f"tensor {entry.name!r} is not aligned"
        bytes_covered[:] = True
    values = {key: Typed(header.metadata_types[key], value) for key, value in header.metadata.items()}
    if any(
        isinstance(v, float | np.ndarray) and np.isnan(np.asarray(v, float)).any() for v in header.metadata.values()
    ):
        return None  # a NaN's payload does not survive Python's float, so the bytes may differ
    offsets = [entry.offset - header.data_start for entry in entries]
    again = encode(values, specs, version=header.version, offsets=offsets).header
    if again != data[: len(again)]:
        return "the accepted header encodes to other bytes"
    return None


def read_from_disk(data: bytes, path: Path) -> str | None:
    """Open a file through gguf-py and read every tensor; say what is wrong."""
    path.write_bytes(data)
    with open_gguf(path) as file:
        for name, entry in file.tensors.items():
            found = file.read(name)
            if found.numel() != entry.nbytes or math.prod(found.shape[:-1]) != math.prod(entry.shape[:-1]):
                return f"tensor {name!r} reads as {list(found.shape)}, {entry}"
            if found.numpy().tobytes() != data[entry.offset : entry.offset + entry.nbytes]:
                return f"tensor {name!r} reads as other bytes"
    return None


def try_one(data: bytes, report: Report, label: str, *, parse: Parse = parse_header, path: Path | None = None) -> None:
    """Read one file and note what came of it; through ``open_gguf`` also, where a path is given."""
    report.tried += 1
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    start = time.process_time()
    header, problem = None, None
    try:
        header = parse(memoryview(data), label)
    except GGUFError as error:
        report.refused[error.kind] += 1
        if not (label in str(error) and 0 <= error.offset <= len(data) and error.field in str(error)):
            problem = f"the error does not name file, offset and field: {error}"
    except Hang:
        problem = f"hangs for more than {ALARM} s"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    seconds = time.process_time() - start
    allocated = tracemalloc.get_traced_memory()[1] - before
    report.slowest = max(report.slowest, seconds)
    report.peak = max(report.peak, allocated)
    report.peak_share = max(report.peak_share, allocated / bound(len(data)))
    if seconds > SECONDS and problem is None:
        problem = f"takes {seconds:.1f} s"
    if allocated > bound(len(data)) and problem is None:
        problem = f"allocates {allocated} bytes for a file of {len(data)}"
    if header is not None and problem is None:
        report.accepted += 1
        problem = judge(header, data)
    if path is not None and problem is None:
        report.on_disk += 1
        problem = _from_disk(data, path, accepted=header is not None)
    if problem is not None:
        report.findings.append(f"{label}: {problem}")


def _from_disk(data: bytes, path: Path, *, accepted: bool) -> str | None:
    try:
        problem = read_from_disk(data, path)
    except GGUFError as error:
        if accepted or error.kind.startswith("gguf-py"):
            return f"valid, but open_gguf refuses it: {error}"
        return None
    except Hang:
        return f"open_gguf hangs for more than {ALARM} s"
    except Exception as error:
        return f"open_gguf: {type(error).__name__}: {error}"
    return problem if accepted else "refused, but open_gguf accepts it"


def case(seed: int, index: int) -> tuple[str, list[Mutation], bytes]:
    """Return the ``index``-th file of a run: the valid file's name, the mutations and the bytes."""
    source = random.Random(f"{seed}:{index}")
    chosen = source.choice(SEEDS)
    mutations = draw(source)
    return chosen.name, mutations, mutate(chosen, mutations)


def run(files: int, seed: int, *, parse: Parse = parse_header, alarm: bool = False, only: int | None = None) -> Report:
    """Read ``files`` mutated files, or the file of one index; ``alarm`` interrupts a hang, in the main thread only."""
    report = Report()
    was_tracing = tracemalloc.is_tracing()
    start = time.perf_counter()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        path = Path(folder) / "case.gguf"
        tracemalloc.start()
        for index in range(files) if only is None else [only]:
            name, mutations, data = case(seed, index)
            label = f"seed {seed} file {index} ({name})"
            if only is not None:
                sys.stdout.write("".join(f"{mutation}\n" for mutation in mutations))
            if alarm:
                signal.setitimer(signal.ITIMER_REAL, ALARM)
            on_disk = parse is parse_header and (index % ON_DISK == 0 or only is not None)
            try_one(data, report, label, parse=parse, path=path if on_disk else None)
            if alarm:
                signal.setitimer(signal.ITIMER_REAL, 0)
        if not was_tracing:
            tracemalloc.stop()
    report.seconds = time.perf_counter() - start
    return report


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang


SEEDS = seed_files()

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fuzz the GGUF reader.")
    parser.add_argument("--files", type=int, default=100_000, help="how many mutated files (default 100000)")
    parser.add_argument("--seed", type=int, default=1, help="which run (default 1)")
    parser.add_argument("--only", type=int, help="index of the one file to read again")
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, _hang)
    report = run(arguments.files, arguments.seed, alarm=True, only=arguments.only)
    sys.stdout.write(f"{report}\n")
    sys.exit(bool(report.findings))
