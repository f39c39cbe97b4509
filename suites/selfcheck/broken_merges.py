"""Planted faults in merging attention states: the reference with one thing wrong each."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from mla_conformance.reference.split_kv import merge_many
from mla_conformance.suites.harness.merge_cases import MergeShardsCase, MergeStatesCase
from mla_conformance.suites.selfcheck.broken import Broken

Answer = tuple[Tensor, Tensor]


class BrokenMerge(Broken):
    """Both merges by one method, which takes float64 [states, tokens, heads, width] and [states, tokens, heads]."""

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right here; each subclass breaks one thing."""
        merged = merge_many(outs, lses)
        return merged.out, merged.lse

    def merge_states(self, case: MergeStatesCase) -> Answer:
        outs, lses = torch.stack((case.out_a, case.out_b)), torch.stack((case.lse_a, case.lse_b))
        return _into(case, *self.merge(outs.double(), lses.double()))

    def merge_shards(self, case: MergeShardsCase) -> Answer:
        return _into(case, *self.merge(case.outs.double(), case.lses.double()))


class EqualWeights(BrokenMerge):
    """The mean of the outputs."""

    name = "equal-weights"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right for equal log-sum-exps."""
        return outs.mean(0), super().merge(outs, lses)[1]


class WeightsInHalfPrecision(BrokenMerge):
    """Log-sum-exps are rounded to bfloat16 on their way, as a backend does that allocates them in the query's dtype."""

    name = "weights-in-half-precision"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right for log-sum-exps of few bits."""
        return super().merge(outs, lses.bfloat16().double())


class DropsTheLastState(BrokenMerge):
    """The last state is left out."""

    name = "drops-the-last-state"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right where it is empty."""
        return super().merge(outs[:-1], lses[:-1])


class LseInBaseTwo(BrokenMerge):
    """Log-sum-exps are taken for base-2 logarithms (sgl-project/sglang#40903)."""

    name = "lse-in-base-two"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right in that unit."""
        out, lse = super().merge(outs, lses * math.log(2))
        return out, lse / math.log(2)


class EmptyStatesHaveAFiniteLse(BrokenMerge):
    """A state without keys says 3, so that what it holds is weighed in (vllm-project/vllm#49294)."""

    name = "empty-states-have-a-finite-lse"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right where every state has keys."""
        return super().merge(outs, lses.masked_fill(lses.isinf(), 3.0))


class EmptyOnlyForAllTokens(BrokenMerge):
    """A state is empty for the whole batch or for none of it (sgl-project/sglang#22688)."""

    name = "empty-only-for-all-tokens"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right where all tokens are alike."""
        empty = lses.isinf()
        return super().merge(outs, lses.masked_fill(empty & ~empty.all(dim=(1, 2), keepdim=True), 0.0))


class ZeroTimesNan(BrokenMerge):
    """The output of an empty state is multiplied by 0."""

    name = "zero-times-nan"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right where it is finite."""
        out, lse = super().merge(outs, lses)
        return out + (outs * lses.isinf()[..., None] * 0.0).sum(0), lse


class PlusInfinityIsLarge(BrokenMerge):
    """A log-sum-exp of +inf is the largest there is (vllm-project/vllm#15492)."""

    name = "plus-infinity-is-large"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right for -inf."""
        out, lse = super().merge(outs, lses)
        infinite = (lses == math.inf).any(0)
        return out.masked_fill(infinite[..., None], math.nan), lse.masked_fill(infinite, math.inf)


class NanWhereAllAreEmpty(BrokenMerge):
    """-inf - -inf, and 0 / 0 (vllm-project/vllm#27491, vllm-project/vllm#39148)."""

    name = "nan-where-all-are-empty"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right elsewhere."""
        out, lse = super().merge(outs, lses)
        nothing = lses.isinf().all(0)
        return out.masked_fill(nothing[..., None], math.nan), lse.masked_fill(nothing, math.nan)


class NothingSubtracted(BrokenMerge):
    """The exp of a log-sum-exp as it is, in float32."""

    name = "nothing-subtracted"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right up to 88."""
        weights = lses.float().exp()
        total = weights.sum(0)
        return (outs.float() * (weights / total)[..., None]).sum(0), total.log()


class SubtractsTheFirst(BrokenMerge):
    """The log-sum-exp of the first state is subtracted, not the largest."""

    name = "subtracts-the-first"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right where no other is larger by 88."""
        weights = (lses - lses[:1]).float().exp()
        total = weights.sum(0)
        return (outs.float() * (weights / total)[..., None]).sum(0), total.log() + lses[0].float()


class DividesLast(BrokenMerge):
    """Weighted outputs are added in float32 before they are divided by the sum of weights."""

    name = "divides-last"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right where the sum is finite."""
        weights = (lses - lses.amax(0)).float().exp()
        _, lse = super().merge(outs, lses)
        return (outs.float() * weights[..., None]).sum(0) / weights.sum(0)[..., None], lse


class IgnoresTokenStrides(BrokenMerge):
    """A token is as many elements long as its heads."""

    name = "ignores-token-strides"

    def merge_states(self, case: MergeStatesCase) -> Answer:
        """Right without gaps between tokens."""
        out_a, out_b = _without_token_gaps(case.out_a), _without_token_gaps(case.out_b)
        return super().merge_states(dataclasses.replace(case, out_a=out_a, out_b=out_b))

    def merge_shards(self, case: MergeShardsCase) -> Answer:
        """Right without gaps between tokens."""
        outs = torch.stack([_without_token_gaps(out) for out in case.outs])
        return super().merge_shards(dataclasses.replace(case, outs=outs))


class HeadStrideOfTheFirst(BrokenMerge):
    """The second side is read with the head stride of the first."""

    name = "head-stride-of-the-first"

    def merge_states(self, case: MergeStatesCase) -> Answer:
        """Right where they agree."""
        strides = (case.out_b.stride(0), case.out_a.stride(1), 1)
        out_b = case.out_b.as_strided(case.out_b.shape, strides, case.out_b.storage_offset())
        return super().merge_states(dataclasses.replace(case, out_b=out_b))


class WritesTheGaps(BrokenMerge):
    """The result is written densely."""

    name = "writes-the-gaps"

    def merge_states(self, case: MergeStatesCase) -> Answer:
        """Right where it is dense."""
        out, lse = super().merge_states(case)
        dense = out.clone(memory_format=torch.contiguous_format)
        out.as_strided(out.shape, dense.stride(), out.storage_offset()).copy_(dense)
        return out, lse


class LseOfTheOtherLayout(BrokenMerge):
    """Log-sum-exps are taken for [heads, tokens] where shapes allow it (vllm-project/vllm#57012)."""

    name = "lse-of-the-other-layout"

    def merge(self, outs: Tensor, lses: Tensor) -> Answer:
        """Right for another number of heads than of tokens."""
        return super().merge(outs, lses.mT if lses.shape[1] == lses.shape[2] else lses)


class OffsetsOf32Bits(BrokenMerge):
    """The offset of a token, or of a shard, is a signed 32-bit number."""

    name = "offsets-of-32-bits"

    def merge_states(self, case: MergeStatesCase) -> Answer:
        """Right in the first 2**31 elements."""
        return super().merge_states(dataclasses.replace(case, out_a=_wrapped(case.out_a), out_b=_wrapped(case.out_b)))

    def merge_shards(self, case: MergeShardsCase) -> Answer:
        """Right in the first 2**31 elements."""
        return super().merge_shards(dataclasses.replace(case, outs=_wrapped(case.outs)))


class OverwritesTheLseFirst(BrokenMerge):
    """The merged log-sum-exp is stored before the weights are computed."""

    name = "overwrites-the-lse-first"

    def merge_states(self, case: MergeStatesCase) -> Answer:
        """Right where it has a place of its own."""
        lses = torch.stack((case.lse_a, case.lse_b)).double()
        lse = case.lse.copy_(merge_many(lses.new_zeros(*lses.shape, 1), lses).lse)
        merged = super().merge_states(dataclasses.replace(case, lse=torch.empty_like(lse)))
        return merged[0], lse


class FewerTokensThanAsked(BrokenMerge):
    """Tokens from 65,535 on are left out, as many as the second axis of a grid has room for."""

    name = "fewer-tokens-than-asked"

    def merge_states(self, case: MergeStatesCase) -> Answer:
        """Right up to there."""
        out, lse = super().merge_states(case)
        out[65_535:] = torch.nan
        return out, lse


def _into(case: Any, out: Tensor, lse: Tensor) -> Answer:
    return case.out.copy_(out), case.lse.copy_(lse)


def _without_token_gaps(out: Tensor) -> Tensor:
    """``out`` [tokens, heads, width] read with the token stride that it would have without gaps between tokens."""
    _, heads, _ = out.shape
    return out.as_strided(out.shape, (heads * out.stride(1), *out.stride()[1:]), out.storage_offset())


def _wrapped(out: Tensor) -> Tensor:
    """A copy of ``out``, its first dimension read at offsets that wrapped at 32 bits."""
    offsets = [(i * out.stride(0) + 2**31) % 2**32 - 2**31 for i in range(len(out))]
    return torch.stack([out.as_strided(out.shape[1:], out.stride()[1:], out.storage_offset() + at) for at in offsets])
