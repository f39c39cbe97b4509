"""What one test did, for the report."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Record:
    """What one test did, for the report.

    Attributes:
        ran: launches, or compilations.
        declined: how often each reason was given for not running.
        problem: the last problem, printed.
        worst: per quantity the largest error over its bound, with the bound's terms and the problem.
        kernels: what the compiled kernels use of the target.
    """

    ran: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    problem: str = ""
    worst: dict[str, Any] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)

    def note_error(self, quantity: str, ratio: float, terms: dict[str, float]) -> None:
        """Keep the largest ratio of error to bound for ``quantity``, with the bound's terms."""
        if ratio >= self.worst.get(quantity, {"ratio": -1.0})["ratio"]:
            shares = {name: float(f"{share:.3g}") for name, share in terms.items()}
            self.worst[quantity] = {"ratio": float(f"{ratio:.4g}"), "terms": shares, "problem": self.problem}

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self) | {"declined": dict(self.declined)}
