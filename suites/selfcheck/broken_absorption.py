"""Planted faults in the products with one matrix a head: the reference with one thing wrong each."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mla_conformance.suites.harness.absorption_cases import HeadsProductCase
from mla_conformance.suites.selfcheck.broken import Broken


class BrokenProduct(Broken):
    """Both products by one method, which writes into ``case.result`` from tokens and matrices."""

    def product(self, case: HeadsProductCase) -> Tensor:
        """Right here; each subclass breaks one thing. Returns float64 [tokens, heads, width]."""
        return torch.einsum("thi,hiw->thw", case.x.double(), case.weight.double())

    def absorb_query(self, case: HeadsProductCase) -> Tensor:
        case.result.copy_(self.product(case))
        return case.out

    def v_up_proj(self, case: HeadsProductCase) -> Tensor:
        case.result.copy_(self.product(case))
        return case.out


class OnePercentOff(BrokenProduct):
    """The result is 1 % too large."""

    name = "one-percent-off"

    def product(self, case: HeadsProductCase) -> Tensor:
        """Right for zeros."""
        return super().product(case) * 1.01


class DropsTheLastTerm(BrokenProduct):
    """The last term of each sum is left out, as by a loop over whole blocks."""

    name = "drops-the-last-term"

    def product(self, case: HeadsProductCase) -> Tensor:
        """Right where it is 0."""
        return super().product(dataclasses.replace(case, x=case.x[..., :-1], weight=case.weight[:, :-1]))


class MultipliesByTheTranspose(BrokenProduct):
    """A square matrix is multiplied from its other side."""

    name = "multiplies-by-the-transpose"

    def product(self, case: HeadsProductCase) -> Tensor:
        """Right where it does not fit."""
        square = case.weight.shape[1] == case.weight.shape[2]
        return super().product(dataclasses.replace(case, weight=case.weight.mT) if square else case)


class MatrixOfTheNextHead(BrokenProduct):
    """Heads are off by one."""

    name = "matrix-of-the-next-head"

    def product(self, case: HeadsProductCase) -> Tensor:
        """Right for one head."""
        return super().product(dataclasses.replace(case, weight=case.weight.roll(1, 0)))


class SumsInFloat16(BrokenProduct):
    """Partial sums are float16 (ggml-org/llama.cpp#13137)."""

    name = "sums-in-float16"

    def product(self, case: HeadsProductCase) -> Tensor:
        """Right up to 65,504."""
        half = case.x.shape[-1] // 2
        parts = (
            super(SumsInFloat16, self).product(
                dataclasses.replace(case, x=case.x[..., part], weight=case.weight[:, part])
            )
            for part in (slice(None, half), slice(half, None))
        )
        return sum(part.half() for part in parts).double()  # type: ignore[union-attr]


class IgnoresTokenStrides(BrokenProduct):
    """Tokens are taken to lie as far apart as their heads are long."""

    name = "ignores-token-strides"

    def product(self, case: HeadsProductCase) -> Tensor:
        """Right for dense tokens."""
        _, heads, inner = case.x.shape
        dense = case.x.as_strided(case.x.shape, (heads * inner, inner, 1), case.x.storage_offset())
        return super().product(dataclasses.replace(case, x=dense))


class WritesDensely(Broken):
    """The result goes where it would be in a dense buffer (vLLM 0.16.0 with a row-strided one)."""

    name = "writes-densely"

    def v_up_proj(self, case: HeadsProductCase) -> Tensor:
        """Right where the buffer is dense."""
        out = super().v_up_proj(case)
        dense = out.clone(memory_format=torch.contiguous_format)
        out.as_strided(out.shape, dense.stride(), out.storage_offset()).copy_(dense)
        return out


class NanSpreads(BrokenProduct):
    """0 times a neighbour is added, as where rows of one tile are mixed by a mask of zeros."""

    name = "nan-spreads"

    def product(self, case: HeadsProductCase) -> Tensor:
        """Right where all neighbours are finite."""
        product = super().product(case)
        return product + 0 * product.roll(1, 0)


class OffsetsOf32Bits(BrokenProduct):
    """The offset of a token is a signed 32-bit number."""

    name = "offsets-of-32-bits"

    def product(self, case: HeadsProductCase) -> Tensor:
        """Right in the first 2**31 elements."""
        at = [(i * case.x.stride(0) + 2**31) % 2**32 - 2**31 for i in range(len(case.x))]
        rows = [
            case.x.as_strided(case.x.shape[1:], case.x.stride()[1:], case.x.storage_offset() + offset) for offset in at
        ]
        return super().product(dataclasses.replace(case, x=torch.stack(rows)))


class WritesWithoutTokens(Broken):
    """The first row is cleared whether there is one or not."""

    name = "writes-without-tokens"

    def absorb_query(self, case: HeadsProductCase) -> Tensor:
        """Right for one token or more."""
        return _cleared(super().absorb_query(case))

    def v_up_proj(self, case: HeadsProductCase) -> Tensor:
        """Right for one token or more."""
        return _cleared(super().v_up_proj(case))


def _cleared(out: Tensor) -> Tensor:
    if out.shape[0] == 0:
        out.as_strided((1,), (1,), out.storage_offset()).zero_()
    return out
