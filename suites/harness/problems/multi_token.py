"""The problem of one MLA decode call with several query tokens a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mla_conformance.suites.harness.problems.base import check_integers, is_integer
from mla_conformance.suites.harness.problems.decode import MLADecodeProblem


@dataclass(frozen=True, repr=False)
class MLAMultiTokenProblem(MLADecodeProblem):
    """One MLA decode call in which every request has ``query_tokens`` query tokens, the last of its tokens.

    Args:
        query_tokens: query tokens of each request, padding included.
        causal: whether a query token sees no token behind its own; without it, each sees all of its request.
        query_lens: query tokens of each request that are no padding; ``None`` means all.
    """

    query_tokens: int = 3
    causal: bool = True
    query_lens: tuple[int, ...] | None = None

    operation: ClassVar[str] = "mla_decode_multi"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, query_tokens=1)
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal={self.causal!r} must be True or False")
        if self.query_lens is None:
            return
        right = isinstance(self.query_lens, tuple) and len(self.query_lens) == len(self.lengths)
        if not right or not all(is_integer(n, 0) and n <= self.query_tokens for n in self.query_lens):
            raise ValueError(
                f"query_lens={self.query_lens!r} must be None or one integer from 0 to {self.query_tokens} a request"
            )

    @property
    def products(self) -> int:
        """Score products of the call."""
        return super().products * self.query_tokens

    def visible(self, request: int) -> list[int]:
        """How many tokens of its request each query token sees, counted from the first; padding sees none.

        The last query token that is no padding is the last token of the request (with speculation, the last draft).
        """
        length = self.lengths[request]
        real = self.query_tokens if self.query_lens is None else self.query_lens[request]
        seen = [max(0, length - (real - 1 - j)) if self.causal else length for j in range(real)]
        return seen + [0] * (self.query_tokens - real)
