"""Coverage-guided fuzzing of the GGUF reader, an extra: ``python -m mla_conformance.suites.gguf.fuzz_atheris FOLDER``.

Needs ``pip install atheris``. Arguments are libFuzzer's: ``-runs=100000``, ``-max_len=4096``, a folder of inputs.
The first byte of an input chooses between plain bytes and mutations of a valid file.
"""

from __future__ import annotations

import importlib
import sys

atheris = importlib.import_module("atheris")

with atheris.instrument_imports(include=["mla_conformance.kernels.gguf.file_header"]):
    from mla_conformance.kernels.gguf import file_header
    from mla_conformance.suites.gguf.fuzz import SEEDS, Report, try_one
    from mla_conformance.suites.gguf.mutating import OPERATIONS, Mutation, mutate

NAMES = list(OPERATIONS)


def file_from(data: bytes) -> bytes:
    """Turn an input of the fuzzer into a file."""
    choice, rest = data[:1] or b"\0", data[1:]
    if choice[0] >= len(SEEDS):
        return rest
    words = [rest[place : place + 5] for place in range(0, len(rest) - 4, 5)]
    mutations = [
        Mutation(NAMES[w[0] % len(NAMES)], int.from_bytes(w[1:3], "little"), int.from_bytes(w[3:], "little"))
        for w in words[:8]
    ]
    return mutate(SEEDS[choice[0]], mutations)


def one_input(data: bytes) -> None:
    """Read one file and stop the fuzzer at a finding."""
    report = Report()
    try_one(file_from(data), report, "input", parse=file_header.parse_header)
    if report.findings:
        raise RuntimeError(report.findings[0])


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
