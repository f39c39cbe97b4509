"""What a write into a paged cache left there, and what the reference leaves in a copy of the same cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.reference.cache_write import write_rows
from mla_conformance.suites.harness.cache_cases import KVCacheWriteCase
from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.record import Record

SHOWN = 8


@dataclass
class KVCacheWriteOutcome:
    """What a write left: ``cache`` [pages, page_size, width], and the case it came from."""

    case: KVCacheWriteCase
    cache: Tensor
    record: Record

    def expected(self) -> Tensor:
        """The whole cache as the reference leaves it, dense."""
        case = self.case
        cache = case.before.clone()
        write_rows(case.ckv, case.kpe, cache, case.slot_mapping, case.k_scale)
        return cache


def kv_cache_write_outcome(
    case: KVCacheWriteCase, returned: None, implementation: Implementation, record: Record
) -> KVCacheWriteOutcome:
    """Take the case's own cache, which was written in place."""
    return KVCacheWriteOutcome(case, case.kv_cache, record)


def check_cache(outcome: KVCacheWriteOutcome) -> None:
    """Every byte of the cache is the reference's, also in slots that no token names."""
    __tracebackhide__ = True
    actual, expected = _bytes(outcome.cache), _bytes(outcome.expected())
    wrong = (actual != expected).nonzero()
    if len(wrong):
        lines = [
            f"page {page}, position {position}, byte {byte}: {actual[page, position, byte]:#04x}, "
            f"expected {expected[page, position, byte]:#04x}"
            for page, position, byte in wrong[:SHOWN].tolist()
        ]
        raise Mismatch(f"{len(wrong)} of {actual.numel()} bytes of the cache differ\n" + "\n".join(lines))


def _bytes(cache: Tensor) -> Tensor:
    """The cache as bytes [pages, page_size, bytes of a row]."""
    return cache.contiguous().view(torch.uint8)
