"""Verdicts: what a test asserts about an outcome, with a message that says where and by how much."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_conformance.suites.harness.errors import Mismatch
from mla_conformance.suites.harness.outcomes import Outcome
from mla_conformance.suites.harness.record import Record

WORST_SHOWN = 8


def check_output(outcome: Outcome) -> None:
    """The output is within the derived bound of the oracle, element by element and row by row."""
    __tracebackhide__ = True
    for row in range(len(outcome.case.rows)):
        expected, bound = outcome.expected(row), outcome.bound(row)
        error = (outcome.out[row].double() - expected.out).abs()
        _judge(outcome, "out", error, bound.out, outcome.out[row], expected.out, row, bound.terms)
        norms = error.norm(dim=-1)
        _judge(outcome, "out row norm", norms, bound.out_row, norms, torch.zeros_like(norms), row, {})


def check_lse(outcome: Outcome) -> None:
    """The log-sum-exp (natural log) is within the derived bound of the oracle's."""
    __tracebackhide__ = True
    for row in range(len(outcome.case.rows)):
        expected, bound = outcome.expected(row).lse, outcome.bound(row).lse
        actual = outcome.lse[row]
        error = torch.where(actual.double() == expected, 0.0, (actual.double() - expected).abs())
        _judge(outcome, "lse", error, bound, actual, expected, row, {})


def check_within(outcome: Outcome, quantity: str, row: int, actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    """``actual`` is within ``bound`` of ``expected``, element by element."""
    __tracebackhide__ = True
    _judge(outcome, quantity, (actual.double() - expected).abs(), bound, actual, expected, row, {})


def check_equal_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Two tensors have the same dtype, shape and bits, but for the sign of zero; every NaN counts as the same."""
    __tracebackhide__ = True
    _check_same(actual, expected, what, torch.eq)


def check_exact(actual: Tensor, expected: Tensor, what: str) -> None:
    """As :func:`check_equal_bits`, and bit for bit, so that zeros have the same sign."""
    __tracebackhide__ = True
    _check_same(actual, expected, what, lambda a, b: _bits(a) == _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def _check_same(actual: Tensor, expected: Tensor, what: str, equal: Callable[[Tensor, Tensor], Tensor]) -> None:
    __tracebackhide__ = True
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise Mismatch(f"{what}: {actual.dtype} {tuple(actual.shape)} against {expected.dtype} {tuple(expected.shape)}")
    same = equal(actual, expected) | (actual.isnan() & expected.isnan())
    if not same.all():
        raise Mismatch(f"{what}: {int((~same).sum())} of {same.numel()} elements differ\n{worst(actual, expected)}")


def check_empty_rows(outcome: Outcome) -> None:
    """A request without tokens has output 0 and lse -inf."""
    __tracebackhide__ = True
    for row, length in enumerate(outcome.case.problem.lengths):
        if length == 0:
            zero = torch.zeros_like(outcome.out[row])
            check_equal_bits(outcome.out[row], zero, f"out of request {row}, which has no tokens")
            nothing = torch.full_like(outcome.lse[row], -torch.inf)
            check_equal_bits(outcome.lse[row], nothing, f"lse of request {row}, which has no tokens")


def _judge(
    outcome: Outcome,
    quantity: str,
    error: Tensor,
    bound: Tensor,
    actual: Tensor,
    expected: Tensor,
    row: int,
    terms: dict[str, float],
) -> None:
    __tracebackhide__ = True
    judge_error(outcome.record, quantity, error, bound, actual, expected, terms, where=f" of request {row}")


def judge_error(
    record: Record,
    quantity: str,
    error: Tensor,
    bound: Tensor,
    actual: Tensor,
    expected: Tensor,
    terms: dict[str, float],
    where: str = "",
) -> None:
    """Note the largest error over its bound for ``quantity``, and raise Mismatch if one is beyond it."""
    __tracebackhide__ = True
    wrong = ~(error <= bound)  # also where the error is NaN
    ratio = torch.where(error == 0, 0.0, error / bound.clamp_min(torch.finfo(bound.dtype).tiny))
    largest = float(ratio.nan_to_num(torch.inf).max()) if ratio.numel() else 0.0
    record.note_error(quantity, largest, terms)
    if wrong.any():
        raise Mismatch(
            f"{quantity}{where}: {int(wrong.sum())} of {wrong.numel()} elements are out of bounds, "
            f"the worst by a factor of {largest:.3g}\n{worst(actual, expected, bound)}"
        )


def worst(actual: Tensor, expected: Tensor, bound: Tensor | None = None) -> str:
    """A table of the worst elements: index, actual, expected, error, bound."""
    difference = (actual.double() - expected.double()).abs()
    excess = difference if bound is None else difference / bound.clamp_min(torch.finfo(bound.dtype).tiny)
    order = excess.nan_to_num(torch.inf, torch.inf).flatten().argsort(descending=True)[:WORST_SHOWN]
    lines = [f"{'index':>16} {'actual':>14} {'expected':>14} {'error':>11}" + (" bound" if bound is not None else "")]
    for flat in order.tolist():
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), actual.shape))
        line = f"{index!s:>16} {float(actual[index]):14.7g} {float(expected[index]):14.7g} "
        line += f"{float(difference[index]):11.3g}"
        lines.append(line if bound is None else f"{line} {float(bound[index]):.3g}")
    return "\n".join(lines)
