"""Dequantisation of a GGUF matrix, of any format, to float32, bfloat16 or float16."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mla_conformance.kernels.gguf.decode import DECODE, GROUP, as_words, in_groups, table_of
from mla_conformance.kernels.gguf.dequantize_triton import dequantize_kernel
from mla_conformance.kernels.gguf.formats import QuantFormat, find
from mla_conformance.kernels.launch import MAX_GRID_YZ

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Groups a program decodes and the warps it runs on: two groups a lane.
BLOCK_GROUPS = 256
NUM_WARPS = 4

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize(
    data: Tensor, quant: str | int, *, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """The numbers that a matrix of blocks stands for.

    Computed in float32 with ggml's operations in ggml's order, so float32 results have ggml's bits, then rounded once,
    to nearest even, to the wanted dtype; a number too large for float16 becomes infinite.

    Args:
        data: uint8 [..., row_bytes], a whole number of blocks a row, the bytes of a row adjacent, rows at any distance.
        quant: ggml's name or number of the format, such as "Q4_K" or 12.
        dtype: float32, bfloat16 or float16; that of ``out`` by default, and float32 without it.
        out: [..., columns] on the device of ``data``, written and returned; columns adjacent, rows at any one distance.

    Returns:
        [..., columns], contiguous unless it is ``out``.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: ``quant`` is unknown, or a shape, stride or device is wrong.
    """
    fmt = find(quant)
    rows, columns = _check_data(data, fmt)
    shape = (*data.shape[:-1], columns)
    if out is None:
        out = torch.empty(shape, dtype=_check_dtype("dtype", dtype or torch.float32), device=data.device)
    out_rows = _check_out(out, shape, dtype, data)
    if out.numel() == 0:
        return out
    if columns % GROUP:
        # Only plain numbers come in such rows. A copy starts on an aligned address, which a view as numbers needs.
        out_rows.copy_(rows.clone(memory_format=torch.contiguous_format).view(_PLAIN[fmt.name]))
        return out

    blocks = in_groups(fmt)
    words, align, row_units = as_words(rows, blocks)
    num_rows, groups, out_stride = rows.shape[0], columns // GROUP, out_rows.stride(0)
    if rows.is_contiguous() and out_rows.is_contiguous():
        # One long row fills the last program of every row but the last.
        num_rows, groups, row_units, out_stride = 1, num_rows * groups, 0, 0
    table = table_of(fmt, data.device)
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(data):  # type: ignore[no-untyped-call]
        for first_row in range(0, num_rows, MAX_GRID_YZ):
            dequantize_kernel[(triton.cdiv(groups, BLOCK_GROUPS), min(num_rows - first_row, MAX_GRID_YZ))](
                words[first_row:],
                out_rows[first_row:],
                words if table is None else table,
                groups,
                row_units,
                out_stride,
                DECODE=DECODE[fmt.name],
                BLOCK_ELEMENTS=blocks.block_elements,
                BLOCK_BYTES=blocks.block_bytes,
                ALIGN=align,
                BLOCK_GROUPS=BLOCK_GROUPS,
                num_warps=NUM_WARPS,
                # A fused multiply-add would round once where ggml rounds twice.
                enable_fp_fusion=False,
            )
    return out


def _check_data(data: Tensor, fmt: QuantFormat) -> tuple[Tensor, int]:
    """``data`` as [rows, row_bytes], and the columns that a row has."""
    if not isinstance(data, Tensor):
        raise TypeError(f"data must be a uint8 tensor, got {type(data).__name__}")
    if data.dtype != torch.uint8:
        raise TypeError(f"data is {data.dtype}; it must be uint8, the bytes of the blocks: use data.view(torch.uint8)")
    if data.dim() == 0:
        raise ValueError("data has no dimension; it must be [..., row_bytes]")
    row_bytes = data.shape[-1]
    if row_bytes % fmt.block_bytes:
        raise ValueError(
            f"data has rows of {row_bytes} bytes, which is no whole number of {fmt.name} blocks of "
            f"{fmt.block_bytes} bytes; check the type and cut rows only at block edges"
        )
    if row_bytes > 1 and data.stride(-1) != 1:
        raise ValueError(f"data has inner stride {data.stride(-1)}; the bytes of a row must be adjacent: contiguous()")
    rows = data.reshape(data.shape[:-1].numel(), row_bytes)
    return rows, row_bytes // fmt.block_bytes * fmt.block_elements


def _check_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES:
        raise TypeError(f"{name} is {dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    return dtype


def _check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None, data: Tensor) -> Tensor:
    """``out`` as [rows, columns], the same memory."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor, got {type(out).__name__}")
    _check_dtype("out", out.dtype)
    if dtype not in (None, out.dtype):
        raise TypeError(f"out is {out.dtype} but dtype is {dtype}; leave dtype out")
    if out.shape != shape:
        raise ValueError(f"out has shape {list(out.shape)}; it must be {list(shape)}")
    if out.device != data.device:
        raise ValueError(f"out is on {out.device}, data on {data.device}; move them to one device")
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError(f"out has inner stride {out.stride(-1)}; the columns of a row must be adjacent")
    try:
        rows = out.view(out.shape[:-1].numel(), out.shape[-1])
    except RuntimeError:
        raise ValueError(f"out has strides {out.stride()}; its rows must lie at one distance") from None
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        raise ValueError(f"out has rows of {rows.shape[1]} columns at a distance of {rows.stride(0)}; they overlap")
    return rows
