"""Cases: a problem turned into the tensors of one call, and the same numbers laid out plainly for the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.suites.harness.buffers import Buffer, poison_value
from mla_conformance.suites.harness.problems import MLADecodeProblem

NULL_PAGE = 0
"""Page 0 is the null block of vLLM: owned by nobody, pointed at by padding."""
SPARE_PAGES = 2
FAR_PAGE_STRIDE = 2**30 + 24
"""Elements between pages of the ``far`` layout: page 2 and above lie past a signed 32-bit offset."""
UNUSED_ENTRY = {"negative": -1, "beyond": 2**30, "valid": 1}
FAR_MARGIN = 2**31
"""Elements reserved before a ``far`` cache: as far as a wrapped 32-bit offset can reach back."""


@dataclass
class DecodeCase:
    """The tensors of one MLA decode call.

    Attributes:
        q: [batch, heads, kv_lora_rank + qk_rope_head_dim]; ``q_nope`` (absorbed) and ``q_pe`` are views of it.
        kv_cache: [pages, page_size, kv_lora_rank + qk_rope_head_dim], latent first, any page and token stride.
        block_table: int32 [batch, entries]; entries that the length does not reach hold garbage.
        seq_lens: int32 [batch].
        k_scale: float32 scalar tensor; what one unit of an fp8 cache is worth.
        out: [batch, heads, kv_lora_rank], poisoned; the implementation must write all of it.
        lse: float32 [batch, heads], poisoned; for implementations that take the buffer.
        rows: per request, the dense cache rows in the cache's own dtype, for the oracle.
    """

    problem: MLADecodeProblem
    q: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    k_scale: Tensor
    out: Tensor
    lse: Tensor
    rows: list[Tensor]
    buffers: list[Buffer]

    @property
    def q_nope(self) -> Tensor:
        """The absorbed query, in latent space: [batch, heads, kv_lora_rank]."""
        return self.q[..., : self.problem.kv_lora_rank]

    @property
    def q_pe(self) -> Tensor:
        """The rotary query: [batch, heads, qk_rope_head_dim]."""
        return self.q[..., self.problem.kv_lora_rank :]


def build(problem: MLADecodeProblem, device: torch.device | str = "cpu") -> DecodeCase:
    """Lay ``problem`` out in poisoned memory on ``device``."""
    generator = torch.Generator().manual_seed(problem.seed)
    queries, rows = _draw(problem, generator)
    pages, num_pages = _assign_pages(problem, generator)
    if problem.pages == "shared":
        _share_first_page(problem.page_size, rows, pages)
    cache = _cache_buffer(problem, num_pages)
    table = _table_buffer(problem, max((len(p) for p in pages), default=0) + 2)
    for i, (request, owned) in enumerate(zip(rows, pages, strict=True)):
        for position, page in enumerate(owned):
            part = request[position * problem.page_size : (position + 1) * problem.page_size]
            cache.view[page, : len(part)] = part
        table.view[i, : len(owned)] = torch.tensor(owned, dtype=torch.int32)
    if problem.pages == "invalid" and pages and pages[-1]:
        table.view[-1, 0] = num_pages + 3 if problem.seed % 2 else -5

    batch, heads, _ = queries.shape
    gap = 5 if problem.layout == "gapped" else 0
    q = Buffer.gapped("q", tuple(queries.shape), gap, queries.dtype, problem.poison)
    q.view.copy_(queries)
    out_shape = (batch, heads, problem.kv_lora_rank)
    out = Buffer.gapped("out", out_shape, gap, queries.dtype, problem.poison, writable=True)
    lse = Buffer.gapped("lse", (batch, heads), gap, torch.float32, problem.poison, writable=True)
    lens = Buffer.allocate("seq_lens", (batch,), (1,), torch.int32, fill=-1)
    lens.view.copy_(torch.tensor(problem.lengths, dtype=torch.int32))

    buffers = [buffer.to(torch.device(device)) for buffer in (q, cache, table, lens, out, lse)]
    # A far cache is address space, too large to compare byte by byte.
    guarded = [b for b in buffers if not (b.name == "kv_cache" and problem.layout == "far")]
    for buffer in guarded:
        buffer.guard()
    views = {buffer.name: buffer.view for buffer in buffers}
    return DecodeCase(
        problem=problem,
        k_scale=torch.tensor(problem.k_scale, dtype=torch.float32, device=device),
        rows=[request.to(device) for request in rows],
        buffers=guarded,
        **views,
    )


def subset(case: DecodeCase, requests: list[int], lengths: list[int] | None = None, first_page: int = 0) -> DecodeCase:
    """The same numbers as another call: some requests of ``case``, in this order, over part of their context.

    Args:
        case: where the numbers come from; it shares its cache with the result.
        requests: which of its requests, and in which order.
        lengths: tokens of each of them; as before by default.
        first_page: context before this page of the block table is left out.
    """
    problem = case.problem
    start = first_page * problem.page_size
    if lengths is None:
        lengths = [problem.lengths[i] - start for i in requests]
    rows = [case.rows[i][start : start + length] for i, length in zip(requests, lengths, strict=True)]
    return DecodeCase(
        problem=problem.replace(lengths=tuple(lengths)),
        q=case.q[requests].clone(),
        kv_cache=case.kv_cache,
        block_table=case.block_table[requests, first_page:].clone(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=case.q.device),
        k_scale=case.k_scale,
        out=torch.full_like(case.out[requests], poison_value(case.out.dtype, problem.poison)),
        lse=torch.full_like(case.lse[requests], torch.nan),
        rows=rows,
        buffers=[buffer for buffer in case.buffers if buffer.name == "kv_cache"],
    )


def _draw(problem: MLADecodeProblem, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """Draw the queries [batch, heads, width] and each request's rows [length, width], in their final dtypes."""
    width = problem.kv_lora_rank + problem.qk_rope_head_dim
    dtype = getattr(torch, problem.dtype)
    cache_dtype = getattr(torch, problem.cache_dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    queries = normal(len(problem.lengths), problem.heads, width)
    rows = [normal(length, width) for length in problem.lengths]
    if problem.values == "zero_query":
        queries.zero_()
    elif problem.values == "constant":
        rows = [normal(1, width).expand(length, width) for length in problem.lengths]
    elif problem.values == "one_hot":
        queries[..., 0] = 16
        for request in rows:
            request[:, 0] = 0
            request[-1:, 0] = 64
    elif problem.values == "codes":
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        codes = codes[codes.isfinite()] * problem.k_scale
        total = torch.arange(sum(problem.lengths) * width) % len(codes)
        rows = _pieces(codes[total].view(-1, width), problem.lengths)
    if problem.is_fp8:
        rows = [(request / problem.k_scale).clamp(-448, 448) for request in rows]
    return queries.to(dtype), [request.to(cache_dtype) for request in rows]


def _assign_pages(problem: MLADecodeProblem, generator: torch.Generator) -> tuple[list[list[int]], int]:
    """Give each request its page ids; return them and the number of pages in the cache."""
    counts = [-(-length // problem.page_size) for length in problem.lengths]
    num_pages = 1 + sum(counts) + (1 if problem.layout == "far" else SPARE_PAGES)
    ids = torch.arange(1, num_pages)
    if problem.layout == "far":
        ids = ids.flip(0)
    elif problem.pages != "in_order":
        ids = ids[torch.randperm(len(ids), generator=generator)]
    return [part.tolist() for part in _pieces(ids, counts)], num_pages


def _pieces(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive pieces of the first dimension."""
    ends = list(itertools.accumulate(sizes))
    return [tensor[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _share_first_page(page_size: int, rows: list[Tensor], pages: list[list[int]]) -> None:
    """Let every request that fills its first page use that of the first such request."""
    sharers = [i for i, request in enumerate(rows) if len(request) >= page_size]
    for i in sharers[1:]:
        pages[i][0] = pages[sharers[0]][0]
        rows[i][:page_size] = rows[sharers[0]][:page_size]


def _cache_buffer(problem: MLADecodeProblem, num_pages: int) -> Buffer:
    width = problem.kv_lora_rank + problem.qk_rope_head_dim
    dtype = getattr(torch, problem.cache_dtype)
    shape = (num_pages, problem.page_size, width)
    token = width + (3 if problem.layout == "gapped" else 0)
    page = problem.page_size * token
    if problem.layout == "far":
        return Buffer.reserve("kv_cache", shape, (FAR_PAGE_STRIDE, token, 1), dtype, FAR_MARGIN)
    if problem.layout == "layers":
        page *= 2
    elif problem.layout == "gapped":
        page += 11
    fill = poison_value(dtype, problem.poison)
    return Buffer.allocate("kv_cache", shape, (page, token, 1), dtype, fill=fill)


def _table_buffer(problem: MLADecodeProblem, entries: int) -> Buffer:
    shape = (len(problem.lengths), entries)
    stride = entries + (3 if problem.layout == "gapped" else 0)
    fill = UNUSED_ENTRY[problem.unused_entries]
    return Buffer.allocate("block_table", shape, (stride, 1), torch.int32, fill=fill)
