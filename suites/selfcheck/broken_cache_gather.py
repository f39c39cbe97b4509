"""Planted faults in gathering cached rows: the reference with one thing wrong each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from mla_conformance.reference.cache_gather import gather_rows
from mla_conformance.suites.harness.cache_cases import KVCacheWriteCase
from mla_conformance.suites.harness.cache_gather_cases import DS_MLA_SCALES, KVCacheGatherCase
from mla_conformance.suites.selfcheck.broken import Broken


class ForgetsNanPayloads(Broken):
    """Rows pass through arithmetic, which leaves one NaN of the many."""

    name = "forgets-nan-payloads"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right, up to the bits of a NaN."""
        out = super().kv_cache_gather(case)
        return out.copy_(torch.where(out.isnan(), torch.nan, out))


class ScaleInHalfPrecision(Broken):
    """The scale of an e4m3 cache is rounded to the output's dtype first."""

    name = "scale-in-half-precision"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right for scales of few bits."""
        return super().kv_cache_gather(dataclasses.replace(case, k_scale=case.k_scale.to(case.out.dtype).float()))


class OneScaleForAllGroups(Broken):
    """All groups of fp8_ds_mla are multiplied by the scale of the first."""

    name = "one-scale-for-all-groups"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right where the four scales are equal."""
        if case.kv_cache.dtype == torch.uint8:
            cache = case.kv_cache.clone()
            scales = cache[..., DS_MLA_SCALES]
            scales.copy_(scales[..., :4].repeat(1, 1, 4))
            case = dataclasses.replace(case, kv_cache=cache)
        return super().kv_cache_gather(case)


class ScalesTheLatentAlone(Broken):
    """The rotary part of an e4m3 cache is not scaled (vllm-project/vllm#37054)."""

    name = "scales-the-latent-alone"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right for a scale of 1."""
        out = super().kv_cache_gather(case)
        if case.kv_cache.dtype == torch.float8_e4m3fn:
            rope = out[: sum(case.problem.seq_lens), case.problem.kv_lora_rank :]
            rope /= case.k_scale
        return out


class ScalesEveryCache(Broken):
    """The scale multiplies a cache of the output's dtype as well."""

    name = "scales-every-cache"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right for e4m3."""
        out = super().kv_cache_gather(case)
        if case.kv_cache.dtype == out.dtype:
            out[: sum(case.problem.seq_lens)] *= case.k_scale
        return out


class StartsWithThePage(Broken):
    """A start is rounded down to the first position of its page."""

    name = "starts-with-the-page"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right for starts at the edge of a page."""
        if case.seq_starts is not None:
            page = case.problem.page_size
            case = dataclasses.replace(case, seq_starts=case.seq_starts // page * page)
        return super().kv_cache_gather(case)


class EmptyRequestTakesTheRow(Broken):
    """A row where several requests start is taken for the first of them, which has none."""

    name = "empty-request-takes-the-row"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right without empty requests."""
        for request, row in _rows(case):
            earlier = [i for i in range(request) if int(case.cu_seqlens[i]) == int(case.cu_seqlens[request])]
            table = case.block_table[min([request, *earlier])]
            table = torch.where((table < 0) | (table >= len(case.kv_cache)), 0, table)
            _one(case, request, row, table)
        return case.out


class ClearsSpareRows(Broken):
    """The output is set to 0 before anything is gathered."""

    name = "clears-spare-rows"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right where every row belongs to a request."""
        case.out.zero_()
        return super().kv_cache_gather(case)


class LooksAtTheWholeTable(Broken):
    """A request is NaN if any entry of its table names no page, whether a position reaches it or not."""

    name = "looks-at-the-whole-table"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right where tables are padded with pages that exist."""
        out = super().kv_cache_gather(case)
        wrong = ((case.block_table < 0) | (case.block_table >= len(case.kv_cache))).any(1)
        for request, row in _rows(case):
            if wrong[request]:
                out[row] = torch.nan
        return out


class ClampsPages(Broken):
    """A page number outside the cache reads the first or the last page."""

    name = "clamps-pages"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right for pages that exist."""
        table = case.block_table.clamp(0, len(case.kv_cache) - 1)
        return super().kv_cache_gather(dataclasses.replace(case, block_table=table))


class IgnoresRowGaps(Broken):
    """Rows of the cache are taken to lie as far apart as they are wide."""

    name = "ignores-row-gaps"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right without gaps between tokens."""
        cache = case.kv_cache
        strides = (cache.stride(0), cache.shape[2], 1)
        packed = cache.as_strided(cache.shape, strides, cache.storage_offset())
        return super().kv_cache_gather(dataclasses.replace(case, kv_cache=packed))


class WritesTheGapBehindARow(Broken):
    """One element more than a row has is written, where there is one."""

    name = "writes-the-gap-behind-a-row"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right, then the element behind the first row is cleared."""
        out = super().kv_cache_gather(case)
        if out.stride(0) > out.shape[1]:
            out.as_strided((1, 1), (1, 1), out.storage_offset() + out.shape[1]).zero_()
        return out


class CacheOffsetsOf32Bits(Broken):
    """The offset of a page is a signed 32-bit number."""

    name = "cache-offsets-of-32-bits"

    def kv_cache_gather(self, case: KVCacheGatherCase) -> Tensor:
        """Right in the first 2**31 elements."""
        cache = case.kv_cache
        for request, row in _rows(case):
            start = 0 if case.seq_starts is None else int(case.seq_starts[request])
            entry = (start + row - int(case.cu_seqlens[request])) // cache.shape[1]
            page = int(case.block_table[request, entry])
            wrapped = (page * cache.stride(0) + 2**31) % 2**32 - 2**31
            single = cache.as_strided(cache.shape[1:], cache.stride()[1:], cache.storage_offset() + wrapped)
            table = torch.zeros_like(case.block_table[request])
            _one(dataclasses.replace(case, kv_cache=single[None]), request, row, table)
        return case.out


class WriterAndReaderDisagree(Broken):
    """The writer multiplies by the scale, and so does the reader."""

    name = "writer-and-reader-disagree"

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Right, for the inverse."""
        super().kv_cache_write(dataclasses.replace(case, k_scale=1 / case.k_scale))


def _rows(case: KVCacheGatherCase) -> Iterator[tuple[int, int]]:
    """Each row of the output that belongs to a request, with that request."""
    for request, (begin, end) in enumerate(itertools.pairwise(case.cu_seqlens.tolist())):
        for row in range(begin, end):
            yield request, row


def _one(case: KVCacheGatherCase, request: int, row: int, table: Tensor) -> None:
    """Gather one row as the only one of a request with this table."""
    start = 0 if case.seq_starts is None else int(case.seq_starts[request])
    position = torch.tensor([start + row - int(case.cu_seqlens[request])])
    gather_rows(case.kv_cache, table[None], torch.tensor([0, 1]), case.out[row : row + 1], position, case.k_scale)
