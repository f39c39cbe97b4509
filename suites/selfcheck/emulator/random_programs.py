"""Random small programs over shared memory: as PTX, and as what the oracle says of them."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from mla_conformance.suites.emulator import Kind

from .one_instruction import HEADER
from .oracle import WARP, Access, Found, Oracle

THREADS = 64
SHARED_BYTES = 1024
IDLE = -1
WIDTHS = {"read": (1, 2, 4, 8, 16), "write": (1, 2, 4, 8, 16), "atomic": (4,), "copy": (4, 8, 16)}
STORED = {1: "b8", 2: "b16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}
FEW = (0, 1, 2, 31, 32, 33, 63)
"""Lanes at the ends of both warps, of which most operations take some."""


@dataclass(frozen=True)
class Operation:
    """One instruction of every iteration.

    Args:
        what: read, write, atomic, copy, commit, wait, wait_all, barrier or warp_barrier.
        where: [ctas][threads] the first byte that a thread accesses, or 0 where it takes part; IDLE where it does not.
        width: bytes that an access has.
        number: groups that a wait leaves; for a write, whether each thread stores its own number.
    """

    what: str
    where: list[list[int]]
    width: int = 0
    number: int = 0

    @property
    def guarded(self) -> bool:
        """Whether some thread of the grid stays away."""
        return any(IDLE in row for row in self.where)


@dataclass
class Program:
    """Operations that each CTA repeats as often as ``iterations`` says."""

    operations: list[Operation]
    iterations: list[int]
    lines: list[int] = field(default_factory=list)
    """The PTX line of each operation; filled by :meth:`ptx`."""

    def ptx(self) -> str:
        """The text of an entry with the arguments of :meth:`arguments`."""
        body = [
            ".reg .b32 %tid, %cta, %i, %n, %a, %x, %smem; .reg .b64 %tab, %at, %src; .reg .pred %p, %more;",
            ".reg .b32 %v<4>; .reg .b16 %h;",
            "mov.u32 %tid, %tid.x; mov.u32 %cta, %ctaid.x; mov.b32 %smem, global_smem; mov.u32 %i, 0;",
            "ld.param.b64 %src, [p2]; ld.param.b64 %at, [p1];",
            "mad.wide.s32 %at, %cta, 4, %at; ld.global.b32 %n, [%at];",
            f"mad.lo.s32 %x, %cta, {len(self.operations) * THREADS}, %tid; ld.param.b64 %tab, [p0];",
            "mad.wide.s32 %tab, %x, 4, %tab;",
            "LOOP:",
        ]
        head = f"{HEADER}.extern .shared .align 16 .b8 global_smem[];\n.visible .entry program(\n.param .u64 p0,\n"
        head += f".param .u64 p1,\n.param .u64 p2\n)\n.reqntid {THREADS}\n{{\n"
        self.lines = []
        for index, operation in enumerate(self.operations):
            body.append(
                f"ld.global.b32 %a, [%tab+{4 * THREADS * index}]; setp.ge.s32 %p, %a, 0; add.s32 %a, %a, %smem;"
            )
            if operation.what == "write":
                body.append(f"mov.b32 %x, {'%tid' if operation.number else 7}; cvt.u16.u32 %h, %x;")
            self.lines.append(head.count("\n") + len(body) + 1)
            body.append(("@%p " if operation.guarded else "") + _text(operation))
        body += ["add.s32 %i, %i, 1; setp.lt.s32 %more, %i, %n; @%more bra LOOP;", "ret;", "}"]
        return head + "\n".join(body) + "\n"

    def arguments(self) -> list[torch.Tensor]:
        """The table of addresses [ctas, operations, threads], the iterations [ctas], and what is copied."""
        table = [[operation.where[cta] for operation in self.operations] for cta in range(len(self.iterations))]
        return [
            torch.tensor(table, dtype=torch.int32),
            torch.tensor(self.iterations, dtype=torch.int32),
            torch.zeros(4, dtype=torch.int32),
        ]

    def judged(self) -> Found:
        """What the oracle finds: kinds and PTX lines."""
        found: Found = set()
        for cta in range(len(self.iterations)):
            threads = _Copies(self, Oracle(found))
            for _ in range(self.iterations[cta]):
                for line, operation in zip(self.lines, self.operations, strict=True):
                    threads.execute(line, operation, operation.where[cta])
            threads.finish()
        return found


def _text(operation: Operation) -> str:
    values = {1: "%h", 2: "%h", 4: "%x", 8: "{%x, %x}", 16: "{%x, %x, %x, %x}"}
    loaded = {1: "%h", 2: "%h", 4: "%v0", 8: "{%v0, %v1}", 16: "{%v0, %v1, %v2, %v3}"}
    width = operation.width
    return {
        "read": lambda: f"ld.shared.{STORED[width]} {loaded[width]}, [%a];",
        "write": lambda: f"st.shared.{STORED[width]} [%a], {values[width]};",
        "atomic": lambda: "atom.shared.add.u32 %v0, [%a], 1;",
        "copy": lambda: f"cp.async.ca.shared.global [%a], [%src], {width};",
        "commit": lambda: "cp.async.commit_group;",
        "wait": lambda: f"cp.async.wait_group {operation.number};",
        "wait_all": lambda: "cp.async.wait_all;",
        "barrier": lambda: "bar.sync 0;",
        "warp_barrier": lambda: "bar.warp.sync -1;",
    }[operation.what]()


class _Copies:
    """Execution of one CTA's operations by the oracle, with each thread's groups of copies."""

    def __init__(self, program: Program, oracle: Oracle) -> None:
        self.oracle = oracle
        self.groups: defaultdict[int, list[list[tuple[Access, int]]]] = defaultdict(list)
        self.open: defaultdict[int, list[tuple[Access, int]]] = defaultdict(list)

    def execute(self, line: int, operation: Operation, where: list[int]) -> None:
        threads = [thread for thread in range(THREADS) if where[thread] != IDLE]
        accesses = [(thread, where[thread], operation.width) for thread in threads]
        match operation.what:
            case "read":
                self.oracle.read(line, accesses)
            case "write":
                self.oracle.write(line, accesses)
                starts = [where[thread] for thread in threads]
                if operation.number and len(set(starts)) < len(starts):
                    self.oracle.found.add((Kind.UNEQUAL_LANES, line))
            case "atomic":
                self.oracle.atomic(line, accesses)
            case "copy":
                self.oracle.issue(line, accesses)
                for access in accesses:
                    self.open[access[0]].append((access, line))
            case "commit":
                for thread in threads:
                    self.groups[thread].append(self.open.pop(thread, []))
            case "wait" | "wait_all":
                for thread in threads:
                    self._wait(thread, operation)
            case "barrier":
                self.oracle.barrier()
            case "warp_barrier":
                for warp in {thread // WARP for thread in threads}:
                    self.oracle.warp_barrier(warp)

    def _wait(self, thread: int, operation: Operation) -> None:
        if operation.what == "wait_all":
            self.groups[thread].append(self.open.pop(thread, []))
        done = max(0, len(self.groups[thread]) - operation.number)
        for group in self.groups[thread][:done]:
            self.oracle.land(access for access, _ in group)
        # A group stays counted when it is done: only the youngest are left out of a wait.
        self.groups[thread][:done] = [[]] * done

    def finish(self) -> None:
        """Note the copies that nobody waited for."""
        for groups in (*self.groups.values(), *([group] for group in self.open.values())):
            for group in groups:
                self.oracle.found.update((Kind.PENDING_AT_EXIT, line) for _, line in group)


def random_program(draw: random.Random, operations: int = 12) -> Program:
    """A program for one to three CTAs; how often they meet at barriers differs from program to program."""
    ctas = draw.choice((1, 2, 2, 3))
    calm = draw.random()
    weights = {"read": 4, "write": 3, "atomic": 0.5, "copy": 2, "commit": 2, "wait": 1.5, "wait_all": 0.3}
    weights |= {"barrier": 8 * calm, "warp_barrier": 4 * draw.random()}
    space = draw.choice((16, 32, 64))
    made = [
        _random_operation(draw, draw.choices(list(weights), list(weights.values()))[0], ctas, space)
        for _ in range(draw.randint(2, operations))
    ]
    return Program(made, [draw.randint(1, 3) for _ in range(ctas)])


def _random_operation(draw: random.Random, what: str, ctas: int, space: int) -> Operation:
    everyone = [[0] * THREADS for _ in range(ctas)]
    if what == "barrier":
        return Operation(what, everyone)
    if what == "warp_barrier":
        kind = draw.random()
        warps = [[draw.random() < 0.5 for _ in range(THREADS // WARP)] for _ in range(ctas)]
        where = [[0 if row[t // WARP] else IDLE for t in range(THREADS)] for row in warps]
        return Operation(what, everyone if kind < 0.5 else where)
    if what in ("commit", "wait", "wait_all"):
        some = [[0 if draw.random() < 0.7 else IDLE for _ in range(THREADS)] for _ in range(ctas)]
        return Operation(
            what, everyone if draw.random() < 0.7 else some, number=draw.choice((0, 0, 1, 2)) * (what == "wait")
        )
    width = draw.choice(WIDTHS[what])
    if draw.random() < 0.3:
        # All lanes, each its own place or shared with neighbours, shifted from operation to operation.
        spread, shift = 1 if what == "copy" else draw.choice((1, 1, 2, 32)), draw.choice((0, 0, 1, 32))
        row = [(thread // spread + shift) * width % SHARED_BYTES for thread in range(THREADS)]
        where = [list(row) for _ in range(ctas)]
    else:
        where = [[IDLE] * THREADS for _ in range(ctas)]
        for row in where:
            threads = draw.sample(FEW, draw.choice((1, 1, 1, 2, 3)))
            # The lanes of one copy have destinations of their own, as any program's must.
            slots = range(space // width)
            chosen = draw.sample(slots, min(len(slots), len(threads))) if what == "copy" else draw.choices(slots, k=3)
            for thread, slot in zip(threads, chosen, strict=False):
                row[thread] = slot * width
    return Operation(what, where, width, number=int(draw.random() < 0.3) * (what == "write"))
