"""PTX types and the NumPy dtypes that hold them (PTX ISA, 5.2)."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mla_conformance.suites.emulator.errors import PTXError

Array: TypeAlias = npt.NDArray[Any]
Mask: TypeAlias = Array | Literal[True]
"""Active lanes of a batch; True stands for all of them, which is the fast path."""

# bf16 values travel as bit patterns: NumPy has no such type.
DTYPES: dict[str, str] = {
    "pred": "?",
    **{
        f"{kind}{bits}": f"{code}{bits // 8}"
        for kind, code in (("s", "i"), ("u", "u"), ("b", "u"))
        for bits in (8, 16, 32, 64)
    },
    "f16": "f2",
    "bf16": "u2",
    "f32": "f4",
    "f64": "f8",
    "tf32": "u4",
}
PACKED: dict[str, str] = {
    "s16x2": "s16",
    "u16x2": "u16",
    "f16x2": "f16",
    "bf16x2": "bf16",
    "f32x2": "f32",
}
"""Types of which one register holds two values."""


def whole(size: int) -> str:
    """A dtype of ``size`` bytes: NumPy scatters one such value many times faster than its bytes."""
    return f"u{size}" if size in (1, 2, 4, 8) else f"V{size}"


def dtype_of(type_: str) -> np.dtype[Any]:
    """The dtype of one value of a PTX type; of one element for a packed type.

    Raises:
        PTXError: no such type.
    """
    found = DTYPES.get(PACKED.get(type_, type_))
    if found is None:
        raise PTXError(f"type .{type_} is not known here")
    return np.dtype(found)


def is_float(type_: str) -> bool:
    """Whether values of the type are floating-point numbers."""
    return PACKED.get(type_, type_) in ("f16", "bf16", "f32", "f64")
