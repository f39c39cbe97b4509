"""Planted faults of decode with several query tokens: the reference with one thing wrong each."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mla_conformance.suites.harness.multi_token_cases import MultiTokenCase
from mla_conformance.suites.harness.problems import MLAMultiTokenProblem
from mla_conformance.suites.selfcheck.broken import Broken
from mla_conformance.suites.selfcheck.broken_more import one_step_up

Answer = tuple[Tensor, Tensor]


def as_if(case: MultiTokenCase, **fields: object) -> MultiTokenCase:
    """The case of another problem on the same tensors."""
    return dataclasses.replace(case, problem=case.problem.replace(**fields))


class ReversedTokens(Broken):
    """The query tokens of a request come out in reverse."""

    name = "reversed-tokens"

    def mla_decode_multi(self, case: MultiTokenCase) -> Answer:
        """Right for one query token."""
        out, lse = super().mla_decode_multi(case)
        out.copy_(out.flip(1).clone())
        return out, lse.flip(1)


class SeesOneTokenAhead(Broken):
    """Every query token but the last sees one token too many."""

    name = "sees-one-token-ahead"

    def mla_decode_multi(self, case: MultiTokenCase) -> Answer:
        """Right in the last query token."""
        tokens = case.problem.query_tokens
        longer = _extents(case.problem, lambda length, j: min(length, length - (tokens - 1 - j) + 1))
        return super().mla_decode_multi(dataclasses.replace(case, problem=longer))


class AlwaysCausal(Broken):
    """Ignores that there is no mask."""

    name = "always-causal"

    def mla_decode_multi(self, case: MultiTokenCase) -> Answer:
        """Right with a causal mask."""
        return super().mla_decode_multi(as_if(case, causal=True))


class NanWhereNothingIsSeen(Broken):
    """0 / 0 where a query token sees nothing."""

    name = "nan-where-nothing-is-seen"

    def mla_decode_multi(self, case: MultiTokenCase) -> Answer:
        """Right elsewhere."""
        out, lse = super().mla_decode_multi(case)
        out[lse == -torch.inf] = torch.nan
        return out, lse


class PaddingMovesTheMask(Broken):
    """Counts padding among the query tokens when it works out what each sees."""

    name = "padding-moves-the-mask"

    def mla_decode_multi(self, case: MultiTokenCase) -> Answer:
        """Right without padding or mask."""
        return super().mla_decode_multi(as_if(case, query_lens=None))


class MixesHeadsAndTokens(Broken):
    """Takes row i for head i // query_tokens."""

    name = "mixes-heads-and-tokens"

    def mla_decode_multi(self, case: MultiTokenCase) -> Answer:
        """Right for one head or one query token."""
        q = case.q.transpose(1, 2).reshape(case.q.shape)
        return super().mla_decode_multi(dataclasses.replace(case, q=q))


class IgnoresQueryStrides(Broken):
    """Reads the queries as if they were dense."""

    name = "ignores-query-strides"

    def mla_decode_multi(self, case: MultiTokenCase) -> Answer:
        """Right where they are."""
        dense = torch.empty(case.q.shape).stride()
        q = case.q.as_strided(case.q.shape, dense, case.q.storage_offset())
        return super().mla_decode_multi(dataclasses.replace(case, q=q))


class SeesTheBatch(Broken):
    """The last bit depends on the number of requests."""

    name = "sees-the-batch"

    def mla_decode_multi(self, case: MultiTokenCase) -> Answer:
        """Within every bound."""
        out, lse = super().mla_decode_multi(case)
        if len(out) > 1:
            out.copy_(one_step_up(out))
        return out, lse


def _extents(problem: MLAMultiTokenProblem, seen: object) -> MLAMultiTokenProblem:
    """``problem``, but that query token j of a request of ``length`` sees ``seen(length, j)`` tokens."""

    class Other(MLAMultiTokenProblem):
        def visible(self, request: int) -> list[int]:
            return [seen(self.lengths[request], j) for j in range(self.query_tokens)]  # type: ignore[operator]

    return Other(**{field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)})
