"""Planted faults: the reference with one thing wrong each. ``--impl mla_conformance.suites.selfcheck.broken:Zeros``."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from mla_conformance.suites.harness.cases import DecodeCase
from mla_conformance.suites.harness.implementations import reference


class Broken(reference.Adapter):
    """A right implementation; each subclass below breaks one thing."""

    compiles_kernels = False


class SwappedHeads(Broken):
    """Heads 0 and 1 change places in the output."""

    name = "swapped-heads"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right, then swapped."""
        out, lse = super().mla_decode(case)
        heads = min(2, out.shape[1])
        out[:, :heads] = out[:, :heads].flip(1).clone()
        return out, lse


class Zeros(Broken):
    """Returns zeros without looking."""

    name = "zeros"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Nothing but zeros."""
        return case.out.zero_(), torch.zeros_like(case.lse)


class ScaleOnePercentOff(Broken):
    """The softmax scale is 1 % too large."""

    name = "scale-one-percent-off"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right, for another scale."""
        problem = case.problem.replace(softmax_scale=case.problem.scale * 1.01)
        return super().mla_decode(dataclasses.replace(case, problem=problem))


class PageShiftedByOne(Broken):
    """Every request reads from the second page of its table on."""

    name = "page-shifted-by-one"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right, for a table rolled within the pages that the request owns."""
        table = case.block_table.clone()
        for row, length in enumerate(case.problem.lengths):
            used = -(-length // case.problem.page_size)
            table[row, :used] = table[row, :used].roll(-1)
        return super().mla_decode(dataclasses.replace(case, block_table=table))


class LseInBaseTwo(Broken):
    """The log-sum-exp is a base-2 logarithm."""

    name = "lse-in-base-two"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right output, other unit."""
        out, lse = super().mla_decode(case)
        return out, lse / math.log(2)


class LseInQueryDtype(Broken):
    """The log-sum-exp is rounded to the query dtype."""

    name = "lse-in-query-dtype"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right output, rounded lse."""
        out, lse = super().mla_decode(case)
        return out, lse.to(out.dtype)


class DropsLastToken(Broken):
    """The last token of every request is left out."""

    name = "drops-last-token"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right, for shorter requests."""
        return super().mla_decode(dataclasses.replace(case, seq_lens=(case.seq_lens - 1).clamp_min(0)))


class NanInEmptyRows(Broken):
    """0 / 0 where a request has no tokens."""

    name = "nan-in-empty-rows"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right elsewhere."""
        out, lse = super().mla_decode(case)
        out[case.seq_lens == 0] = torch.nan
        return out, lse


class RopeUnscaled(Broken):
    """The scale of an fp8 cache is applied to the latent part only."""

    name = "rope-unscaled"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right, for a rotary query that undoes the scale."""
        q = case.q.double()
        q[..., case.problem.kv_lora_rank :] /= case.problem.k_scale if case.problem.is_fp8 else 1.0
        return super().mla_decode(dataclasses.replace(case, q=q))


class IgnoresStrides(Broken):
    """Writes its result densely from the start of the output, whatever the strides."""

    name = "ignores-strides"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right where the output is dense."""
        out, lse = super().mla_decode(case)
        dense = out.clone()
        dense_view = out.as_strided(out.shape, dense.contiguous().stride(), out.storage_offset())
        dense_view.copy_(dense)
        return out, lse


class ReadsTheTail(Broken):
    """Multiplies the tail of the last page by zero instead of leaving it out."""

    name = "reads-the-tail"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right where the tail is finite."""
        out, lse = super().mla_decode(case)
        for row, length in enumerate(case.problem.lengths):
            if length % case.problem.page_size:
                page = case.kv_cache[case.block_table[row, length // case.problem.page_size].long()]
                tail = page[length % case.problem.page_size :, : case.problem.kv_lora_rank].to(out.dtype)
                out[row] += 0 * tail.sum(0)
        return out, lse


class ReturnsAnotherBuffer(Broken):
    """Leaves the caller's output as it was and returns a fresh tensor: a phantom output."""

    name = "returns-another-buffer"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right numbers, in the wrong place."""
        fresh = dataclasses.replace(case, out=torch.empty_like(case.out))
        return super().mla_decode(fresh)


class WritesItsInput(Broken):
    """Uses the caller's query as scratch."""

    name = "writes-its-input"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right numbers, changed input."""
        result = super().mla_decode(case)
        case.q.mul_(2)
        return result


class StaleAnswer(Broken):
    """Returns the previous call's result where the shape fits."""

    name = "stale-answer"

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Right once."""
        last = self._last
        out, lse = super().mla_decode(case)
        self._last = out.clone(), lse.clone()
        if last is not None and last[0].shape == out.shape:
            out.copy_(last[0])
            lse = last[1]
        return out, lse


class DependsOnTheBatch(Broken):
    """Rounds once more where a request is not alone."""

    name = "depends-on-the-batch"

    def mla_decode(self, case: DecodeCase) -> tuple[Tensor, Tensor]:
        """Within every bound, but not the same bits."""
        out, lse = super().mla_decode(case)
        if len(out) > 1:
            lse = torch.nextafter(lse, torch.full_like(lse, torch.inf))
            out.copy_(torch.nextafter(out, torch.zeros_like(out)))
        return out, lse
