"""The instructions, in modules as the PTX manual groups them; importing this package registers them all."""

from mla_conformance.suites.emulator.instructions import (
    async_copy,
    atomics,
    block_scaled,
    calls,
    conversion,
    double_matrix,
    floating,
    integer,
    logic,
    matrix,
    mbarrier,
    memory,
    movement,
    synchronization,
    tensor_copy,
    warp,
)

__all__ = [
    "async_copy",
    "atomics",
    "block_scaled",
    "calls",
    "conversion",
    "double_matrix",
    "floating",
    "integer",
    "logic",
    "matrix",
    "mbarrier",
    "memory",
    "movement",
    "synchronization",
    "tensor_copy",
    "warp",
]
