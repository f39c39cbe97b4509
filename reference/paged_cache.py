"""The paged KV cache: where the row of a token lies, and how rows get in and out.

A cache is [num_pages, page_size, width]. Token t of a request lies in page `block_table_row[t // page_size]`,
at slot `t % page_size`. For MLA a row is the latent followed by the rotated key (latent first).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def gather(kv_cache: Tensor, block_table_row: Tensor, seq_len: int) -> Tensor:
    """Read the rows of one request as one contiguous tensor.

    Args:
        kv_cache: [num_pages, page_size, width], any dtype.
        block_table_row: [max_pages] page numbers of this request; entries past the length may hold anything.
        seq_len: number of tokens; 0 gives an empty tensor.

    Returns:
        [seq_len, width] in the dtype of the cache, a copy.

    Raises:
        ValueError: if the length is negative or needs more pages than the row has, or if a page number in use
            is out of range.

    """
    pages, slots = _locate(kv_cache, block_table_row, seq_len)
    return kv_cache[pages, slots]


def scatter(kv_cache: Tensor, block_table_row: Tensor, rows: Tensor) -> None:
    """Write the rows of one request into its pages, in place, leaving every other slot as it was.

    Args:
        kv_cache: [num_pages, page_size, width], changed in place.
        block_table_row: [max_pages] page numbers of this request.
        rows: [seq_len, width] in the dtype of the cache, so that no rounding happens here.

    Raises:
        ValueError: as `gather`, and if the width or the dtype of the rows is not the cache's.

    """
    if rows.dim() != 2 or rows.shape[1] != kv_cache.shape[-1] or rows.dtype != kv_cache.dtype:
        raise ValueError(
            f"rows is {list(rows.shape)} {rows.dtype}; this cache takes [tokens, {kv_cache.shape[-1]}] {kv_cache.dtype}"
        )
    pages, slots = _locate(kv_cache, block_table_row, rows.shape[0])
    kv_cache[pages, slots] = rows


def build(
    rows: Sequence[Tensor], block_table: Tensor, *, num_pages: int, page_size: int, fill: float = math.nan
) -> Tensor:
    """Lay the contiguous rows of several requests out as a new paged cache.

    Args:
        rows: one [seq_len, width] tensor per request, all of one dtype and width; lengths may be 0.
        block_table: [requests, max_pages] page numbers.
        num_pages: pages of the new cache.
        page_size: slots of a page.
        fill: what every slot not written holds.

    Returns:
        [num_pages, page_size, width] in the dtype of the rows.

    Raises:
        ValueError: as `scatter`, and if a page in use is named twice, since one request would then overwrite
            another.

    """
    if len(rows) == 0 or block_table.shape[0] != len(rows):
        raise ValueError(f"block_table has {block_table.shape[0]} rows for {len(rows)} requests; need one each")
    used = [
        page
        for request, request_rows in enumerate(rows)
        for page in block_table[request, : math.ceil(request_rows.shape[0] / page_size)].tolist()
    ]
    if len(set(used)) != len(used):
        raise ValueError(f"block_table names a page twice among the pages in use {used}; give each its own")
    kv_cache = torch.full((num_pages, page_size, rows[0].shape[1]), fill, dtype=rows[0].dtype)
    for request, request_rows in enumerate(rows):
        scatter(kv_cache, block_table[request], request_rows)
    return kv_cache


def split_latent(rows: Tensor, kv_lora_rank: int) -> tuple[Tensor, Tensor]:
    """Cut cache rows [..., width] into the latent [..., kv_lora_rank] and the key, which is the rest.

    Raises:
        ValueError: if the rows are narrower than the latent.

    """
    if not 0 <= kv_lora_rank <= rows.shape[-1]:
        raise ValueError(f"kv_lora_rank is {kv_lora_rank}; it must be within the row width {rows.shape[-1]}")
    return rows[..., :kv_lora_rank], rows[..., kv_lora_rank:]


def _locate(kv_cache: Tensor, block_table_row: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return the page number and the slot of each token, both [seq_len] int64."""
    if kv_cache.dim() != 3 or block_table_row.dim() != 1:
        raise ValueError(
            f"kv_cache has shape {list(kv_cache.shape)} and block_table_row {list(block_table_row.shape)}; "
            "expected [num_pages, page_size, width] and [max_pages]"
        )
    num_pages, page_size, _ = kv_cache.shape
    capacity = block_table_row.shape[0] * page_size
    if not 0 <= seq_len <= capacity:
        raise ValueError(f"seq_len is {seq_len}; a row of {block_table_row.shape[0]} pages holds 0 to {capacity}")
    tokens = torch.arange(seq_len, device=kv_cache.device)
    pages = block_table_row.to(device=kv_cache.device, dtype=torch.int64)[tokens // page_size]
    wrong = pages[(pages < 0) | (pages >= num_pages)]
    if wrong.numel() > 0:
        raise ValueError(f"block_table_row names page {int(wrong[0])}; the cache has pages 0 to {num_pages - 1}")
    return pages, tokens % page_size
