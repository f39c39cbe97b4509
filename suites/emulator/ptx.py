"""Parsing: the text of a PTX module into entries, basic blocks and instructions.

Only what compilers emit is accepted; whatever is not understood is refused by name. Grammar: PTX ISA, chapters 4
(Syntax), 5 (State spaces, types and variables) and 11 (Directives).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from mla_conformance.suites.emulator.errors import PTXError, UnsupportedInstruction
from mla_conformance.suites.emulator.scopes import Path, Scopes

MAX_CHARACTERS = 64 * 2**20
"""Longer texts are refused: no compiler emits them for one kernel."""
MAX_REGISTERS = 1_000_000
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.ptr\b[^,)]*?)?\s+([\w$]+)(?:\[(\d+)\])?\s*[,)]?$")
_DATA = re.compile(
    r"(?:\.visible\s+|\.extern\s+|\.weak\s+)?\.(global|const|shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"([\w$]+)(?:\[(\d*)\])?(?:\s*=\s*\{?(.*?)\}?)?;"
)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)(?:\s+\d+)?(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_FILE = re.compile(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"')
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


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: ``type`` is ``u64`` and so on; ``count`` elements for an array, else 1."""

    name: str
    type: str
    count: int = 1


@dataclass(frozen=True)
class Variable:
    """A variable of a state space: ``size`` bytes (0: as much as the launch gives), with initial bytes or None."""

    name: str
    space: str
    size: int
    align: int
    initial: bytes | None = None


@dataclass
class Entry:
    """One ``.entry``: straight-line blocks; the last instruction of a block may branch, return or wait at a barrier."""

    name: str
    target: str = ""
    parameters: list[Parameter] = field(default_factory=list)
    threads: int | None = None
    registers: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])
    labels: dict[str, int] = field(default_factory=dict)
    jump_tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """``.branchtargets`` by their label, for ``brx.idx``."""

    def register_type(self, name: str) -> str | None:
        """The declared type of a register (``.reg .b32 %r<82>`` declares %r0 to %r81), or None."""
        return self.registers.get(name) or self.registers.get(name.rstrip("0123456789") + "<>")


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
        self.files = {int(m[1]): m[2].rsplit("/", 1)[-1] for line in lines for m in [_FILE.match(line.strip())] if m}
        self.scopes = Scopes()
        self.last_label = ""
        self.branches: list[tuple[int, int, Path]] = []
        self.source = ""
        self.ended = False
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
                self.made.target = line.split()[1].rstrip(",")
            if line.startswith((".func", ".visible .func")):
                raise UnsupportedInstruction(
                    f"PTX line {number + 1}: functions besides the entry are not supported: {line}"
                )
            self._variable(line)

    def _variable(self, statement: str) -> bool:
        found = _DATA.match(statement)
        if found is None:
            return False
        space, align, type_, name, count, initial = found.groups()
        width = _bits(type_) // 8
        size = width * int(count) if count else (0 if count == "" else width)
        data = None
        if initial is not None:
            values = [int(value, 0) for value in initial.split(",") if value.strip()]
            data = b"".join((v % 256**width).to_bytes(width, "little") for v in values).ljust(size, b"\0")
        elif space in ("global", "const"):
            data = bytes(size)
        self.made.variables[name] = Variable(name, space, size, int(align or width), data)
        return True

    def _signature(self) -> int:
        """Parameters and performance directives, up to the opening brace; returns the line after it."""
        for number in range(self.start, len(self.lines)):
            line = self.lines[number].split("//")[0].strip()
            parameter = _PARAM.search(line)
            if parameter is not None:
                self.made.parameters.append(Parameter(parameter[2], parameter[1], int(parameter[3] or 1)))
            threads = re.search(r"\.reqntid\s+([\d,\s]+)", line)
            if threads is not None:
                sizes = [int(size) for size in threads[1].split(",")]
                if any(size != 1 for size in sizes[1:]):
                    raise PTXError(
                        f"PTX line {number + 1}: blocks of more than one dimension are not supported: {line}"
                    )
                self.made.threads = sizes[0]
            if line.startswith("{"):
                return number + 1
        raise PTXError(f"the entry {self.made.name} has no body")

    def _body(self, first: int) -> None:
        pending, begun = "", first
        for number in range(first, len(self.lines)):
            line = self.lines[number].split("//")[0].strip()
            if line.startswith(_IGNORED):
                self._location(line)
                continue
            if not line:
                continue
            begun = begun if pending else number + 1
            pending = self._statements(f"{pending} {line}".strip(), begun)
            if self.ended:
                return
        raise PTXError(f"the entry {self.made.name} does not end: a closing brace is missing")

    def _location(self, line: str) -> None:
        found = _LOC.match(line)
        if found is None:
            return
        file, row, outer, outer_row = found.groups()
        place = f"{self.files.get(int(file), '?')}:{row}"
        if outer is not None and outer != file:
            place = f"{self.files.get(int(outer), '?')}:{outer_row} (in {place})"
        # Line 0 marks code without a line of its own; the last one is the better hint.
        if row != "0":
            self.source = place

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
                self.made.labels[self.scopes.label(label[1], self.scopes.path)] = len(self.made.blocks) - 1
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
        if text.startswith(_IGNORED):
            return
        if text.startswith(".param"):
            self._call_parameter(text, line)
            return
        if text.startswith("."):
            if not self._variable(f"{text};"):
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
            source=self.source,
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
        for name in split_operands(declared[2]):
            base, _, count = name.partition("<")
            if count and int(count.rstrip("> ")) > MAX_REGISTERS:
                raise PTXError(f"PTX line {line}: {name} declares more than {MAX_REGISTERS} registers")
            if self.scopes.path:
                for index in range(int(count.rstrip("> "))) if count else [""]:
                    self.made.registers[self.scopes.declare(f"{base.strip()}{index}")] = declared[1]
            else:
                self.made.registers[base.strip() + ("<>" if count else "")] = declared[1]


def _bits(type_: str) -> int:
    digits = re.sub(r"\D", "", type_)
    return int(digits) if digits else 8
