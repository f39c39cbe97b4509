"""Arguments of a call in buffers that show what was written, and comparisons of tensors byte for byte."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_conformance.suites.harness.buffers import Buffer
from mla_conformance.suites.harness.op_call import Factory, OpCall

NAN_BYTE = 0xFF
"""Every floating-point dtype reads a run of these as NaN, and an integer as -1 or its largest number."""
OTHER_BYTE = 0x5A
GAP = 24
SPARE_ROWS = 3

Arguments = dict[str, object]


def prepared(
    call: OpCall, factory: Factory, seed: int = 0, layout: str = "contiguous", fill: int = NAN_BYTE
) -> tuple[Arguments, list[Buffer]]:
    """Fresh arguments with guarded buffers of ``layout`` for what is written; every byte of an output is ``fill``."""
    arguments = factory(seed)
    buffers = [_buffer(name, a_tensor(name, arguments[name]), layout, fill) for name in call.written]
    for buffer in buffers:
        if buffer.name in call.updates:
            buffer.view.copy_(a_tensor(buffer.name, arguments[buffer.name]))
        buffer.guard()
    return arguments | {buffer.name: buffer.view for buffer in buffers}, buffers


def a_tensor(name: str, value: object) -> Tensor:
    """``value``.

    Raises:
        TypeError: it is no tensor.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; its factory must make a tensor")
    return value


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    """The tensors among the arguments."""
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def results_of(returned: object) -> dict[str, Tensor]:
    """The tensors that a call returned, each with a name."""
    values = returned if isinstance(returned, tuple | list) else [returned]
    return {f"result {i}": value for i, value in enumerate(values) if isinstance(value, Tensor)}


def storage_bytes(tensor: Tensor) -> Tensor:
    """Every byte of a tensor's allocation."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def element_bytes(tensor: Tensor) -> Tensor:
    """The bytes of each element, along a last dimension."""
    return tensor.contiguous().view(-1).view(torch.uint8).view(*tensor.shape, tensor.element_size())


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both have elements, in one allocation."""
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return one.numel() > 0 and other.numel() > 0 and same


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same bits, except that any NaN is as good as another: copies may go through arithmetic."""
    nan = one.isnan() & other.isnan() if one.is_floating_point() else torch.zeros_like(one, dtype=torch.bool)
    return torch.equal(element_bytes(one)[~nan], element_bytes(other)[~nan])


def where(call: OpCall, *circumstances: str) -> str:
    """How a message begins: the operator and under what circumstances."""
    return ", ".join([call.name, *filter(None, circumstances)])


def _buffer(name: str, like: Tensor, layout: str, fill: int) -> Buffer:
    strides = [math.prod(like.shape[d + 1 :]) for d in range(like.dim())]
    start = 3 if layout == "offset" else 0
    spare = SPARE_ROWS * strides[0] if layout == "padded" else 0
    if layout == "row-strided":
        strides[0] += GAP
    elements = start + like.shape[0] * strides[0] + spare
    storage = torch.empty(elements, dtype=like.dtype, device=like.device)
    storage.view(torch.uint8).fill_(fill)
    return Buffer(name, storage, storage.as_strided(like.shape, strides, start), writable=True)
