"""Cases of cache writing: rows, slots and a cache in poisoned memory, and what the cache held before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.suites.harness.buffers import Buffer, poison_value
from mla_conformance.suites.harness.problems.cache import KVCacheWriteProblem

FAR_PAGE_STRIDE = 2**30 + 24
"""Elements between pages of the ``far`` layout: page 2 and above lie past a signed 32-bit offset."""
FAR_MARGIN = 2**31
"""Elements reserved before a ``far`` cache: as far as a wrapped 32-bit offset can reach back."""
BYTE_POISON = 0xA5
"""What fills a cache of bytes."""
SPECIAL = (0.0, -0.0, 2.0**-9, 2.0**-10, -(2.0**-10), 3 * 2.0**-11, 1.0625, 1.1875, -1.1875, 448.0, 464.0, 2.0**-24)
"""Zeros, subnormals of e4m3, halves between two of its codes, its largest number, and half a step beyond."""


@dataclass
class KVCacheWriteCase:
    """The tensors of one write.

    Attributes:
        ckv: [tokens, kv_lora_rank], any row stride.
        kpe: [tokens, qk_rope_head_dim], any row stride.
        kv_cache: [pages, page_size, width], any page and token stride; written in place.
        slot_mapping: [tokens] int32 or int64.
        k_scale: float32 scalar tensor; what one unit of a float8_e4m3fn cache is worth.
        before: a dense copy of what ``kv_cache`` held, for the oracle.
    """

    problem: KVCacheWriteProblem
    ckv: Tensor
    kpe: Tensor
    kv_cache: Tensor
    slot_mapping: Tensor
    k_scale: Tensor
    before: Tensor
    buffers: list[Buffer]


def build(problem: KVCacheWriteProblem, device: torch.device | str = "cpu") -> KVCacheWriteCase:
    """Lay ``problem`` out in poisoned memory on ``device``."""
    generator = torch.Generator().manual_seed(problem.seed)
    pages = -(-problem.tokens // problem.page_size) + 1
    capacity = pages * problem.page_size
    slots = _slots(problem, capacity, generator)
    rows = _rows(problem, generator)
    # Half of it only: rows of NaN alone would look like the poison that the cache held before.
    rows[(slots < 0) | (slots >= capacity), ::2] = torch.nan
    if problem.slots == "duplicate_equal":
        rows[-1:] = rows[:1]
    ckv = _source("ckv", rows[:, : problem.kv_lora_rank], problem)
    kpe = _source("kpe", rows[:, problem.kv_lora_rank :], problem)
    slot_dtype = getattr(torch, problem.slot_dtype)
    slot_mapping = Buffer.allocate("slot_mapping", (problem.tokens,), (1,), slot_dtype, fill=0)
    slot_mapping.view.copy_(slots)
    cache = _cache(problem, pages)

    buffers = [buffer.to(torch.device(device)) for buffer in (ckv, kpe, slot_mapping, cache)]
    # A far cache is address space, too large to compare byte by byte.
    guarded = [b for b in buffers if not (b.name == "kv_cache" and problem.layout == "far")]
    for buffer in guarded:
        buffer.guard()
    views = {buffer.name: buffer.view for buffer in buffers}
    return KVCacheWriteCase(
        problem=problem,
        k_scale=torch.tensor(problem.k_scale, dtype=torch.float32, device=device),
        before=views["kv_cache"].clone(memory_format=torch.contiguous_format),
        buffers=guarded,
        **views,
    )


def _slots(problem: KVCacheWriteProblem, capacity: int, generator: torch.Generator) -> Tensor:
    """Draw the slots, int64 [tokens]."""
    slots = torch.randperm(capacity, generator=generator)[: problem.tokens]
    if problem.slots == "with_skipped":
        slots[::3] = -1
    elif problem.slots == "beyond":
        wrong = [capacity, -1, 2**31 - 1, -capacity, -(2**31)]
        if problem.slot_dtype == "int64":
            # The low 32 bits alone would name slots of the cache.
            wrong = [2**32, capacity, 1 - 2**32, 2**33 + 2, -1, 2**63 - 1, -(2**63), 2**40 + 3]
        count = len(slots[::2])
        slots[::2] = torch.tensor((wrong * count)[:count], dtype=torch.int64)
    elif problem.slots == "duplicate_equal":
        slots[-1:] = slots[:1]
    return slots


def _rows(problem: KVCacheWriteProblem, generator: torch.Generator) -> Tensor:
    """Draw the rows [tokens, width] in their final dtype."""
    rows = torch.randn(problem.tokens, problem.width, dtype=torch.float64, generator=generator)
    dtype = getattr(torch, problem.dtype)
    if problem.values == "large":
        largest = torch.finfo(dtype).max
        rows = (rows * 448 * problem.k_scale * 2.0 ** (torch.arange(problem.width) % 9)).clamp(-largest, largest)
    elif problem.values == "special":
        rows = torch.tensor(SPECIAL, dtype=torch.float64).repeat(rows.numel() // len(SPECIAL) + 1)[: rows.numel()]
        rows = rows.view(problem.tokens, problem.width) * problem.k_scale
        rows[1::3, 5] = torch.nan
        rows[1::3, 6] = -torch.nan
        rows[2::3, 7] = torch.inf
        rows[2::3, 8] = -torch.inf
        rows[:1] = 0.0
    return rows.to(dtype)


def _source(name: str, rows: Tensor, problem: KVCacheWriteProblem) -> Buffer:
    """A buffer that holds ``rows``."""
    stride = rows.shape[1] + (5 if problem.layout == "gapped" else 0)
    fill = poison_value(rows.dtype, problem.poison)
    buffer = Buffer.allocate(name, tuple(rows.shape), (stride, 1), rows.dtype, fill=fill)
    buffer.view.copy_(rows)
    return buffer


def _cache(problem: KVCacheWriteProblem, pages: int) -> Buffer:
    dtype = getattr(torch, problem.cache_dtype)
    shape = (pages, problem.page_size, problem.cache_width)
    # Rows of bytes that hold float32 stay aligned to four.
    gap, page_gap = (12, 20) if dtype == torch.uint8 else (3, 11)
    token = problem.cache_width + (gap if problem.layout == "gapped" else 0)
    page = problem.page_size * token + (page_gap if problem.layout == "gapped" else 0)
    if problem.layout == "far":
        cache = Buffer.reserve("kv_cache", shape, (FAR_PAGE_STRIDE, token, 1), dtype, FAR_MARGIN)
        cache.writable = True
        return cache
    fill = BYTE_POISON if dtype == torch.uint8 else poison_value(dtype, problem.poison)
    return Buffer.allocate("kv_cache", shape, (page, token, 1), dtype, fill=fill, writable=True)
