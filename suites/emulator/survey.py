"""Which instructions Triton emits: ``python -m mla_conformance.suites.emulator.survey DIRECTORY > emitted.toml``.

The directory holds PTX texts as ``VERSION/TARGET/*.ptx``. For each opcode the survey keeps where it was seen and one
example; ``emitted.toml`` is what it made of this repository's kernels, vLLM's dense MLA decode and the GGUF plugin,
compiled by Triton 3.6, 3.8 and 3.9 for six targets. A test translates every example.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mla_conformance.suites.emulator.ptx import Entry, Instruction, parse
from mla_conformance.suites.emulator.types import dtype_of

EMITTED = Path(__file__).with_name("emitted.toml")
_MODULE = """.version 8.7
.target {target}
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry one(.param .u64 p0)
.reqntid 32
{{
.reg .pred %p<100000>;
.reg .b16 %rs<100000>;
.reg .b32 %r<100000>;
.reg .b64 %rd<100000>;
{text};
$end:
ret;
}}
"""


@dataclass
class Emitted:
    """One opcode: an example, and the Triton versions and targets that emit it."""

    example: str
    versions: set[str] = field(default_factory=set)
    targets: set[str] = field(default_factory=set)

    def module(self) -> str:
        """A PTX text with one entry that executes the example."""
        return (
            _MODULE.replace("{{", "{").replace("}}", "}").replace("{target}", "sm_120a").replace("{text}", self.example)
        )


def survey(files: Iterable[Path]) -> dict[str, Emitted]:
    """Count what the files ``VERSION/TARGET/name.ptx`` use."""
    found: dict[str, Emitted] = {}
    for path in sorted(files):
        version, target = path.parts[-3:-1]
        entry = parse(path.read_text(encoding="utf-8"))
        for block in entry.blocks:
            for ins in block:
                if ins.opcode not in found:
                    found[ins.opcode] = Emitted(_plain(entry, ins))
                found[ins.opcode].versions.add(version)
                found[ins.opcode].targets.add(target)
    return found


_USUAL = re.compile(r"%(p|rs|r|rd)\d+$")
_PREFIXES = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}


def _plain(entry: Entry, ins: Instruction) -> str:
    """The instruction without its guard, its names as the module above has them."""
    text = re.sub(r"\[\s*[A-Za-z_][\w$]*_param_\d+\s*(\+\d+)?\s*\]", "[p0]", ", ".join(ins.operands))
    text = re.sub(r"\$L\w+", "$end", text)
    # Registers of inline assembly have names of their own; a usual one of the same type takes their place.
    unusual = dict.fromkeys(name for name in re.findall(r"%?[A-Za-z_][\w.$]*", text) if not _USUAL.match(name))
    for number, name in enumerate(unusual):
        type_ = entry.register_type(name)
        if type_ is not None:
            prefix = "%p" if type_ == "pred" else _PREFIXES[dtype_of(type_).itemsize]
            text = re.sub(rf"(?<![\w%.]){re.escape(name)}(?![\w.])", f"{prefix}{90000 + number}", text)
    return f"{ins.opcode} {text}".strip()


def load(path: Path = EMITTED) -> dict[str, Emitted]:
    """Read ``emitted.toml``."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        opcode: Emitted(entry["example"], set(entry["versions"]), set(entry["targets"]))
        for opcode, entry in entries.items()
    }


def main() -> int:
    """Write the survey of a directory to standard output, as TOML."""
    parser = argparse.ArgumentParser(prog="python -m mla_conformance.suites.emulator.survey", description=__doc__)
    parser.add_argument("directory", type=Path)
    found = survey(parser.parse_args().directory.glob("*/*/*.ptx"))
    seen: dict[str, set[str]] = defaultdict(set)
    for entry in found.values():
        for version in entry.versions:
            seen[version] |= entry.targets
    listed = "; ".join(f"{version}: {', '.join(sorted(targets))}" for version, targets in sorted(seen.items()))
    sys.stdout.write(f"# Written by mla_conformance.suites.emulator.survey. Triton versions and targets: {listed}.\n")
    for opcode, entry in sorted(found.items()):
        sys.stdout.write(f'\n["{opcode}"]\nexample = {_quoted(entry.example)}\n')
        sys.stdout.write(f"versions = {_listed(entry.versions)}\ntargets = {_listed(entry.targets)}\n")
    return 0


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "") + "'"


def _listed(names: set[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in sorted(names)) + "]"


if __name__ == "__main__":
    raise SystemExit(main())
