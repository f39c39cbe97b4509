"""Gathering the cached rows of a chunk of context from a paged latent cache, from three row formats."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mla_conformance.kernels import ds_mla, launch
from mla_conformance.kernels.argument_checks import (
    check_dtype,
    check_k_scale,
    check_last_stride,
    check_no_overlap,
    check_one_device,
    check_rank,
    check_shape,
    check_size,
    check_tensor,
)
from mla_conformance.kernels.kv_cache_gather_triton import gather_kv_cache_kernel

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
MAX_WIDTH = 2048
MAX_ROWS = 2**31 - 1
"""CUDA's limit for the first axis of a grid."""


def gather_kv_cache(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    *,
    out: Tensor,
    seq_starts: Tensor | None = None,
    k_scale: float | Tensor | None = None,
) -> Tensor:
    """Write a chunk of each request's cached rows, one request behind the other, into ``out``.

    Row ``cu_seqlens[b] + i`` of ``out``, for i below ``cu_seqlens[b + 1] - cu_seqlens[b]``, is the row at position
    ``p = seq_starts[b] + i`` of request b: ``kv_cache[block_table[b, p // page_size], p % page_size]``. A start need
    not be a multiple of the page size. Everything is read on the device only, so the host does not wait.

    The cache's dtype says what a row holds:

    * out's dtype: its bits are copied.
    * float8_e4m3fn: each element times k_scale, a float32 product, rounded once to out's dtype. NaN stays NaN.
    * uint8 with rows of 656 (vLLM's ``fp8_ds_mla``, see :func:`mla_conformance.kernels.kv_cache.write_kv_cache`): each
      e4m3 element times the float32 scale of its group, whatever that scale is, a float32 product, rounded once to
      bfloat16; the bits of the rotary part are copied.

    Rows of ``out`` that no request has, in particular those from ``cu_seqlens[-1]`` on, are left as they were. A row
    becomes NaN throughout, and harms no other, if its position lies outside the block table or its page number outside
    ``[0, num_pages)``; neither the table nor the cache is read out of bounds. If ``cu_seqlens[-1]`` exceeds the rows
    of ``out``, those that fit are written.

    Args:
        kv_cache: [num_pages, page_size, width]: width 1 to 2048, or 656 for uint8. Last stride 1, others free; for
            uint8 rows start at multiples of 4 bytes.
        block_table: [batch, entries] int32 or int64 page numbers, any strides. Only entries that a request's positions
            reach are read.
        cu_seqlens: [batch + 1] int32 or int64, any stride: where each request starts in ``out``; never decreasing,
            which is not checked.
        out: [rows, width] in bfloat16, float16 or float32, written in place; [rows, 576] bfloat16 for a uint8 cache.
            Last stride 1, the other free, without overlap. Must not overlap another argument.
        seq_starts: [batch] int32 or int64, any stride: the first position of each request; None is 0.
        k_scale: What one unit of an e4m3 cache is worth, latent and rotary alike: positive, a float or one float32
            element on the device (whose value is not checked). None is 1. Ignored for another cache dtype.

    Returns:
        ``out``.

    Raises:
        TypeError: An argument has the wrong Python type or dtype.
        ValueError: An argument has a wrong shape, stride, device or value, or the GPU cannot read e4m3.
        RuntimeError: Triton has no GPU to compile for.
    """
    _check(kv_cache, block_table, cu_seqlens, out, seq_starts, k_scale)
    if out.shape[0] > 0 and block_table.shape[0] > 0:
        # Triton launches on the current device, which need not be the tensors'.
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            _launch(kv_cache, block_table, cu_seqlens, out, seq_starts, k_scale)
    return out


def _launch(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    seq_starts: Tensor | None,
    k_scale: float | Tensor | None,
) -> None:
    target = launch.current_target()
    row_format = {torch.float8_e4m3fn: "e4m3", torch.uint8: "grouped"}.get(kv_cache.dtype, "same")
    if row_format != "same" and not launch.supports_fp8_cache(target):
        raise ValueError(f"kv_cache is {kv_cache.dtype}, whose e4m3 {target} cannot read; use out's dtype there")
    # Bits that are copied travel as integers, so that no NaN changes on the way.
    if row_format == "same":
        bits = torch.int32 if out.dtype == torch.float32 else torch.int16
        kv_cache, out = kv_cache.view(bits), out.view(bits)
    elif row_format == "e4m3":
        kv_cache = kv_cache.view(torch.uint8)
    scale = 1.0 if k_scale is None or row_format != "e4m3" else k_scale
    scale_on_device = isinstance(scale, Tensor)
    rows, width = out.shape
    batch, entries = block_table.shape
    gather_kv_cache_kernel[(rows,)](
        kv_cache,
        block_table,
        cu_seqlens,
        seq_starts,
        scale if scale_on_device else None,
        out,
        1.0 if scale_on_device else float(scale),
        batch,
        (batch - 1).bit_length(),
        kv_cache.shape[0],
        entries,
        *kv_cache.stride()[:2],
        *block_table.stride(),
        cu_seqlens.stride(0),
        0 if seq_starts is None else seq_starts.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        LATENT=ds_mla.LATENT,
        ROPE=ds_mla.ROPE,
        PAGE_SIZE=kv_cache.shape[1],
        FORMAT=row_format,
        num_warps=4,
    )


def _check(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    seq_starts: Tensor | None,
    k_scale: float | Tensor | None,
) -> None:
    tensors = {"kv_cache": kv_cache, "block_table": block_table, "cu_seqlens": cu_seqlens, "out": out}
    if seq_starts is not None:
        tensors["seq_starts"] = seq_starts
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    if isinstance(k_scale, Tensor):
        tensors["k_scale"] = k_scale
    check_one_device(tensors)

    check_dtype("out", out, OUT_DTYPES)
    check_rank("out", out, "[rows, width]")
    check_size("out", "rows", out.shape[0], 0, MAX_ROWS)
    check_dtype("kv_cache", kv_cache, (out.dtype, torch.float8_e4m3fn, torch.uint8))
    check_rank("kv_cache", kv_cache, "[num_pages, page_size, width]")
    if kv_cache.shape[1] < 1:
        raise ValueError(f"kv_cache has page_size {kv_cache.shape[1]}; it must be 1 or more")
    for name in ("kv_cache", "out"):
        check_last_stride(name, tensors[name])
    check_no_overlap("out", out)
    if kv_cache.dtype == torch.uint8:
        check_dtype("out", out, (torch.bfloat16,))
        check_shape("out", out, (out.shape[0], ds_mla.LATENT + ds_mla.ROPE))
        ds_mla.check_ds_mla_cache(kv_cache)
    else:
        check_size("kv_cache", "width", kv_cache.shape[2], 1, MAX_WIDTH)
        check_shape("out", out, (out.shape[0], kv_cache.shape[2]))

    check_dtype("block_table", block_table, INDEX_DTYPES)
    check_rank("block_table", block_table, "[batch, entries]")
    batch = block_table.shape[0]
    check_dtype("cu_seqlens", cu_seqlens, INDEX_DTYPES)
    check_rank("cu_seqlens", cu_seqlens, "[batch + 1]")
    check_shape("cu_seqlens", cu_seqlens, (batch + 1,))
    if seq_starts is not None:
        check_dtype("seq_starts", seq_starts, INDEX_DTYPES)
        check_rank("seq_starts", seq_starts, "[batch]")
        check_shape("seq_starts", seq_starts, (batch,))
    check_k_scale(k_scale)
