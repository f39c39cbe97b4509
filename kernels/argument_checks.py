"""Checks of single arguments, in the words that every kernel's refusals use. No content is read."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_tensor(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a torch.Tensor")


def check_dtype(name: str, tensor: Tensor, accepted: tuple[torch.dtype, ...]) -> None:
    """Raise TypeError unless the tensor has one of the accepted dtypes."""
    if tensor.dtype not in accepted:
        raise TypeError(f"{name} has dtype {tensor.dtype}; pass {' or '.join(map(str, accepted))}")


def check_rank(name: str, tensor: Tensor, layout: str) -> None:
    """Raise ValueError unless the tensor has as many dimensions as ``layout`` names."""
    if tensor.dim() != layout.count(",") + 1:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; pass {layout}")


def check_size(name: str, what: str, size: int, low: int, high: int, multiple: int = 1) -> None:
    """Raise ValueError unless a size is ``low`` to ``high`` and a multiple of ``multiple``."""
    if not low <= size <= high or size % multiple:
        of = f", a multiple of {multiple}" if multiple > 1 else ""
        raise ValueError(f"{name} has {what} {size}; it must be {low} to {high}{of}")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless the tensor has the shape that the other arguments need."""
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; the other arguments need {list(expected)}")


def check_last_stride(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the last dimension is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; its last must be 1: make the last dimension contiguous"
        )


def check_no_overlap(name: str, tensor: Tensor) -> None:
    """Raise ValueError if two elements of the tensor may share memory."""
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < reach:
            raise ValueError(
                f"{name} has strides {tensor.stride()} for shape {list(tensor.shape)}, so elements share memory; "
                "pass a tensor with memory of its own for each"
            )
        reach += stride * (size - 1)


def check_one_device(tensors: dict[str, Tensor]) -> None:
    """Raise ValueError unless all tensors are where the first is."""
    first, at = next((name, tensor.device) for name, tensor in tensors.items())
    for name, tensor in tensors.items():
        if tensor.device != at:
            raise ValueError(f"{name} is on {tensor.device}, {first} on {at}; move them to one device")


def check_k_scale(k_scale: float | Tensor | None) -> None:
    """Raise TypeError or ValueError unless the scale of a cache is None, a right number, or one float32 element."""
    if isinstance(k_scale, Tensor):
        check_dtype("k_scale", k_scale, (torch.float32,))
        if k_scale.numel() != 1:
            raise ValueError(f"k_scale has shape {list(k_scale.shape)}; pass one element, the scale of the cache")
    elif k_scale is not None:
        check_scale("k_scale", k_scale)


def check_scale(name: str, value: float) -> None:
    """Raise TypeError or ValueError unless ``value`` is a positive normal float32, at most 1e38."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        accepted = "a float or a float32 tensor" if name == "k_scale" else "a float"
        raise TypeError(f"{name} is {value!r}; pass {accepted}")
    if not (math.isfinite(value) and torch.finfo(torch.float32).tiny <= value <= 1e38):
        raise ValueError(f"{name} is {value}; it must be positive and a normal float32, at most 1e38")
