"""Targets: what a named GPU architecture lets one block use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """The budget of one architecture.

    Args:
        name: such as ``sm_120``.
        capability: compute capability times ten, as Triton names it.
        shared_bytes: the most shared memory one block may opt in to (CUDA C++ Programming Guide, table of
            technical specifications: 227 KB for 9.0 and 10.0, 99 KB for 12.0 and 12.1).
        registers: the most registers one thread may use.
        multiprocessors: of the reference card, for launchers that size their grid by it.
        card: that card.
        foreign_instructions: matrix instructions that it lacks (PTX ISA, target notes of ``wgmma.mma_async`` and
            ``tcgen05.mma``).
    """

    name: str
    capability: int
    shared_bytes: int
    registers: int
    multiprocessors: int
    card: str
    foreign_instructions: tuple[str, ...]


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", 80, 166_912, 255, 108, "A100", ("wgmma", "tcgen05")),
        Target("sm_89", 89, 101_376, 255, 142, "L40S", ("wgmma", "tcgen05")),
        Target("sm_90", 90, 232_448, 255, 132, "H200", ("tcgen05",)),
        Target("sm_100", 100, 232_448, 255, 148, "B200", ("wgmma",)),
        Target("sm_120", 120, 101_376, 255, 188, "RTX PRO 6000", ("wgmma", "tcgen05")),
        Target("sm_121", 121, 101_376, 255, 48, "DGX Spark", ("wgmma", "tcgen05")),
    )
}
