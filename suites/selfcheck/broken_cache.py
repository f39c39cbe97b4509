"""Planted faults in writing the paged cache: the reference with one thing wrong each."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mla_conformance.reference.cache_write import write_rows
from mla_conformance.suites.harness.cache_cases import KVCacheWriteCase
from mla_conformance.suites.selfcheck.broken import Broken


class RopeFirst(Broken):
    """The rotary part lies before the latent one."""

    name = "rope-first"

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Right, with the two parts of a row in the other order."""
        write_rows(case.kpe, case.ckv, case.kv_cache, case.slot_mapping, case.k_scale)


class MultipliesByTheScale(Broken):
    """An element is multiplied by the scale, not divided."""

    name = "multiplies-by-the-scale"

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Right, for the inverse."""
        super().kv_cache_write(dataclasses.replace(case, k_scale=1 / case.k_scale))


class MultipliesByTheInverse(Broken):
    """The quotient is a product with the rounded inverse, which moves elements that lie near a tie."""

    name = "multiplies-by-the-inverse"

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Right, for elements that were scaled in float32 before."""
        if case.kv_cache.dtype == torch.float8_e4m3fn:
            inverse = 1 / case.k_scale
            case = dataclasses.replace(case, ckv=case.ckv.float() * inverse, kpe=case.kpe.float() * inverse)
            case = dataclasses.replace(case, k_scale=torch.ones_like(case.k_scale))
        super().kv_cache_write(case)


class OverflowsToNan(Broken):
    """What e4m3 cannot hold becomes NaN, as a conversion without saturation gives it."""

    name = "overflows-to-nan"

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Right, for rows in which elements of 464 units and above are NaN."""
        if case.kv_cache.dtype == torch.float8_e4m3fn:
            case = dataclasses.replace(case, ckv=self._lost(case, case.ckv), kpe=self._lost(case, case.kpe))
        super().kv_cache_write(case)

    def _lost(self, case: KVCacheWriteCase, values: Tensor) -> Tensor:
        return torch.where(values.float().abs() / case.k_scale >= 464, torch.nan, values)


class ScalesAreNotPowersOfTwo(Broken):
    """The scale of a group is amax / 448 itself."""

    name = "scales-are-not-powers-of-two"

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Right, then the scales of each written row are replaced."""
        super().kv_cache_write(case)
        if case.kv_cache.dtype != torch.uint8:
            return
        pages, page_size, _ = case.kv_cache.shape
        for token, slot in enumerate(case.slot_mapping.tolist()):
            if 0 <= slot < pages * page_size:
                groups = case.ckv[token].float().view(4, 128).abs().nan_to_num(0, 0, 0)
                scales = (groups.amax(1) / 448).clamp_min(1e-4)
                case.kv_cache[slot // page_size, slot % page_size, 512:528] = scales.view(torch.uint8)


class NegativeSlotsCountFromTheEnd(Broken):
    """Slot -1 is the last slot of the cache, as an index of Python is."""

    name = "negative-slots-count-from-the-end"

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Right, for slots that wrapped around."""
        capacity = case.kv_cache.shape[0] * case.kv_cache.shape[1]
        slots = torch.where(case.slot_mapping == -1, capacity - 1, case.slot_mapping)
        super().kv_cache_write(dataclasses.replace(case, slot_mapping=slots))


class SlotsOf32Bits(Broken):
    """Only the low 32 bits of a slot are looked at."""

    name = "slots-of-32-bits"

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Right, for the low halves."""
        super().kv_cache_write(dataclasses.replace(case, slot_mapping=case.slot_mapping.to(torch.int32)))


class LastSlotIsOnePastTheEnd(Broken):
    """A slot equal to the capacity is taken for the last one."""

    name = "last-slot-is-one-past-the-end"

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Right, for clamped slots."""
        capacity = case.kv_cache.shape[0] * case.kv_cache.shape[1]
        slots = torch.where(case.slot_mapping == capacity, capacity - 1, case.slot_mapping)
        super().kv_cache_write(dataclasses.replace(case, slot_mapping=slots))


class WritesTheGapBehindARow(Broken):
    """One element more than a row has is written, where there is one."""

    name = "writes-the-gap-behind-a-row"

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Right, then the element behind the first row is cleared."""
        super().kv_cache_write(case)
        if case.kv_cache.stride(1) > case.kv_cache.shape[2]:
            wider = (*case.kv_cache.shape[:2], case.kv_cache.shape[2] + 1)
            whole = case.kv_cache.as_strided(wider, case.kv_cache.stride(), case.kv_cache.storage_offset())
            whole.view(torch.uint8)[0, 0, -1] = 0


class CacheOffsetsOf32Bits(Broken):
    """The offset of a page is a signed 32-bit number."""

    name = "cache-offsets-of-32-bits"

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Right, one token at a time, into a page whose offset wrapped."""
        cache = case.kv_cache
        for token, slot in enumerate(case.slot_mapping.tolist()):
            page = slot // cache.shape[1]
            offset = page * cache.stride(0)
            wrapped = (offset + 2**31) % 2**32 - 2**31
            single = cache.as_strided(cache.shape[1:], cache.stride()[1:], cache.storage_offset() + wrapped)
            one = torch.tensor([slot % cache.shape[1]])
            write_rows(case.ckv[token : token + 1], case.kpe[token : token + 1], single[None], one, case.k_scale)


class OneTokenASlot(Broken):
    """A token whose slot another token has as well is left out, and so is the other."""

    name = "one-token-a-slot"

    def kv_cache_write(self, case: KVCacheWriteCase) -> None:
        """Right, without the tokens that share a slot."""
        slots = case.slot_mapping
        shared = (slots[:, None] == slots[None, :]).sum(1) > 1
        super().kv_cache_write(dataclasses.replace(case, slot_mapping=torch.where(shared, -1, slots)))
