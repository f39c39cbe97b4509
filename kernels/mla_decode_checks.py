"""What ``mla_decode`` refuses, and the sizes of what it accepts. No content is read, so no GPU is waited for."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mla_conformance.kernels import launch

Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
# Token positions and split boundaries are 32-bit in the kernels, with room to add a split.
MAX_TOKENS = 2**30


class MlaDecodeShape(NamedTuple):
    """Sizes of an accepted call: counts, except for the two dims, which are elements of a cache row."""

    batch: int
    heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int
    max_tokens: int


def check_mla_decode(
    q_nope: Tensor,
    q_pe: Tensor | None,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    k_scale: float | Tensor | None,
    num_splits: int | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> MlaDecodeShape:
    """Check the arguments of ``mla_decode``; see there for what each must be.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: An argument has a wrong shape, stride, device or value.
    """
    tensors = {"q_nope": q_nope, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    optional = {"q_pe": q_pe, "out": out, "lse": lse}
    tensors.update({name: tensor for name, tensor in optional.items() if tensor is not None})
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    if isinstance(k_scale, Tensor):
        tensors["k_scale"] = k_scale
    for name, tensor in tensors.items():
        if tensor.device != q_nope.device:
            raise ValueError(f"{name} is on {tensor.device}, q_nope on {q_nope.device}; move them to one device")

    _check_dtype("q_nope", q_nope, Q_DTYPES)
    _check_dtype("kv_cache", kv_cache, (q_nope.dtype, torch.float8_e4m3fn))
    _check_dtype("block_table", block_table, INDEX_DTYPES)
    _check_dtype("seq_lens", seq_lens, INDEX_DTYPES)

    _check_rank("q_nope", q_nope, "[batch, heads, kv_lora_rank]")
    batch, heads, kv_lora_rank = q_nope.shape
    _check_size("q_nope", "heads", heads, 1, 128)
    _check_size("q_nope", "kv_lora_rank", kv_lora_rank, 64, 512, multiple=16)
    if batch > launch.MAX_GRID_YZ:
        raise ValueError(f"q_nope has {batch} rows; split the batch into calls of at most {launch.MAX_GRID_YZ}")

    rope_dim = 0
    if q_pe is not None:
        _check_dtype("q_pe", q_pe, (q_nope.dtype,))
        _check_rank("q_pe", q_pe, "[batch, heads, qk_rope_head_dim]")
        rope_dim = q_pe.shape[2]
        _check_size("q_pe", "qk_rope_head_dim", rope_dim, 0, 64, multiple=16)
        _check_shape("q_pe", q_pe, (batch, heads, rope_dim))

    _check_rank("kv_cache", kv_cache, "[num_pages, page_size, kv_lora_rank + qk_rope_head_dim]")
    num_pages, page_size = kv_cache.shape[:2]
    _check_size("kv_cache", "page_size", page_size, 1, 128)
    _check_shape("kv_cache", kv_cache, (num_pages, page_size, kv_lora_rank + rope_dim))

    _check_rank("block_table", block_table, "[batch, width]")
    _check_shape("block_table", block_table, (batch, block_table.shape[1]))
    _check_shape("seq_lens", seq_lens, (batch,))
    max_tokens = block_table.shape[1] * page_size
    if max_tokens > MAX_TOKENS:
        raise ValueError(
            f"block_table of width {block_table.shape[1]} with pages of {page_size} names {max_tokens} tokens a row; "
            f"pass the columns in use, at most {MAX_TOKENS} tokens"
        )

    for name in ("q_nope", "q_pe", "kv_cache", "out"):
        if name in tensors:
            _check_last_stride(name, tensors[name])
    if out is not None:
        _check_dtype("out", out, (q_nope.dtype, torch.float32))
        _check_shape("out", out, (batch, heads, kv_lora_rank))
        _check_no_overlap("out", out)
    if lse is not None:
        _check_dtype("lse", lse, (torch.float32,))
        _check_shape("lse", lse, (batch, heads))
        _check_no_overlap("lse", lse)

    _check_scale("softmax_scale", softmax_scale)
    if isinstance(k_scale, Tensor):
        _check_dtype("k_scale", k_scale, (torch.float32,))
        if k_scale.numel() != 1:
            raise ValueError(f"k_scale has shape {list(k_scale.shape)}; pass one element, the scale of the cache")
    elif k_scale is not None:
        _check_scale("k_scale", k_scale)
    if num_splits is not None:
        if isinstance(num_splits, bool) or not isinstance(num_splits, int):
            raise TypeError(f"num_splits is {num_splits!r}; pass an int, or None to have it chosen")
        if num_splits < 1:
            raise ValueError(f"num_splits is {num_splits}; pass 1 or more, or None to have it chosen")
    return MlaDecodeShape(batch, heads, kv_lora_rank, rope_dim, page_size, max_tokens)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a torch.Tensor")


def _check_dtype(name: str, tensor: Tensor, accepted: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in accepted:
        raise TypeError(f"{name} has dtype {tensor.dtype}; pass {' or '.join(map(str, accepted))}")


def _check_rank(name: str, tensor: Tensor, layout: str) -> None:
    if tensor.dim() != layout.count(",") + 1:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; pass {layout}")


def _check_size(name: str, what: str, size: int, low: int, high: int, multiple: int = 1) -> None:
    if not low <= size <= high or size % multiple:
        of = f", a multiple of {multiple}" if multiple > 1 else ""
        raise ValueError(f"{name} has {what} {size}; it must be {low} to {high}{of}")


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; the other arguments need {list(expected)}")


def _check_last_stride(name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; its last must be 1: make the last dimension contiguous"
        )


def _check_no_overlap(name: str, tensor: Tensor) -> None:
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < reach:
            raise ValueError(
                f"{name} has strides {tensor.stride()} for shape {list(tensor.shape)}, so elements share memory; "
                "pass a tensor with memory of its own for each"
            )
        reach += stride * (size - 1)


def _check_scale(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        accepted = "a float or a float32 tensor" if name == "k_scale" else "a float"
        raise TypeError(f"{name} is {value!r}; pass {accepted}")
    if not (math.isfinite(value) and torch.finfo(torch.float32).tiny <= value <= 1e38):
        raise ValueError(f"{name} is {value}; it must be positive and a normal float32, at most 1e38")
