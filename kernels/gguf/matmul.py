"""Tokens times a quantised matrix: ``x @ W.T`` with W as the bytes of a GGUF tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
from torch import Tensor

from mla_conformance.kernels import launch
from mla_conformance.kernels.gguf import matmul_launch
from mla_conformance.kernels.gguf.decode import DECODE, GROUP, as_words, in_groups, table_of
from mla_conformance.kernels.gguf.dequantize import dequantize
from mla_conformance.kernels.gguf.formats import QuantFormat, find
from mla_conformance.kernels.gguf.matmul_triton import matmul_kernel, matmul_merge_kernel

X_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Columns and words of a row are 32-bit in the kernel.
MAX_COLUMNS = 2**28

_PLAIN_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def matmul(x: Tensor, data: Tensor, quant: str | int, *, out: Tensor | None = None) -> Tensor:
    """Multiply tokens with the matrix W that ``data`` stands for, as a linear layer does: ``x @ W.T``.

    One numeric contract at every number of tokens: each number of W is decoded in float32 with ggml's operations and
    rounded once to x's dtype; products are summed in float32; the sum is rounded once to x's dtype. The bytes are
    never rounded to anything else, and x is not rounded at all (llama.cpp's and the vLLM plugin's kernels round it to
    8 bits, and their result jumps where the number of tokens makes them change kernels).

    Up to 16 tokens are multiplied as the bytes are decoded. A token's row then has the same bits whatever the other
    tokens are and however many. For more, W is decoded into a temporary [rows, columns] in x's dtype and multiplied by
    ``torch.matmul``, for which TF32 and sums of less than float32 are switched off during the call if they are on.
    The same call gives the same bits.

    Args:
        x: [..., columns] in float32, bfloat16 or float16; columns adjacent, rows at any distance.
        data: uint8 [rows, row_bytes], whole blocks; the bytes of a row adjacent, rows at any distance.
        quant: ggml's name or number of the format, such as "Q4_K" or 12.
        out: [..., rows] in x's dtype on its device, written and returned; a token's numbers adjacent, tokens at any one
            distance. Must not overlap an input.

    Returns:
        [..., rows] in x's dtype, contiguous unless it is ``out``.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: ``quant`` is unknown, or a shape, stride or device is wrong.
        RuntimeError: Triton has no GPU to compile for.
    """
    fmt = find(quant)
    columns = _check_inputs(x, data, fmt)
    shape = (*x.shape[:-1], data.shape[0])
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    out_rows = _check_out(out, shape, x)
    tokens = x.reshape(-1, columns) if columns else x.new_empty(out_rows.shape[0], 0)
    if out.numel() == 0:
        return out
    if columns == 0:
        out.zero_()
    elif tokens.shape[0] > matmul_launch.MAX_FUSED_TOKENS:
        weights = dequantize(data, quant, dtype=x.dtype)
        with _sums_in_float32():
            torch.matmul(tokens, weights.T, out=out_rows)
    elif columns % GROUP:
        # Only plain numbers come in such rows. Zeros fill them up, which change no sum.
        weights = torch.nn.functional.pad(dequantize(data, quant, dtype=x.dtype), (0, -columns % GROUP))
        padded = torch.nn.functional.pad(tokens, (0, -columns % GROUP))
        _fused(padded, weights.view(torch.uint8), find(_PLAIN_NAMES[x.dtype]), out_rows)
    else:
        _fused(tokens, data, fmt, out_rows)
    return out


def _fused(x: Tensor, data: Tensor, fmt: QuantFormat, out: Tensor) -> None:
    """The kernels' launch, for 1 to 16 tokens, at least one row and whole groups of columns."""
    (tokens, columns), rows = x.shape, data.shape[0]
    blocks = in_groups(fmt)
    words, align, row_units = as_words(data, blocks)
    regular = align == math.gcd(blocks.block_bytes, 16)
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        tables = table_of(fmt, data.device)
        target = launch.current_target()
        config = matmul_launch.matmul_config(target, x.dtype, fmt.name, regular)
        multiprocessors = launch.sm_count(target, x.device)
        splits = matmul_launch.choose_num_splits(config, rows, columns, multiprocessors)
        steps = triton.cdiv(columns, config.step)
        split_steps = triton.cdiv(steps, splits)
        splits = triton.cdiv(steps, split_steps)
        partial = out.unsqueeze(0)
        if splits > 1:
            partial = torch.empty((splits, tokens, rows), dtype=torch.float32, device=x.device)
        matmul_kernel[(triton.cdiv(rows, config.block_n), splits)](
            x,
            words,
            words if tables is None else tables,
            partial,
            tokens,
            rows,
            columns // GROUP,
            split_steps,
            x.stride(0),
            row_units,
            partial.stride(0),
            partial.stride(1),
            DECODE=DECODE[fmt.name],
            LOG2_GROUPS=(blocks.block_elements // GROUP).bit_length() - 1,
            BLOCK_BYTES=blocks.block_bytes,
            ALIGN=align,
            BLOCK_N=config.block_n,
            STEP=config.step,
            RUN=matmul_launch.run(fmt.name, regular),
            EVEN=columns % config.step == 0,
            num_warps=matmul_launch.NUM_WARPS,
            num_stages=1,
            enable_fp_fusion=False,
        )
        if splits > 1:
            matmul_merge_kernel[(triton.cdiv(rows, matmul_launch.MERGE_BLOCK_N), tokens)](
                partial,
                out,
                rows,
                splits,
                out.stride(0),
                BLOCK_N=matmul_launch.MERGE_BLOCK_N,
                num_warps=matmul_launch.MERGE_NUM_WARPS,
            )


@contextmanager
def _sums_in_float32() -> Iterator[None]:
    """Inside, cuBLAS may neither use TF32 nor add in less than float32, whatever the process allows elsewhere.

    The switches are the process's. They are touched only where they are not as needed, and another thread's
    multiplication sees them for as long.
    """
    switches = torch.backends.cuda.matmul
    wanted = {
        "fp32_precision": "ieee",
        "allow_fp16_reduced_precision_reduction": False,
        "allow_bf16_reduced_precision_reduction": False,
        "allow_fp16_accumulation": False,
    }
    found = {name: getattr(switches, name) for name in wanted}
    changed = {name for name in wanted if found[name] != wanted[name]}
    try:
        for name in changed:
            setattr(switches, name, wanted[name])
        yield
    finally:
        for name in changed:
            setattr(switches, name, found[name])


def _check_inputs(x: Tensor, data: Tensor, fmt: QuantFormat) -> int:
    for name, value in (("x", x), ("data", data)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; pass a torch.Tensor")
    if x.dtype not in X_DTYPES:
        raise TypeError(f"x has dtype {x.dtype}; pass {', '.join(map(str, X_DTYPES))}")
    if data.dtype != torch.uint8:
        raise TypeError(f"data has dtype {data.dtype}; pass the bytes of the blocks as torch.uint8")
    if data.dim() != 2:
        raise ValueError(f"data has shape {list(data.shape)}; pass [rows, row_bytes]")
    if data.shape[1] % fmt.block_bytes:
        raise ValueError(
            f"data has rows of {data.shape[1]} bytes, which is no whole number of {fmt.name} blocks of "
            f"{fmt.block_bytes} bytes; pass whole rows"
        )
    if x.dim() < 1:
        raise ValueError("x has no dimension; pass [..., columns]")
    columns = data.shape[1] // fmt.block_bytes * fmt.block_elements
    if columns > MAX_COLUMNS:
        raise ValueError(f"data has rows of {columns} columns; cut them into calls of at most {MAX_COLUMNS}")
    if x.shape[-1] != columns:
        raise ValueError(
            f"x has shape {list(x.shape)}; its last dimension must be {columns}, the columns of data "
            f"({data.shape[1]} bytes of {fmt.name} a row)"
        )
    for name, tensor in (("x", x), ("data", data)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} has strides {tensor.stride()}; its last must be 1: make the last dimension contiguous"
            )
    if data.device != x.device:
        raise ValueError(f"data is on {data.device}, x on {x.device}; move them to one device")
    return columns


def _check_out(out: Tensor, shape: tuple[int, ...], x: Tensor) -> Tensor:
    """``out`` as [tokens, rows]."""
    if not isinstance(out, Tensor):
        raise TypeError(f"out is a {type(out).__name__}; pass a torch.Tensor or None")
    if out.dtype != x.dtype:
        raise TypeError(f"out has dtype {out.dtype}; pass x's, {x.dtype}")
    if out.device != x.device:
        raise ValueError(f"out is on {out.device}, x on {x.device}; move them to one device")
    if out.shape != shape:
        raise ValueError(f"out has shape {list(out.shape)}; pass {list(shape)}")
    if out.numel() == 0:
        return out.reshape(-1, shape[-1]) if shape[-1] else out.new_empty(x.shape[:-1].numel(), 0)
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise ValueError(f"out has strides {out.stride()}; its last must be 1: make the last dimension contiguous")
    try:
        rows = out.view(-1, shape[-1])
    except RuntimeError:
        raise ValueError(
            f"out has strides {out.stride()} for shape {list(shape)}, so its tokens do not lie at one distance; "
            "pass a tensor where they do"
        ) from None
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        raise ValueError(f"out has strides {out.stride()}, so its rows share memory; pass a tensor where they do not")
    return rows
