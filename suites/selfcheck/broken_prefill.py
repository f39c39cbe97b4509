"""Planted faults in prefill: the reference with one thing wrong each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_conformance.reference.prefill import prefill
from mla_conformance.suites.harness.prefill_cases import MLAPrefillCase, Part
from mla_conformance.suites.selfcheck.broken import Broken
from mla_conformance.suites.selfcheck.broken_more import one_step_up

Answer = tuple[Tensor, Tensor]


class ScaleOnePercentOff(Broken):
    """The softmax scale is 1 % too large."""

    name = "scale-one-percent-off"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right, for another scale."""
        problem = case.problem.replace(softmax_scale=case.problem.scale * 1.01)
        return super().mla_prefill(dataclasses.replace(case, problem=problem))


class ValuesAsWideAsKeys(Broken):
    """Columns of a value beyond the width of a key are left out."""

    name = "values-as-wide-as-keys"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right where a value is no wider."""
        out, lse = super().mla_prefill(case)
        out[: case.used_rows, :, case.problem.qk_nope_head_dim :] = 0
        return out, lse


class KeysOfTheNextHead(Broken):
    """Heads of the keys are off by one."""

    name = "keys-of-the-next-head"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right for one head."""
        return super().mla_prefill(_with_parts(case, lambda part: {"k_nope": part.k_nope.roll(1, 1)}))


class SeesOneKeyAhead(Broken):
    """A query sees the key behind its own."""

    name = "sees-one-key-ahead"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right in the last query."""
        return _token_by_token(case, lambda queries, keys, j: min(keys, keys - queries + j + 2))


class FirstQueryOnTheFirstKey(Broken):
    """The mask's diagonal starts in its first corner, as for as many queries as keys."""

    name = "first-query-on-the-first-key"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right without context."""
        return _token_by_token(case, lambda queries, keys, j: min(keys, j + 1))


class AlwaysCausal(Broken):
    """Ignores that there is no mask."""

    name = "always-causal"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right with a causal mask."""
        return super().mla_prefill(_with_parts(case, lambda part: {"causal": True}))


class NanWhereNothingIsSeen(Broken):
    """0 / 0 where a query sees nothing."""

    name = "nan-where-nothing-is-seen"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right elsewhere."""
        out, lse = super().mla_prefill(case)
        out[lse == -math.inf] = torch.nan
        return out, lse


class LosesTheLastChunk(Broken):
    """The last chunk of context is left out, as one that is not full."""

    name = "loses-the-last-chunk"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right in one pass."""
        return super().mla_prefill(dataclasses.replace(case, parts=case.parts[:-1] if case.parts[1:] else case.parts))


class LseInBaseTwo(Broken):
    """The log-sum-exp is a base-2 logarithm."""

    name = "lse-in-base-two"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right in that unit."""
        out, lse = super().mla_prefill(case)
        return out, lse / math.log(2)


class ClearsSpareRows(Broken):
    """The whole output is set to 0 first."""

    name = "clears-spare-rows"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right where every row belongs to a request."""
        case.out.zero_()
        return super().mla_prefill(case)


class ZeroTimesSpareKeys(Broken):
    """Values of keys that belong to no request get weight 0, and 0 times NaN is NaN."""

    name = "zero-times-spare-keys"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right where they are finite."""
        out, lse = super().mla_prefill(case)
        for part in case.parts:
            out[: case.used_rows] += 0 * part.v[int(part.cu_seqlens_k[-1]) :].sum(0)
        return out, lse


class IgnoresKeyStrides(Broken):
    """Keys are taken to lie as far apart as their heads are wide."""

    name = "ignores-key-strides"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right where they are dense."""
        return super().mla_prefill(_with_parts(case, lambda part: {"k_nope": _dense(part.k_nope)}))


class OffsetsOf32Bits(Broken):
    """The offset of a key is a signed 32-bit number."""

    name = "offsets-of-32-bits"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right in the first 2**31 elements."""
        return super().mla_prefill(
            _with_parts(case, lambda part: {"k_nope": _wrapped(part.k_nope), "v": _wrapped(part.v)})
        )


class ExpWithoutMaximum(Broken):
    """The exp of a score as it is, in float32."""

    name = "exp-without-maximum"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Right for scores below 88."""
        out, lse = super().mla_prefill(case)
        overflowing = lse > 88
        out[overflowing] = torch.nan
        return out, lse.masked_fill(overflowing, math.inf)


class SeesTheBatch(Broken):
    """The last bit depends on the number of requests."""

    name = "sees-the-batch"

    def mla_prefill(self, case: MLAPrefillCase) -> Answer:
        """Within every bound."""
        out, lse = super().mla_prefill(case)
        if len(case.requests) > 1:
            out.copy_(one_step_up(out))
        return out, lse


def _with_parts(case: MLAPrefillCase, changes: Callable[[Part], dict[str, Any]]) -> MLAPrefillCase:
    """The case with something of each part replaced."""
    return dataclasses.replace(case, parts=[dataclasses.replace(part, **changes(part)) for part in case.parts])


def _token_by_token(case: MLAPrefillCase, seen: Callable[[int, int, int], int]) -> Answer:
    """Query j of a request sees the first ``seen(queries, keys, j)`` keys."""
    nope = case.problem.qk_nope_head_dim
    for i, request in enumerate(case.requests):
        q, k_nope, k_pe, v = (tensor.double() for tensor in request)
        for j in range(len(q)):
            keys = max(0, seen(len(q), len(v), j))
            query = q[j : j + 1]
            row = prefill(
                query[..., :nope],
                query[..., nope:],
                k_nope[:keys],
                k_pe[:keys],
                v[:keys],
                softmax_scale=case.problem.scale,
                causal=False,
            )
            case.out[case.rows(i).start + j], case.lse[case.rows(i).start + j] = row.out[0], row.lse[0].float()
    return case.out, case.lse


def _dense(keys: Tensor) -> Tensor:
    _, heads, width = keys.shape
    return keys.as_strided(keys.shape, (heads * width, width, 1), keys.storage_offset())


def _wrapped(keys: Tensor) -> Tensor:
    """A copy, each key read at an offset that wrapped at 32 bits."""
    at = [(i * keys.stride(0) + 2**31) % 2**32 - 2**31 for i in range(len(keys))]
    return torch.stack(
        [keys.as_strided(keys.shape[1:], keys.stride()[1:], keys.storage_offset() + offset) for offset in at]
    )
