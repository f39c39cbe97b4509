"""Translation of an entry for one machine: blocks of steps, and how lanes leave a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mla_conformance.suites.emulator.accesses import WARP
from mla_conformance.suites.emulator.builder import Builder, Step
from mla_conformance.suites.emulator.errors import EmulationStopped, PTXError
from mla_conformance.suites.emulator.instructions import matrix
from mla_conformance.suites.emulator.instructions.registry import translate
from mla_conformance.suites.emulator.machine import ALL_THREADS, Machine
from mla_conformance.suites.emulator.ptx import WAITS, Entry, Instruction
from mla_conformance.suites.emulator.types import Mask
from mla_conformance.suites.emulator.undefined import Flow, Part, watch

Exits = list[tuple[int, Mask]]
_JUMPS = ("bra", "brx", "ret", "exit")
_BARRIERS = ("bar", "barrier")
BARRIERS = 16
"""Of a CTA (PTX ISA, 9.7.13.1)."""


@dataclass
class Block:
    """Straight-line steps, then ``leave``: given the mask, which lanes go on in which block."""

    steps: list[Step]
    leave: Callable[[Mask], Exits]


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
        if machine.shared.check:
            watch(parts, self.builder)
        self.blocks = [
            Block([step for flow in part.flows for step in self._steps(flow)], self._leaving(number))
            for number, part in enumerate(parts)
        ]

    def _steps(self, flow: Flow) -> list[Step]:
        return flow.checks + ([] if flow.step is None else [self._guarded(flow.step, flow.instruction)])

    def _translate(self, number: int) -> Part:
        part = Part()
        instructions = self.entry.blocks[number]
        for guarded in instructions:
            if guarded.guard is not None:
                self.builder.start(guarded)
                self.builder.source(guarded.guard, "pred")
        for group in matrix.runs(instructions):
            for one in group[:-1]:
                # The steps of a run are made together; each still counts what it reads and writes.
                translate(self.builder, one)
                part.flows.append(Flow(one, set(self.builder.read), set(self.builder.written)))
            last = group[-1]
            if last.parts[0] in _JUMPS or self._is_barrier(last):
                part.flows.append(Flow(last, set(), set()))
                continue
            step = translate(self.builder, last)
            flow = Flow(last, set(self.builder.read), set(self.builder.written))
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
        self.builder.start(instruction)
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
        return self._place(instruction, instruction.operands[0] if instruction.operands else "")

    def _place(self, instruction: Instruction, label: str) -> int:
        if label not in self.entry.labels:
            raise PTXError(f"PTX line {instruction.line}: no label {label}: `{instruction.text}`")
        return self.entry.labels[label]

    def _successors(self, number: int) -> list[int]:
        last = self.entry.blocks[number][-1] if self.entry.blocks[number] else None
        if last is None or last.parts[0] not in _JUMPS:
            return [number + 1]
        found = [self._target(last)] if last.parts[0] == "bra" else []
        if last.parts[0] == "brx":
            found = self._table(last)
        return [*found, number + 1] if last.guard is not None else found

    def _leaving(self, number: int) -> Callable[[Mask], Exits]:
        last = self.entry.blocks[number][-1] if self.entry.blocks[number] else None
        following = number + 1
        end = len(self.entry.blocks)
        if last is None or (last.parts[0] not in _JUMPS and not self._is_barrier(last)):
            if following == end:
                return self._ending(None)
            if last is not None and last.opcode.startswith(WAITS):
                return self.machine.mbarriers.leaving(last, following)
            return lambda mask: [(following, mask)]
        if self._is_barrier(last):
            return self._barrier(last, following)
        if last.parts[0] == "bra":
            target = self._target(last)
            return (lambda mask: [(target, mask)]) if last.guard is None else self._branch(last, target, following)
        if last.parts[0] == "brx":
            return self._indexed(last)
        return self._ending(last if last.guard is not None else None, following)

    def _table(self, instruction: Instruction) -> list[int]:
        """The blocks that ``brx.idx`` may go to."""
        self.builder.start(instruction)
        if instruction.guard is not None or instruction.operands[1] not in self.entry.jump_tables:
            raise self.builder.unsupported()
        return [self._place(instruction, label) for label in self.entry.jump_tables[instruction.operands[1]]]

    def _indexed(self, instruction: Instruction) -> Callable[[Mask], Exits]:
        """``brx.idx index, table``: an index outside the table is undefined behaviour."""
        targets = self._table(instruction)
        index, machine = self.builder.lanes(instruction.operands[0], "u32"), self.machine

        def leave(mask: Mask) -> Exits:
            active = np.ones(machine.lanes, bool) if mask is True else mask
            wild = active & (index >= len(targets))
            if wild.any():
                raise EmulationStopped(
                    f"PTX line {instruction.line}: {machine.thread(int(np.flatnonzero(wild)[0]))} jumps to entry "
                    f"{int(index[wild][0])} of {len(targets)}: `{instruction.text}`"
                )
            return [(target, active & (index == number)) for number, target in enumerate(targets)]

        return leave

    def _branch(self, instruction: Instruction, target: int, following: int) -> Callable[[Mask], Exits]:
        assert instruction.guard is not None
        self.builder.start(instruction)
        predicate, negated, lanes = (
            self.builder.source(instruction.guard, "pred"),
            instruction.negated,
            self.machine.lanes,
        )

        def leave(mask: Mask) -> Exits:
            taken = ~predicate if negated else predicate
            total: int = lanes
            if mask is not True:
                taken = taken & mask
                total = int(np.count_nonzero(mask))
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
        constant = bool(operands) and all(operand.isdecimal() for operand in operands)
        if instruction.guard is not None or "red" in parts or "cluster" in parts or not constant:
            raise builder.unsupported("barriers: bar.sync and bar.arrive, unguarded, with a constant number")
        barrier = int(operands[0])
        if barrier >= BARRIERS or (len(operands) > 1 and (int(operands[1]) % WARP or not int(operands[1]))):
            raise PTXError(
                f"PTX line {instruction.line}: a barrier's number is below {BARRIERS}, its count of threads a multiple "
                f"of {WARP}: `{instruction.text}`"
            )
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
