"""Translation of an entry for one machine: blocks of steps, and how lanes leave a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.errors import PTXError
from mla_conformance.suites.emulator.findings import Kind
from mla_conformance.suites.emulator.instructions import matrix
from mla_conformance.suites.emulator.instructions.registry import translate
from mla_conformance.suites.emulator.machine import ALL_THREADS, Machine
from mla_conformance.suites.emulator.ptx import Entry, Instruction
from mla_conformance.suites.emulator.types import Array, Mask

Exits = list[tuple[int, Mask]]
_JUMPS = ("bra", "ret", "exit")
_BARRIERS = ("bar", "barrier")


@dataclass
class Block:
    """Straight-line steps, then ``leave``: given the mask, which lanes go on in which block."""

    steps: list[Step]
    leave: Callable[[Mask], Exits]


@dataclass
class _Flow:
    """What one instruction reads and writes, for the search for uninitialised registers."""

    instruction: Instruction
    read: set[str]
    written: set[str]
    step: Step | None = None
    checks: list[Step] = field(default_factory=list)

    def uses(self) -> set[str]:
        """What it reads, its guard included."""
        return self.read if self.instruction.guard is None else self.read | {self.instruction.guard}


@dataclass
class _Part:
    flows: list[_Flow] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


class Program:
    """An entry, ready to run on ``machine``.

    Raises:
        UnsupportedInstruction: an instruction form that is not implemented.
        PTXError: a register, label or type that does not fit.
    """

    def __init__(self, entry: Entry, machine: Machine) -> None:
        self.entry, self.machine = entry, machine
        self.builder = Builder(entry, machine)
        parts = [self._translate(number) for number in range(len(entry.blocks))]
        for suspect in _never_surely_written(parts):
            self._watch(suspect, parts)
        self.blocks = [
            Block([step for flow in part.flows for step in self._steps(flow)], self._leaving(number))
            for number, part in enumerate(parts)
        ]

    def _steps(self, flow: _Flow) -> list[Step]:
        return flow.checks + ([] if flow.step is None else [self._guarded(flow.step, flow.instruction)])

    def _translate(self, number: int) -> _Part:
        part = _Part()
        instructions = self.entry.blocks[number]
        for group in matrix.runs(instructions):
            for one in group[:-1]:
                # The steps of a run are made together; each still counts what it reads and writes.
                translate(self.builder, one)
                part.flows.append(_Flow(one, self.builder.read, self.builder.written))
            last = group[-1]
            if last.parts[0] in _JUMPS or self._is_barrier(last):
                part.flows.append(_Flow(last, set(), set()))
                continue
            step = translate(self.builder, last)
            flow = _Flow(last, self.builder.read, self.builder.written)
            flow.step = matrix.run(self.builder, group) if len(group) > 1 else step
            part.flows.append(flow)
        part.successors = self._successors(number)
        return part

    @staticmethod
    def _is_barrier(instruction: Instruction) -> bool:
        return instruction.parts[0] in _BARRIERS and "warp" not in instruction.parts

    def _guarded(self, step: Step, instruction: Instruction) -> Step:
        if instruction.guard is None:
            return step
        predicate = self.builder.source(instruction.guard, "pred")
        negated, lanes = instruction.negated, self.machine.lanes

        def guarded(mask: Mask) -> None:
            chosen = ~predicate if negated else predicate
            if mask is not True:
                chosen = chosen & mask
            count = np.count_nonzero(chosen)
            if count == lanes:
                step(True)
            elif count:
                # A copy: the step may write the very predicate that guards it.
                step(chosen if negated or mask is not True else chosen.copy())

        return guarded

    # ---- leaving a block

    def _target(self, instruction: Instruction) -> int:
        label = instruction.operands[0]
        if label not in self.entry.labels:
            raise PTXError(f"PTX line {instruction.line}: no label {label}: `{instruction.text}`")
        return self.entry.labels[label]

    def _successors(self, number: int) -> list[int]:
        last = self.entry.blocks[number][-1] if self.entry.blocks[number] else None
        if last is None or last.parts[0] not in _JUMPS:
            return [number + 1]
        found = [self._target(last)] if last.parts[0] == "bra" else []
        return [*found, number + 1] if last.guard is not None else found

    def _leaving(self, number: int) -> Callable[[Mask], Exits]:
        last = self.entry.blocks[number][-1] if self.entry.blocks[number] else None
        following = number + 1
        end = len(self.entry.blocks)
        if last is None or (last.parts[0] not in _JUMPS and not self._is_barrier(last)):
            if following == end:
                return self._ending(None)
            return lambda mask: [(following, mask)]
        if self._is_barrier(last):
            return self._barrier(last, following)
        if last.parts[0] == "bra":
            target = self._target(last)
            return (lambda mask: [(target, mask)]) if last.guard is None else self._branch(last, target, following)
        return self._ending(last if last.guard is not None else None, following)

    def _branch(self, instruction: Instruction, target: int, following: int) -> Callable[[Mask], Exits]:
        assert instruction.guard is not None
        predicate, negated, lanes = self.builder.source(instruction.guard, "pred"), instruction.negated, self.machine.lanes

        def leave(mask: Mask) -> Exits:
            taken = ~predicate if negated else predicate
            total = lanes
            if mask is not True:
                taken = taken & mask
                total = np.count_nonzero(mask)
            count = np.count_nonzero(taken)
            if count == total:
                return [(target, mask)]
            if count == 0:
                return [(following, mask)]
            return [(target, taken.copy()), (following, ~taken if mask is True else mask & ~taken)]

        return leave

    def _ending(self, guarded: Instruction | None, following: int = 0) -> Callable[[Mask], Exits]:
        machine = self.machine
        if guarded is None:

            def leave(mask: Mask) -> Exits:
                machine.exit(mask)
                return []

            return leave
        branch = self._branch(guarded, -1, following)

        def leave_some(mask: Mask) -> Exits:
            found = branch(mask)
            for target, lanes in found:
                if target == -1:
                    machine.exit(lanes)
            return [(target, lanes) for target, lanes in found if target != -1]

        return leave_some

    def _barrier(self, instruction: Instruction, following: int) -> Callable[[Mask], Exits]:
        """``bar.sync a{, b}``, ``barrier.sync``, and ``bar.arrive`` (PTX ISA, 9.7.13.1)."""
        parts, operands, machine = instruction.parts, instruction.operands, self.machine
        builder = self.builder
        builder.start(instruction)
        if instruction.guard is not None or "red" in parts or "cluster" in parts or not operands[0].isdigit():
            raise builder.unsupported("barriers: bar.sync and bar.arrive, unguarded, with a constant number")
        barrier = int(operands[0])
        count = int(operands[1]) if len(operands) > 1 else ALL_THREADS
        if "arrive" in parts:

            def arrive(mask: Mask) -> Exits:
                machine.wait(instruction, barrier, count, mask, None)
                return [(following, mask)]

            return arrive
        if "sync" not in parts:
            raise builder.unsupported()

        def leave(mask: Mask) -> Exits:
            if mask is True and count == ALL_THREADS:
                machine.shared.barrier(True)
                return [(following, True)]
            machine.wait(instruction, barrier, count, mask, following)
            return []

        return leave

    # ---- registers that are read before they are written

    def _watch(self, name: str, parts: list[_Part]) -> None:
        """Track for each lane whether ``name`` was written, and report a use before that."""
        written = np.zeros(self.machine.lanes, bool)
        self.machine.unwritten.append(written)
        for part in parts:
            for flow in part.flows:
                check = self._check(flow.instruction, name, written)
                if name == flow.instruction.guard:
                    flow.checks.append(check)
                if flow.step is not None and (name in flow.read or name in flow.written):
                    flow.step = _watched(flow.step, check if name in flow.read else None, name in flow.written, written)

    def _check(self, instruction: Instruction, name: str, written: Array) -> Step:
        findings, thread = self.machine.findings, self.machine.thread

        def check(mask: Mask) -> None:
            if written.all():
                return
            found = np.flatnonzero(~written if mask is True else mask & ~written)
            if len(found):
                detail = f"{thread(int(found[0]))} never wrote {name}"
                findings.add(Kind.UNINITIALISED_REGISTER, instruction, len(found), detail)

        return check


def _watched(step: Step, check: Step | None, writes: bool, written: Array) -> Step:
    def watched(mask: Mask) -> None:
        if check is not None:
            check(mask)
        step(mask)
        if writes:
            written[...] = True if mask is True else written | mask

    return watched


def _never_surely_written(parts: list[_Part]) -> Iterator[str]:
    """Registers that some path reads before it has written them unguarded: definite assignment, by fixed point."""
    names = sorted({name for part in parts for flow in part.flows for name in flow.uses() | flow.written})
    bit = {name: 1 << index for index, name in enumerate(names)}
    everything = (1 << len(names)) - 1
    made = []
    for part in parts:
        surely = 0
        for flow in part.flows:
            if flow.instruction.guard is None:
                for name in flow.written:
                    surely |= bit[name]
        made.append(surely)
    at_entry = [everything] * len(parts)
    at_entry[0] = 0
    work = [0]
    while work:
        number = work.pop()
        leaving = at_entry[number] | made[number]
        for successor in parts[number].successors:
            if successor < len(parts) and at_entry[successor] & leaving != at_entry[successor]:
                at_entry[successor] &= leaving
                work.append(successor)
    visited = {0}
    stack = [0]
    while stack:
        for successor in parts[stack.pop()].successors:
            if successor < len(parts) and successor not in visited:
                visited.add(successor)
                stack.append(successor)
    suspects: set[str] = set()
    for number in visited:
        known = at_entry[number]
        for flow in parts[number].flows:
            suspects |= {name for name in flow.uses() if not known & bit[name]}
            if flow.instruction.guard is None:
                for name in flow.written:
                    known |= bit[name]
    return iter(sorted(suspects))
