"""Registers read before they are written: which values are undefined, and where one matters.

Reading such a register is no fault in itself: compilers leave the lanes undefined whose result nobody uses. So the
undefined values are followed, as valgrind and MSan do, and reported where they are stored, or decide a branch, a
guard, an address or a matrix product. The search is by definite assignment over the control flow; only registers that
some path may read unwritten, and what is computed from them, cost anything at run time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mla_conformance.suites.emulator.accesses import WARP
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.findings import Kind
from mla_conformance.suites.emulator.instructions.warp import shuffled_lanes
from mla_conformance.suites.emulator.ptx import Instruction
from mla_conformance.suites.emulator.types import PACKED, Array, Mask, dtype_of

_SINKS = frozenset(
    (
        *("st", "atom", "red", "cp", "ld", "prefetch", "mma", "ldmatrix", "stmatrix"),
        *("bra", "brx", "ret", "exit", "call", "bar", "barrier", "mbarrier", "redux", "vote"),
    )
)
"""Where an undefined operand matters. What ``ld`` reads besides the address is memory, which is not followed."""
_PAIRS = frozenset(("bf16x2", "f16x2", "e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2"))
"""What two operands are packed into, each into whole bytes. Triton packs a single value with an undefined other one."""
_WORD = re.compile(r"%[\w.]+")


@dataclass
class Flow:
    """One instruction of a program: what it reads and writes, and its step (None where it only ends a block)."""

    instruction: Instruction
    read: set[str]
    written: set[str]
    step: Step | None = None
    checks: list[Step] = field(default_factory=list)

    def uses(self) -> set[str]:
        """What it reads, its guard included."""
        return self.read if self.instruction.guard is None else self.read | {self.instruction.guard}


@dataclass
class Part:
    """A block of flows and the numbers of the blocks that may follow it."""

    flows: list[Flow] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


def watch(parts: Sequence[Part], builder: Builder) -> None:
    """Wrap the steps through which undefined values may pass."""
    suspects = perhaps_unwritten(parts)
    if suspects:
        tainted = _reached(parts, suspects)
        shadows = _Shadows(builder, tainted)
        for part in parts:
            for flow in part.flows:
                shadows.wrap(flow)


def perhaps_unwritten(parts: Sequence[Part]) -> set[str]:
    """Registers that some path from the entry reads before it surely wrote them; a guarded write is not sure."""
    names = sorted({name for part in parts for flow in part.flows for name in flow.uses() | flow.written})
    bit = {name: 1 << index for index, name in enumerate(names)}
    made = [_written(part.flows, bit) for part in parts]
    unreached = (1 << len(names)) - 1
    known: list[int | None] = [None] * len(parts)
    known[0] = 0
    work = [0]
    while work:
        number = work.pop()
        before = known[number]
        assert before is not None
        for successor in parts[number].successors:
            if successor >= len(parts):
                continue
            old = known[successor]
            new = (unreached if old is None else old) & (before | made[number])
            if new != old:
                known[successor] = new
                work.append(successor)
    found: set[str] = set()
    for part, start in zip(parts, known, strict=True):
        if start is None:
            continue
        for flow in part.flows:
            found |= {name for name in flow.uses() if not start & bit[name]}
            start |= _written([flow], bit)
    return found


def _written(flows: Sequence[Flow], bit: dict[str, int]) -> int:
    """The registers that these write in any case."""
    surely = 0
    for flow in flows:
        if flow.instruction.guard is None:
            for name in flow.written:
                surely |= bit[name]
    return surely


def _reached(parts: Sequence[Part], suspects: set[str]) -> set[str]:
    """The suspects and every register computed from one."""
    tainted = set(suspects)
    grown = True
    while grown:
        grown = False
        for part in parts:
            for flow in part.flows:
                if flow.instruction.parts[0] in _SINKS or not flow.read & tainted or flow.written <= tainted:
                    continue
                tainted |= flow.written
                grown = True
    return tainted


class _Shadows:
    """For each tainted register which lanes hold an undefined value: [lanes, bytes]."""

    def __init__(self, builder: Builder, tainted: set[str]) -> None:
        self.builder, self.machine = builder, builder.machine
        self.undefined = {
            name: np.ones((self.machine.lanes, builder.register(name).dtype.itemsize), bool) for name in sorted(tainted)
        }
        self.machine.undefined += self.undefined.values()

    def wrap(self, flow: Flow) -> None:
        """Check what matters in one instruction, and pass on the rest."""
        ins = flow.instruction
        if ins.guard in self.undefined:
            flow.checks.append(self._check(ins, [ins.guard]))
        sources = sorted(flow.read & self.undefined.keys())
        targets = sorted(flow.written & self.undefined.keys())
        if flow.step is None and sources:
            # Part of a run of matrix products, whose one step comes last.
            flow.checks.append(self._check(ins, sources))
        if flow.step is None or not (sources or targets):
            return
        if ins.parts[0] in _SINKS:
            check, spread = self._check(ins, sources), self._defined(targets)
        else:
            check, spread = None, self._rule(ins, sources, targets)
        step = flow.step

        def watched(mask: Mask) -> None:
            if check is not None:
                check(mask)
            # Before the step, which may write the predicate or the lane number that the rule looks at.
            spread(mask)
            step(mask)

        flow.step = watched

    def _check(self, ins: Instruction, names: Sequence[str]) -> Step:
        findings, thread = self.machine.findings, self.machine.thread
        # A store takes the low bytes of a register that is wider.
        stored = dtype_of(ins.parts[-1]).itemsize if ins.parts[0] == "st" else None
        address = _WORD.findall(ins.operands[0]) if ins.operands else []

        def check(mask: Mask) -> None:
            for name in names:
                shadow = self.undefined[name][:, : None if name in address else stored]
                if not shadow.any():
                    continue
                bad = shadow.any(1) if mask is True else shadow.any(1) & mask
                if bad.any():
                    first = thread(int(np.flatnonzero(bad)[0]))
                    detail = f"{first}: {name} was never written, or computed from what was not"
                    findings.add(Kind.UNINITIALISED_REGISTER, ins, int(bad.sum()), detail)

        return check

    def _defined(self, targets: Sequence[str]) -> Step:
        shadows = [self.undefined[name] for name in targets]

        def spread(mask: Mask) -> None:
            for shadow in shadows:
                shadow[slice(None) if mask is True else mask] = False

        return spread

    def _rule(self, ins: Instruction, sources: Sequence[str], targets: Sequence[str]) -> Step:
        """How undefinedness passes through one instruction."""
        if not targets:
            return lambda mask: None
        if not sources:
            return self._defined(targets)
        values = self._values(ins, sources)

        def spread(mask: Mask) -> None:
            for target, value in values():
                shadow = self.undefined.get(target)
                if shadow is not None:
                    fits = value.shape[1] in (1, shadow.shape[1])
                    np.copyto(shadow, value if fits else _any(value), where=True if mask is True else mask[:, None])

        return spread

    def _values(self, ins: Instruction, sources: Sequence[str]) -> Callable[[], list[tuple[str, Array]]]:
        """The rule of an instruction: what to write to the shadow of which register, [lanes, 1 or bytes]."""
        mnemonic, operands = ins.parts[0], ins.operands
        targets = _WORD.findall(operands[0])
        if mnemonic == "mov" and operands[1].startswith("{"):
            pieces = self.builder.vector(operands[1])
            each = self.builder.register(targets[0]).dtype.itemsize // len(pieces)
            return lambda: [(targets[0], np.concatenate([self._of(piece, each)[:, :each] for piece in pieces], 1))]
        if mnemonic == "mov" and operands[0].startswith("{"):
            names = self.builder.vector(operands[0])
            return lambda: self._unpacked(names, operands[1])
        if mnemonic == "cvt" and len(operands) == 3 and ins.parts[-2] in _PAIRS:
            upper, lower = operands[1:]
            half = self.builder.register(targets[0]).dtype.itemsize // 2
            return lambda: [
                (targets[0], np.repeat(np.concatenate([_any(self._of(t)) for t in (lower, upper)], 1), half, 1))
            ]
        if mnemonic == "prmt" and len(ins.parts) == 2 and operands[3][0].isdigit():
            return lambda: [(targets[0], self._permuted(operands, int(operands[3].rstrip("U"), 0)))]
        if mnemonic == "selp":
            predicate = self.builder.source(operands[3], "pred")
            a, b, p = operands[1:4]
            return lambda: [(targets[0], np.where(predicate[:, None], self._of(a), self._of(b)) | self._of(p))]
        if mnemonic == "shfl":
            return lambda: [(target, self._shuffled(ins)) for target in targets]
        if mnemonic in ("and", "or") and ins.parts[-1] == "pred":
            return lambda: [(targets[0], self._decided(ins))]
        if mnemonic in ("and", "or", "xor", "not") and ins.parts[-1] != "pred":
            kept = self._kept(ins, sources)
            return lambda: [(target, self._elements(sources, 1) & kept) for target in targets]
        if ins.parts[-1] in PACKED or mnemonic == "mov":
            element = dtype_of(ins.parts[-1]).itemsize if ins.parts[-1] in PACKED else 1
            return lambda: [(target, self._elements(sources, element)) for target in targets]
        return lambda: [
            (target, np.logical_or.reduce([_any(self._of(name)) for name in sources])) for target in targets
        ]

    def _of(self, text: str, size: int = 1) -> Array:
        """The shadow of an operand; constants and other registers, of ``size`` bytes, are defined."""
        shadow = self.undefined.get(text)
        return np.zeros((self.machine.lanes, size), bool) if shadow is None else shadow

    def _elements(self, sources: Sequence[str], size: int) -> Array:
        """Element by element of a packed type, ``size`` bytes each."""
        shadows = [self.undefined[name] for name in sources]
        if len({shadow.shape[1] for shadow in shadows}) > 1:
            return np.asarray(np.logical_or.reduce([_any(shadow) for shadow in shadows]))
        found = np.logical_or.reduce(shadows)
        grouped = found.reshape(len(found), -1, size).any(2)
        return np.repeat(grouped, size, axis=1)

    def _kept(self, ins: Instruction, sources: Sequence[str]) -> Array:
        """The bytes of a bitwise result that depend on the operands: not those that a constant mask clears."""
        size = dtype_of(ins.parts[-1]).itemsize
        constants = [text for text in ins.operands[1:] if text.lstrip("-")[0].isdigit()]
        wider = any(self.undefined[name].shape[1] != size for name in sources)
        if ins.parts[0] != "and" or not constants or wider:
            return np.ones(1, bool)
        return np.asarray(self.builder.source(constants[0], ins.parts[-1]).reshape(1).view("u1") != 0)

    def _decided(self, ins: Instruction) -> Array:
        """``and`` and ``or`` of predicates: a defined operand may decide alone."""
        deciding = ins.parts[0] == "or"
        parts = []
        for text in ins.operands[1:3]:
            value = self.builder.lanes(text.lstrip("!"), "pred")[:, None]
            parts.append((self._of(text), value == deciding))
        (a, a_decides), (b, b_decides) = parts
        return np.asarray((a | b) & ~(~a & a_decides) & ~(~b & b_decides))

    def _permuted(self, operands: Sequence[str], selector: int) -> Array:
        """Each byte of the result comes from one byte of two registers."""
        inputs = np.concatenate([self._of(operands[1], 4), self._of(operands[2], 4)], 1)
        return inputs[:, [selector >> 4 * byte & 7 for byte in range(4)]]

    def _unpacked(self, names: Sequence[str], source: str) -> list[tuple[str, Array]]:
        shadow = self._of(source)
        each = shadow.shape[1] // len(names)
        return [(name, shadow[:, index * each : (index + 1) * each]) for index, name in enumerate(names)]

    def _shuffled(self, ins: Instruction) -> Array:
        """By the same shuffle: a constant one is followed lane by lane, another taints the warp."""
        shadow = self._of(ins.operands[1])
        amount, clamp = (self.builder.source(text, "u32") for text in ins.operands[2:4])
        if amount.ndim or clamp.ndim:
            return np.repeat(_any(shadow).reshape(-1, WARP).any(1), WARP)[:, None]
        lane = self.machine.lane_in_warp
        source, _ = shuffled_lanes(ins.parts[2], lane, amount, clamp)
        return np.asarray(shadow[np.arange(self.machine.lanes) - lane + source])


def _any(shadow: Array) -> Array:
    """[lanes, 1]: whether any part is undefined."""
    return np.asarray(shadow.any(1, keepdims=True))
