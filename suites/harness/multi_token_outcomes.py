"""What a decode of several query tokens gave: an outcome of decode, in which every query token is a request."""

from __future__ import annotations

from torch import Tensor

from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.implementation import Implementation
from mla_conformance.suites.harness.multi_token_cases import MultiTokenCase, flattened
from mla_conformance.suites.harness.outcomes import Outcome, in_place
from mla_conformance.suites.harness.record import Record


def multi_token_outcome(
    case: MultiTokenCase, returned: tuple[Tensor, Tensor], implementation: Implementation, record: Record
) -> Outcome:
    """Take what the implementation returned; ``out`` and ``lse`` are flattened to [batch * query_tokens, heads, ...].

    Raises:
        Mismatch: the output is not the caller's buffer, or the log-sum-exp has another shape.
    """
    out, lse = returned
    in_place(out, case.out)
    if lse.shape != case.lse.shape:
        raise Mismatch(f"lse has shape {tuple(lse.shape)}, not [batch, query tokens, heads] = {tuple(case.lse.shape)}")
    flat = flattened(case)
    return Outcome(flat, out.flatten(0, 1), lse.flatten(0, 1), implementation.arithmetic(flat.problem), record)
