"""What a launcher passes for host-side tensor descriptors, and the scratch memory of device-side ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mla_conformance.suites.emulator.errors import UnsupportedInstruction
from mla_conformance.suites.emulator.tensormaps import HostTensorMap

_SKEW = 256
_TF32 = 11
_UNWRITTEN = 0xFF


def kernel_arguments(kernel: Any, bound: dict[str, Any]) -> list[Any]:
    """The arguments of a launch, in the order of the entry's parameters and without Triton's scratch pointers.

    Args:
        kernel: Triton's compiled kernel.
        bound: the launch's arguments by name.

    Raises:
        UnsupportedInstruction: a descriptor that converts or unpacks while it copies.
    """
    maps = iter(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    found: list[Any] = []
    for name, type_ in kernel.src.signature.items():
        if type_ != "constexpr":
            found += _flattened(name, type_, bound[name], maps)
    return found


def _flattened(name: str, type_: Any, value: Any, maps: Iterator[Any]) -> Iterator[Any]:
    """The parameters that one argument becomes; a tuple becomes those of its elements."""
    if isinstance(type_, tuple):
        for index, (inner, element) in enumerate(zip(type_, value, strict=True)):
            yield from _flattened(f"{name}.{index}", inner, element, maps)
    elif str(type_).startswith("tensordesc"):
        yield from _descriptor(name, value, next(maps, None))
    elif type_ != "constexpr":
        yield value


def _descriptor(name: str, descriptor: Any, layout: Any) -> Iterator[Any]:
    """One descriptor: its tensor map, or without TMA its parts, then shape and strides once more."""
    shape, strides = list(descriptor.shape), list(descriptor.strides)
    rounds = getattr(descriptor, "round_f32_to_tf32", None)
    nan_fill = descriptor.padding == "nan"
    if layout is None:
        yield from (descriptor.base, *shape, *strides, int(nan_fill))
        if rounds is not None:
            yield int(rounds)
    else:
        if layout["fp4_padded"] or layout.get("is_im2col", False):
            raise UnsupportedInstruction(f"descriptor {name}: padded 4-bit elements or an im2col map")
        yield HostTensorMap(
            base=descriptor.base,
            shape=tuple(shape),
            strides=tuple(strides),
            box=tuple(layout["block_size"]),
            element=_TF32 if rounds else layout["elem_type"],
            element_bytes=layout["elem_size"],
            swizzle=layout["swizzle"],
            nan_fill=nan_fill,
        )
    yield from (*shape, *strides)


def global_scratch(kernel: Any, ctas: int) -> Any:
    """Scratch memory for a grid: a tensor aligned as the kernel asks, or 0 if it needs none."""
    size = (getattr(kernel.metadata, "global_scratch_size", 0) or 0) * ctas
    if not size:
        return 0
    whole = torch.full((size + _SKEW,), _UNWRITTEN, dtype=torch.uint8)
    align = max(1, int(kernel.metadata.global_scratch_align))
    start = -whole.data_ptr() % align
    return whole[start : start + size]
