"""Parsing: the text of a PTX module into entries, basic blocks and instructions.

Only what compilers emit is accepted; whatever is not understood is refused by name. Grammar: PTX ISA, chapters 4
(Syntax), 5 (State spaces, types and variables) and 11 (Directives).
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, field, replace

from mla_conformance.suites.emulator import declarations
from mla_conformance.suites.emulator.declarations import Parameter, Variable
from mla_conformance.suites.emulator.errors import PTXError, UnsupportedInstruction
from mla_conformance.suites.emulator.locations import Locations
from mla_conformance.suites.emulator.scopes import Path, Scopes
from mla_conformance.suites.emulator.types import DTYPES, PACKED

MAX_CHARACTERS = 64 * 2**20
"""Longer texts are refused: no compiler emits them for one kernel."""
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_LABEL = re.compile(r"([$\w]+):(?!:)")
_GUARDED = re.compile(r"@(!?)([%\w$]+)\s+(.*)")
_TERMINATORS = ("bra", "brx", "ret", "exit", "bar", "barrier")
WAITS = ("mbarrier.try_wait", "mbarrier.test_wait")
"""Opcodes of the waits that may park their lanes; like barriers they end a block."""
_CALL_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)$")
_IGNORED = (".loc ", ".loc\t", ".file", ".pragma", ".section", ".callprototype", ".attribute")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        text: as written, guard included.
        opcode: mnemonic with all suffixes, such as ``fma.rn.f32``.
        operands: as written; a vector keeps its braces.
        guard: predicate register of ``@p``, or None.
        negated: whether the guard is ``@!p``.
        line: line of the PTX text, from 1.
        source: line of the kernel's source from ``.loc``, such as ``kernel.py:57``, or "".
    """

    text: str
    opcode: str
    operands: tuple[str, ...]
    guard: str | None = None
    negated: bool = False
    line: int = 0
    source: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode cut at its dots."""
        return tuple(self.opcode.replace("::", ":").split("."))


@dataclass
class Entry:
    """One ``.entry``: straight-line blocks; the last instruction of a block may branch, return or wait at a barrier."""

    name: str
    target: str = ""
    parameters: list[Parameter] = field(default_factory=list)
    threads: int | None = None
    registers: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """How many ``.reg .b32 %r<82>`` declares, by ``%r``; ``registers`` calls them ``%r<>``."""
    variables: dict[str, Variable] = field(default_factory=dict)
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])
    labels: dict[str, int] = field(default_factory=dict)
    jump_tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """``.branchtargets`` by their label, for ``brx.idx``."""

    def register_type(self, name: str) -> str | None:
        """The declared type of a register (``.reg .b32 %r<82>`` declares %r0 to %r81), or None."""
        found = self.registers.get(name)
        if found is None:
            base = name.rstrip("0123456789")
            number = name[len(base) :]
            if number and int(number) < self.counts.get(base, 0):
                found = self.registers[f"{base}<>"]
        return found


def parse(text: str) -> Entry:
    """Parse the one entry of a PTX text.

    Raises:
        PTXError: no entry or several, or a statement that is not understood, with its line.
    """
    if len(text) > MAX_CHARACTERS:
        raise PTXError(f"the PTX text has {len(text)} characters; more than {MAX_CHARACTERS} are refused")
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _ENTRY.search(line.split("//")[0])]
    if len(starts) != 1:
        raise PTXError(f"the PTX text has {len(starts)} entries (.entry), not one")
    return _Parser(lines, starts[0]).entry()


def split_operands(text: str) -> tuple[str, ...]:
    """Cut at the commas that are outside braces, brackets and parentheses."""
    found, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif character == "," and depth == 0:
            found.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return (*found, last) if last else tuple(found)


class _Parser:
    def __init__(self, lines: list[str], start: int) -> None:
        self.lines, self.start = lines, start
        self.locations = Locations(lines)
        self.scopes = Scopes()
        self.last_label = ""
        self.branches: list[tuple[int, int, Path]] = []
        self.ended = False
        self.registers = 0
        name = _ENTRY.search(lines[start])
        assert name is not None
        self.made = Entry(name[1])

    def entry(self) -> Entry:
        self._head()
        body = self._signature()
        self._body(body)
        self._resolve()
        return self.made

    def _head(self) -> None:
        """What stands before the entry: the target and module-level variables."""
        for number, line in enumerate(self.lines[: self.start]):
            line = line.split("//")[0].strip()
            if line.startswith(".target"):
                self.made.target = line.removeprefix(".target").split(",")[0].strip()
            if line.startswith((".func", ".visible .func")):
                raise UnsupportedInstruction(
                    f"PTX line {number + 1}: functions besides the entry are not supported: {line}"
                )
            self._variable(line, number + 1)

    def _variable(self, statement: str, line: int) -> bool:
        found = declarations.variable(statement, line)
        if found is not None:
            self._new(found.name, self.made.variables, line)
            self.made.variables[found.name] = found
        return found is not None

    @staticmethod
    def _new(name: str, known: Container[str], line: int) -> None:
        if name in known:
            raise PTXError(f"PTX line {line}: {name} is declared twice")

    def _signature(self) -> int:
        """Parameters and performance directives, up to the opening brace; returns the line after it."""
        for number in range(self.start, len(self.lines)):
            line = self.lines[number].split("//")[0].strip()
            parameter = declarations.parameter(line, number + 1)
            if parameter is not None:
                self._new(parameter.name, {known.name for known in self.made.parameters}, number + 1)
                self.made.parameters.append(parameter)
            threads = declarations.threads(line, number + 1)
            if threads is not None:
                self.made.threads = threads
            if line.startswith("{"):
                return number + 1
        raise PTXError(f"the entry {self.made.name} has no body")

    def _body(self, first: int) -> None:
        pending, begun = "", first
        for number in range(first, len(self.lines)):
            line = self.lines[number].split("//")[0].strip()
            if line.startswith(_IGNORED):
                self.locations.note(line)
                continue
            if not line:
                continue
            begun = begun if pending else number + 1
            pending = self._statements(f"{pending} {line}".strip(), begun)
            if self.ended:
                return
        raise PTXError(f"the entry {self.made.name} does not end: a closing brace is missing")

    def _statements(self, text: str, line: int) -> str:
        """Take every complete statement off the front of ``text``; return what is left."""
        while text:
            label = _LABEL.match(text)
            if text[0] in "{}":
                self.ended = not self.scopes.brace(text[0])
                text = text[1:].strip()
                if self.ended:
                    return text
            elif label is not None:
                if self.made.blocks[-1]:
                    self.made.blocks.append([])
                name = self.scopes.label(label[1], self.scopes.path)
                self._new(name, self.made.labels, line)
                self.made.labels[name] = len(self.made.blocks) - 1
                self.last_label = label[1]
                text = text[label.end() :].strip()
            elif ";" in text:
                statement, text = (part.strip() for part in text.split(";", 1))
                if statement:
                    self._statement(" ".join(statement.split()), line)
            else:
                return text
        return ""

    def _resolve(self) -> None:
        """A branch means the innermost label of its name."""
        for block, index, path in self.branches:
            branch = self.made.blocks[block][index]
            meanings = Scopes.meanings(branch.operands[0], path)
            found = next((name for name in meanings if name in self.made.labels), branch.operands[0])
            self.made.blocks[block][index] = replace(branch, operands=(found, *branch.operands[1:]))

    def _statement(self, text: str, line: int) -> None:
        if text.startswith(".reg"):
            self._registers(text, line)
            return
        if text.startswith(".branchtargets"):
            self.made.jump_tables[self.last_label] = split_operands(text.removeprefix(".branchtargets"))
            return
        if text.startswith((".loc ", ".file ")):
            # Without a semicolon of its own it would swallow the next instruction.
            raise PTXError(f"PTX line {line}: a line of its own is expected: {text}")
        if text.startswith(_IGNORED):
            return
        if text.startswith(".param"):
            self._call_parameter(text, line)
            return
        if text.startswith("."):
            if not self._variable(f"{text};", line):
                raise PTXError(f"PTX line {line}: directive not understood: {text}")
            return
        guarded = _GUARDED.match(text)
        body = guarded[3] if guarded else text
        opcode, _, rest = body.partition(" ")
        made = Instruction(
            text=text,
            opcode=opcode,
            operands=tuple(self.scopes.rename(operand) for operand in split_operands(rest)),
            guard=self.scopes.rename(guarded[2]) if guarded else None,
            negated=bool(guarded and guarded[1]),
            line=line,
            source=self.locations.place,
        )
        self.made.blocks[-1].append(made)
        if opcode.startswith("bra") and self.scopes.path:
            self.branches.append((len(self.made.blocks) - 1, len(self.made.blocks[-1]) - 1, self.scopes.path))
        ends = opcode.split(".")[0] in _TERMINATORS and not opcode.startswith("bar.warp")
        if ends or opcode.startswith(WAITS):
            self.made.blocks.append([])

    def _call_parameter(self, text: str, line: int) -> None:
        """A scalar parameter of a call is held like a register of its scope."""
        declared = _CALL_PARAMETER.match(text)
        if declared is None:
            raise UnsupportedInstruction(f"PTX line {line}: a call parameter that is no scalar: {text}")
        self.made.registers[self.scopes.declare(declared[2])] = declared[1]

    def _registers(self, text: str, line: int) -> None:
        declared = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text)
        if declared is None:
            raise PTXError(f"PTX line {line}: register declaration not understood: {text}")
        if declared[1] not in DTYPES | PACKED:
            raise PTXError(f"PTX line {line}: registers of type .{declared[1]} are not known here: {text}")
        for declaration in split_operands(declared[2]):
            name, count = declarations.registers(declaration, line)
            self.registers += count or 1
            if self.registers > declarations.MAX_REGISTERS:
                raise PTXError(f"PTX line {line}: more than {declarations.MAX_REGISTERS} registers: {text}")
            if self.scopes.path:
                for index in [""] if count is None else range(count):
                    self.made.registers[self.scopes.declare(f"{name}{index}")] = declared[1]
            else:
                self.made.registers[name + ("" if count is None else "<>")] = declared[1]
                self.made.counts[name] = count or 0
