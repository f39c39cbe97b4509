"""Cases of cache gathering: a paged cache and an output in poisoned memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.suites.harness.buffers import Buffer, poison_value
from mla_conformance.suites.harness.cache_cases import BYTE_POISON, FAR_MARGIN, FAR_PAGE_STRIDE, KVCacheWriteCase
from mla_conformance.suites.harness.problems.cache_gather import KVCacheGatherProblem

SPARE_PAGES = 2
DS_MLA_SCALES = slice(512, 528)
UNUSED_ENTRY = {"negative": -1, "beyond": 2**30}


@dataclass
class KVCacheGatherCase:
    """The tensors of one gather.

    Attributes:
        kv_cache: [pages, page_size, width], any page and token stride.
        block_table: int32 [batch, entries]; entries that no position reaches hold garbage.
        cu_seqlens: int32 [batch + 1], where each request starts in ``out``.
        seq_starts: int32 [batch], or None where the problem gives no starts.
        k_scale: float32 scalar tensor; what one unit of a float8_e4m3fn cache is worth.
        out: [rows, width], any row stride, poisoned; the implementation writes all rows but the spare ones.
        before: a dense copy of what ``out`` held, for the oracle.
    """

    problem: KVCacheGatherProblem
    kv_cache: Tensor
    block_table: Tensor
    cu_seqlens: Tensor
    seq_starts: Tensor | None
    k_scale: Tensor
    out: Tensor
    before: Tensor
    buffers: list[Buffer]


def build(problem: KVCacheGatherProblem, device: torch.device | str = "cpu") -> KVCacheGatherCase:
    """Lay ``problem`` out in poisoned memory on ``device``."""
    generator = torch.Generator().manual_seed(problem.seed)
    pages, num_pages = _assign_pages(problem, generator)
    cache = _cache(problem, num_pages)
    table = _table(problem, max((len(p) for p in pages), default=0) + 1)
    for request, owned in enumerate(pages):
        start, length = problem.starts[request], problem.seq_lens[request]
        for position in range(start, start + length):
            row = _row(problem, generator, position)
            cache.view[owned[position // problem.page_size], position % problem.page_size] = row
        # Entries before the chunk stay garbage: only those that its positions reach may be looked at.
        first = start // problem.page_size if length else len(owned)
        table.view[request, first : len(owned)] = torch.tensor(owned[first:], dtype=torch.int32)
        if problem.pages == "invalid" and request == len(pages) - 1:
            table.view[request, first] = num_pages + 3 if problem.seed % 2 else -5

    gap = 5 if problem.layout == "gapped" else 0
    dtype = getattr(torch, problem.dtype)
    shape = (sum(problem.seq_lens) + problem.spare_rows, problem.width)
    fill = poison_value(dtype, problem.poison)
    out = Buffer.allocate("out", shape, (problem.width + gap, 1), dtype, fill=fill, writable=True)
    cu_seqlens = _integers("cu_seqlens", [0, *itertools.accumulate(problem.seq_lens)], 1 + gap)
    seq_starts = _integers("seq_starts", list(problem.starts), 1 + gap)
    buffers = [buffer.to(torch.device(device)) for buffer in (cache, table, cu_seqlens, seq_starts, out)]
    # A far cache is address space, too large to compare byte by byte.
    guarded = [b for b in buffers if not (b.name == "kv_cache" and problem.layout == "far")]
    for buffer in guarded:
        buffer.guard()
    views = {buffer.name: buffer.view for buffer in buffers}
    starts = views.pop("seq_starts")
    return KVCacheGatherCase(
        problem=problem,
        seq_starts=starts if problem.seq_starts else None,
        k_scale=torch.tensor(problem.k_scale, dtype=torch.float32, device=device),
        before=views["out"].clone(memory_format=torch.contiguous_format),
        buffers=guarded,
        **views,
    )


def reading_back(case: KVCacheWriteCase) -> KVCacheGatherCase:
    """A gather of what ``case`` has written: each token is a request of one row, in the order of the tokens.

    Every slot of ``case`` must lie in its cache.
    """
    written = case.problem
    pages, starts = case.slot_mapping // written.page_size, case.slot_mapping % written.page_size
    problem = KVCacheGatherProblem(
        seq_lens=(1,) * written.tokens,
        seq_starts=tuple(starts.tolist()),
        kv_lora_rank=written.kv_lora_rank,
        qk_rope_head_dim=written.qk_rope_head_dim,
        page_size=written.page_size,
        dtype=written.dtype,
        cache_format=written.cache_format,
        k_scale=written.k_scale,
        spare_rows=0,
    )
    out = case.ckv.new_full((written.tokens, written.width), torch.nan)
    return KVCacheGatherCase(
        problem=problem,
        kv_cache=case.kv_cache,
        block_table=pages.int()[:, None],
        cu_seqlens=torch.arange(written.tokens + 1, dtype=torch.int32, device=out.device),
        seq_starts=starts.int(),
        k_scale=case.k_scale,
        out=out,
        before=out.clone(),
        buffers=[],
    )


def _assign_pages(problem: KVCacheGatherProblem, generator: torch.Generator) -> tuple[list[list[int]], int]:
    """Give each request its page ids; return them and the number of pages in the cache."""
    counts = [
        -(-(start + length) // problem.page_size) if length else 0
        for start, length in zip(problem.starts, problem.seq_lens, strict=True)
    ]
    if problem.pages == "shared":
        ids = torch.randperm(max(counts, default=0) + SPARE_PAGES, generator=generator).tolist()
        return [ids[:count] for count in counts], len(ids)
    # Pages of a far cache lie far apart, so that every one beyond the second matters.
    ids = torch.randperm(sum(counts) + (1 if problem.layout == "far" else SPARE_PAGES), generator=generator).tolist()
    ends = list(itertools.accumulate(counts))
    return [ids[end - count : end] for count, end in zip(counts, ends, strict=True)], len(ids)


def _row(problem: KVCacheGatherProblem, generator: torch.Generator, position: int) -> Tensor:
    """Draw one row of the cache, in its dtype."""
    dtype = getattr(torch, problem.cache_dtype)
    if problem.cache_format == "same" and problem.values != "bits":
        return torch.randn(problem.width, generator=generator).to(dtype)
    count = problem.cache_width * dtype.itemsize
    row = torch.randint(256, (count,), generator=generator).to(torch.uint8)
    if problem.values == "codes":
        row = ((torch.arange(count) + position * problem.width) % 256).to(torch.uint8)
    elif problem.values == "normal":
        row[row % 128 == 127] = 0
    if problem.cache_format == "fp8_ds_mla":
        scales = torch.randn(4, generator=generator).exp2() * (1 + position)
        if problem.values == "normal":
            scales = scales.log2().ceil().exp2()
        row[DS_MLA_SCALES] = scales.float().view(torch.uint8)
    return row.view(dtype)


def _cache(problem: KVCacheGatherProblem, pages: int) -> Buffer:
    dtype = getattr(torch, problem.cache_dtype)
    shape = (pages, problem.page_size, problem.cache_width)
    # Rows of bytes that hold float32 stay aligned to four.
    gap, page_gap = (12, 20) if dtype == torch.uint8 else (3, 11)
    token = problem.cache_width + (gap if problem.layout == "gapped" else 0)
    page = problem.page_size * token + (page_gap if problem.layout == "gapped" else 0)
    if problem.layout == "far":
        return Buffer.reserve("kv_cache", shape, (FAR_PAGE_STRIDE, token, 1), dtype, FAR_MARGIN)
    fill = BYTE_POISON if dtype == torch.uint8 else poison_value(dtype, problem.poison)
    return Buffer.allocate("kv_cache", shape, (page, token, 1), dtype, fill=fill)


def _table(problem: KVCacheGatherProblem, entries: int) -> Buffer:
    stride = entries + (3 if problem.layout == "gapped" else 0)
    fill = UNUSED_ENTRY[problem.unused_entries]
    return Buffer.allocate("block_table", (len(problem.seq_lens), entries), (stride, 1), torch.int32, fill=fill)


def _integers(name: str, values: list[int], stride: int) -> Buffer:
    buffer = Buffer.allocate(name, (len(values),), (stride,), torch.int32, fill=-1)
    buffer.view.copy_(torch.tensor(values, dtype=torch.int32))
    return buffer
