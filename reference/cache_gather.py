"""Rows of cached context gathered request by request; the oracle of the cache-gathering kernels.

Nothing here converts through a float8 dtype: values are computed from the definition of e4m3 in float64, where a
product of an e4m3 number and a float32 is exact.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

DS_MLA_LATENT = 512
DS_MLA_ROPE_START = 528
GROUP = 128


def gather_rows(
    kv_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    seq_starts: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
) -> None:
    """Write row i of request b's chunk to ``out[cu_seqlens[b] + i]``, in place; other rows are left alone.

    Args:
        kv_cache: [num_pages, page_size, width], in out's dtype (bits are copied), float8_e4m3fn (elements times
            k_scale) or uint8 (vLLM's ``fp8_ds_mla``, see :func:`ds_mla_values`).
        block_table: [batch, entries] page numbers.
        cu_seqlens: [batch + 1], where each request starts in ``out``.
        out: [rows, width], bfloat16, float16 or float32.
        seq_starts: [batch], the first position of each request; None is 0.
        k_scale: what one unit of a float8_e4m3fn cache is worth, a float32.

    Raises:
        ValueError: a position that is asked for has no entry in the table, or its page is not in the cache.

    """
    num_pages, page_size, _ = kv_cache.shape
    scale = float(torch.as_tensor(k_scale, dtype=torch.float32))
    ends = cu_seqlens.tolist()
    starts = [0] * (len(ends) - 1) if seq_starts is None else seq_starts.tolist()
    for request, (begin, end) in enumerate(itertools.pairwise(ends)):
        for row in range(begin, end):
            entry, position = divmod(starts[request] + row - begin, page_size)
            if not 0 <= entry < block_table.shape[1]:
                raise ValueError(f"request {request} has no page for its row {row - begin}: entry {entry}")
            page = int(block_table[request, entry])
            if not 0 <= page < num_pages:
                raise ValueError(f"request {request} names page {page}; the cache has {num_pages}")
            stored = kv_cache[page, position]
            if kv_cache.dtype == torch.uint8:
                out[row] = ds_mla_values(stored)
            elif kv_cache.dtype == torch.float8_e4m3fn:
                out[row] = _scaled(stored.view(torch.uint8), scale).to(out.dtype)
            else:
                out[row] = stored


def ds_mla_values(row: Tensor) -> Tensor:
    """Return a row of ``fp8_ds_mla`` as bfloat16 [576]; a scale may be any float32, not only a power of two.

    Args:
        row: uint8 [656]: 512 e4m3 codes, a float32 scale for each 128 of them, 64 bfloat16.

    """
    scales = row[DS_MLA_LATENT:DS_MLA_ROPE_START].clone().view(torch.float32)
    groups = torch.split(row[:DS_MLA_LATENT], GROUP)
    latent = [_scaled(group, float(scale)).bfloat16() for group, scale in zip(groups, scales, strict=True)]
    return torch.cat((*latent, row[DS_MLA_ROPE_START:].clone().view(torch.bfloat16)))


def e4m3_values(codes: Tensor) -> Tensor:
    """Return what e4m3 codes (uint8) mean, in float64.

    One bit of sign, four of exponent with bias 7, three of mantissa; exponent 0 is subnormal, and the code with all
    of its other bits set is NaN (OCP 8-bit floating point specification, section 5.1).
    """
    codes = codes.long()
    exponent, mantissa = codes // 8 % 16, (codes % 8).double()
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7).double()
    magnitude = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values = torch.where(codes >= 128, -magnitude, magnitude)
    return torch.where(codes % 128 == 127, torch.nan, values)


def _scaled(codes: Tensor, scale: float) -> Tensor:
    """The float32 product, correctly rounded: float64 holds the exact one."""
    return (e4m3_values(codes) * scale).float()
