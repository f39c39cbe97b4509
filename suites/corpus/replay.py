"""Replay the corpus on the CPU: ``python -m mla_conformance.suites.corpus.replay`` prints a table in Markdown.

``--write-bounds`` writes ``bounds.toml`` from what was measured, but never less than equality for a launch whose
bits are fixed.
"""

from __future__ import annotations

import argparse
import math
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mla_conformance.suites.corpus import stored
from mla_conformance.suites.corpus.compare import Agreement, combine, compare
from mla_conformance.suites.corpus.stored import Pointer, StoredLaunch
from mla_conformance.suites.emulator import run_ptx
from mla_conformance.suites.emulator.errors import EmulatorError
from mla_conformance.suites.emulator.findings import Finding

BOUNDS = Path(__file__).parent / "bounds.toml"
_SHARE_DIGITS = 4
_HEADER = """# How closely each replay must agree with the hardware: the least share of bit-equal elements, and the
# most steps away. Written by `python -m mla_conformance.suites.corpus.replay --write-bounds` from what it measured, so
# that a change for the worse fails. Where the bits are fixed, 1.0 and 0 are required, whatever was measured.
"""


@dataclass(frozen=True)
class Bound:
    """At least ``bit_equal`` of the elements have the same bits, and none is more than ``steps`` away."""

    bit_equal: float
    steps: float

    def holds(self, agreement: Agreement) -> bool:
        """Whether ``agreement`` is within the bound; a comparison of no elements is not."""
        close = agreement.bit_equal >= self.bit_equal and agreement.steps <= self.steps
        return close and agreement.elements > 0


EXACT = Bound(1.0, 0.0)


@dataclass(frozen=True)
class Replay:
    """What replaying a launch gave."""

    agreement: Agreement
    findings: tuple[Finding, ...]
    seconds: float


def replay(launch: StoredLaunch, *, check: bool = True) -> Replay:
    """Run a stored launch in the emulator and compare everything it wrote with the hardware.

    Args:
        launch: from :func:`stored.read`; it is left as it is.
        check: whether the emulator looks for races and other faults.

    Raises:
        EmulatorError: the emulator cannot run it.
    """
    memory = [storage.before.clone() for storage in launch.storages]
    arguments: list[Tensor | int | float] = [
        memory[argument.storage][argument.offset :] if isinstance(argument, Pointer) else argument.value
        for argument in launch.arguments
    ]
    start = time.perf_counter()
    run = run_ptx(launch.ptx, launch.grid, arguments, shared_bytes=launch.shared_bytes, check=check)
    seconds = time.perf_counter() - start
    agreement = combine(
        compare(storage.before, storage.after, emulated, storage.dtype)
        for storage, emulated in zip(launch.storages, memory, strict=True)
    )
    return Replay(agreement, tuple(run.findings), seconds)


def bounds(path: Path = BOUNDS) -> dict[str, Bound]:
    """Read the bound of every launch."""
    table = tomllib.loads(path.read_text())
    return {name: Bound(float(entry["bit_equal"]), float(entry["steps"])) for name, entry in table.items()}


def measured_bound(launch: StoredLaunch, agreement: Agreement) -> Bound:
    """Return the bound that ``agreement`` just meets, or equality for a launch whose bits are fixed."""
    if launch.exact:
        return EXACT
    scale = 10**_SHARE_DIGITS
    return Bound(math.floor(agreement.bit_equal * scale) / scale, agreement.steps)


def write_bounds(found: dict[str, Bound], path: Path = BOUNDS) -> None:
    """Write ``found`` to ``path``, by name."""
    lines = [_HEADER]
    for name, bound in sorted(found.items()):
        steps = "inf" if math.isinf(bound.steps) else f"{bound.steps:.0f}"
        lines.append(f'["{name}"]\nbit_equal = {bound.bit_equal}\nsteps = {steps}\n')
    path.write_text("\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a launch could not be run, or an exact one is not equal."""
    parser = argparse.ArgumentParser(description="Replay the hardware corpus in the PTX emulator.")
    parser.add_argument("--data", type=Path, default=stored.DATA, help="where the corpus lies")
    parser.add_argument("--only", default="", help="only launches whose name contains this")
    parser.add_argument("--write-bounds", action="store_true", help="write bounds.toml; needs the whole corpus")
    options = parser.parse_args(arguments)
    if options.write_bounds and options.only:
        parser.error("--write-bounds with --only would forget the bounds of the others")
    torch.set_num_threads(1)
    print("| launch | elements | bit-equal | steps | relative | exact by rule | findings | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    found: dict[str, Bound] = {}
    wrong: list[str] = []
    for name in stored.names(options.data):
        if options.only not in name:
            continue
        launch = stored.read(name, options.data)
        try:
            result = replay(launch)
        except EmulatorError as error:
            print(f"| {name} | not run: {' '.join(str(error).split())[:200]} | | | | | | |", flush=True)
            wrong.append(name)
            continue
        print(_row(name, launch, result), flush=True)
        found[name] = measured_bound(launch, result.agreement)
        if launch.exact and not EXACT.holds(result.agreement):
            wrong.append(name)
    if options.write_bounds:
        write_bounds(found)
    if wrong:
        print(f"\nnot run, or not equal where the bits are fixed: {', '.join(wrong)}")
    return int(bool(wrong))


def _row(name: str, launch: StoredLaunch, result: Replay) -> str:
    agreement = result.agreement
    cells = [
        name,
        str(agreement.elements),
        f"{100 * agreement.bit_equal:.2f} %",
        f"{agreement.steps:.0f}",
        f"{agreement.relative:.1e}",
        "yes" if launch.exact else "",
        "; ".join(sorted({str(finding.kind) for finding in result.findings})),
        f"{result.seconds:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
