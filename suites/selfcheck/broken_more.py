"""Planted faults of sizes, layout, memory, determinism, fp8 and capability: the reference with one thing wrong each."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from mla_conformance.suites.harness.cases import DecodeCase
from mla_conformance.suites.selfcheck.broken import Broken


def one_step_up(tensor: Tensor) -> Tensor:
    """The next larger number of the same dtype: within every bound, but not the same bits."""
    return torch.nextafter(tensor, torch.full_like(tensor, torch.inf))


class NanFromEmptySplits(Broken):
    """A split without tokens is merged as 0 / 0."""

    name = "nan-from-empty-splits"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right where no split is empty."""
        out, lse = super().mla_decode(case)
        out[case.seq_lens < (case.problem.num_splits or 1)] = torch.nan
        return out, lse


class ScaleOfTheAbsorbedWidth(Broken):
    """Takes (kv_lora_rank + qk_rope_head_dim)**-0.5 for the softmax scale, whatever it is given."""

    name = "scale-of-the-absorbed-width"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right where that happens to be the scale."""
        return super().mla_decode(dataclasses.replace(case, problem=case.problem.replace(softmax_scale=None)))


class LatentCutToAPowerOfTwo(Broken):
    """Output columns beyond the largest power of two in the latent width are left out."""

    name = "latent-cut-to-a-power-of-two"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right where the width is one."""
        out, lse = super().mla_decode(case)
        out[..., 1 << (out.shape[-1].bit_length() - 1) :] = 0
        return out, lse


class ExpWithoutMaximum(Broken):
    """exp of the score itself, in float32: infinite from a score of 89 on."""

    name = "exp-without-maximum"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right while no sum overflows."""
        out, lse = super().mla_decode(case)
        out[lse.exp().isinf()] = torch.nan
        return out, lse


class LeaksAPartInAThousand(Broken):
    """A thousandth of the output comes from elsewhere."""

    name = "leaks-a-part-in-a-thousand"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Nearly right."""
        out, lse = super().mla_decode(case)
        out += out.roll(1, -1) / 1000
        return out, lse


class OrdersPages(Broken):
    """Sums in the order of the page numbers, so that the last bit depends on where pages lie."""

    name = "orders-pages"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Another last bit where a table is not ascending."""
        out, lse = super().mla_decode(case)
        for row, length in enumerate(case.problem.lengths):
            used = case.block_table[row, : -(-length // case.problem.page_size)].tolist()
            if used != sorted(used):
                out[row] = one_step_up(out[row])
        return out, lse


class OwnsItsPages(Broken):
    """A page serves the first request that names it."""

    name = "owns-its-pages"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right where no page is shared."""
        out, lse = super().mla_decode(case)
        for first, second in itertools.combinations(range(len(out)), 2):
            if case.block_table[first, 0] == case.block_table[second, 0]:
                out[second] = 0
        return out, lse


class AssumesDensePages(Broken):
    """Takes page_size * width for the distance between pages."""

    name = "assumes-dense-pages"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right where pages are dense."""
        _, page_size, width = case.kv_cache.shape
        strides = (page_size * width, width, 1)
        dense = case.kv_cache.as_strided(case.kv_cache.shape, strides, case.kv_cache.storage_offset())
        return super().mla_decode(dataclasses.replace(case, kv_cache=dense))


class AssumesPagesOfSixteen(Broken):
    """Finds token t in page t // 16 whatever the page size."""

    name = "assumes-pages-of-sixteen"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right for pages of 16."""
        out, lse = super().mla_decode(case)
        if case.problem.page_size != 16:
            out.copy_(out.roll(1, 1))
        return out, lse


class LooksOnePageAhead(Broken):
    """Uses the table entry behind the last one in use."""

    name = "looks-one-page-ahead"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right where that entry names a page."""
        out, lse = super().mla_decode(case)
        for row, length in enumerate(case.problem.lengths):
            ahead = int(case.block_table[row, -(-length // case.problem.page_size)])
            if not 0 <= ahead < len(case.kv_cache):
                out[row] = one_step_up(out[row])
        return out, lse


class LeavesTheLastHead(Broken):
    """The last head is never stored."""

    name = "leaves-the-last-head"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right in the other heads."""
        before = case.out[:, -1].clone()
        out, lse = super().mla_decode(case)
        out[:, -1] = before
        return out, lse


class OffsetsOf32Bits(Broken):
    """An offset into the cache wraps at 2**31 elements."""

    name = "offsets-of-32-bits"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right where every page starts below that; a wrapped offset finds zeros."""
        reachable = -(-(2**31) // case.kv_cache.stride(0))
        pages = min(reachable, len(case.kv_cache))
        cache = torch.zeros(case.kv_cache.shape, dtype=case.kv_cache.dtype)
        cache[:pages] = case.kv_cache[:pages]
        return super().mla_decode(dataclasses.replace(case, kv_cache=cache))


class WrapsPageIds(Broken):
    """Says that a row with a page outside the cache is NaN, and reads some page instead."""

    name = "wraps-page-ids"
    invalid_pages = "nan"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right where every page exists."""
        table = case.block_table.remainder(len(case.kv_cache))
        return super().mla_decode(dataclasses.replace(case, block_table=table))


class CountsItsCalls(Broken):
    """Every other call ends in another last bit."""

    name = "counts-its-calls"

    def __init__(self) -> None:
        self._calls = 0

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Within every bound."""
        out, lse = super().mla_decode(case)
        self._calls += 1
        if self._calls % 2:
            out.copy_(one_step_up(out))
        return out, lse


class SubnormalCodesAreZero(Broken):
    """e4m3 codes below the smallest normal number are read as 0."""

    name = "subnormal-codes-are-zero"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right for the other codes."""
        cache = case.kv_cache
        if cache.dtype == torch.float8_e4m3fn:
            wide = cache.float()
            cache = torch.where(wide.abs() < 2**-6, 0.0, wide)
        return super().mla_decode(dataclasses.replace(case, kv_cache=cache))


class ScalesEveryCache(Broken):
    """Applies k_scale to a cache that is not fp8."""

    name = "scales-every-cache"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right where the scale is 1 or the cache is fp8."""
        out, lse = super().mla_decode(case)
        if not case.problem.is_fp8:
            out *= case.problem.k_scale
        return out, lse


class ClaimsTooMuch(Broken):
    """Does not decline more than 128 heads, and leaves those beyond at 0."""

    name = "claims-too-much"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right up to 128 heads."""
        out, lse = super().mla_decode(case)
        out[:, 128:] = 0
        return out, lse


class OneHeadInHalfPrecision(Broken):
    """With one head, scores are rounded to the query dtype."""

    name = "one-head-in-half-precision"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right with more heads."""
        out, lse = super().mla_decode(case)
        return out, lse.to(out.dtype).float() if case.problem.heads == 1 else lse


class MergesInTheWrongBase(Broken):
    """With several splits, the lse loses the logarithm of their number."""

    name = "merges-in-the-wrong-base"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right with one split."""
        out, lse = super().mla_decode(case)
        splits = torch.tensor(float(case.problem.num_splits or 1))
        return out, lse - splits.log()


class SeesItsNeighbours(Broken):
    """The last bit depends on the longest request of the batch."""

    name = "sees-its-neighbours"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Another last bit behind a long first request."""
        out, lse = super().mla_decode(case)
        if int(case.seq_lens[0]) > 20:
            out[1:] = one_step_up(out[1:])
        return out, lse
