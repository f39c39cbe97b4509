"""The instructions, in modules as the PTX manual groups them; importing this package registers them all."""

from mla_conformance.suites.emulator.instructions import (
    async_copy,
    atomics,
    conversion,
    floating,
    integer,
    logic,
    matrix,
    memory,
    movement,
    synchronization,
    warp,
)

__all__ = [
    "async_copy",
    "atomics",
    "conversion",
    "floating",
    "integer",
    "logic",
    "matrix",
    "memory",
    "movement",
    "synchronization",
    "warp",
]
