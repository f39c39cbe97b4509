"""Cases of merging attention states: outputs and log-sum-exps in poisoned memory, and the same densely."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_conformance.suites.harness.buffers import Buffer, poison_value
from mla_conformance.suites.harness.problems.merges import MergeShardsProblem, MergeStatesProblem

GAP = 5
FAR_STRIDE = 2**30 + 48
"""Elements between tokens, or shards, of the ``far`` layout: number 2 and above lie past a signed 32-bit offset."""
FAR_MARGIN = 2**31
"""Elements reserved before a ``far`` tensor: as far as a wrapped 32-bit offset can reach back."""
EXTREME = (0.0, 10_000.0, -10_000.0, 88.0, 9_900.0, -88.0, 700.0, 1e-3)
"""Log-sum-exps whose own exp overflows or vanishes, next to some that lie 88 or 100 from another."""
LARGE = 0.75
"""Of the largest number: a sum overflows, a mean does not, not even if its parts are rounded before they are added."""


@dataclass
class MergeStatesCase:
    """The tensors of one merge of two states.

    Attributes:
        out_a: [tokens, heads, width], any strides but the last; poison where empty.
        lse_a: float32 [tokens, heads], any strides.
        out_b: as out_a.
        lse_b: as lse_a.
        out: [tokens, heads, width], poisoned, to be written fully; ``out_a`` itself in place.
        lse: float32 [tokens, heads], likewise ``lse_a`` itself.
        outs: what out_a and out_b held, dense, [2, tokens, heads, width], for the oracle.
        lses: the same of the log-sum-exps, [2, tokens, heads].
    """

    problem: MergeStatesProblem
    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor
    out: Tensor
    lse: Tensor
    outs: Tensor
    lses: Tensor
    buffers: list[Buffer]


@dataclass
class MergeShardsCase:
    """The tensors of one merge of the states of all ranks.

    Attributes:
        outs: [shards, tokens, heads, width], any strides but the last; poison where empty.
        lses: float32 [shards, tokens, heads], any strides.
        out: [tokens, heads, width], poisoned, to be written fully.
        lse: float32 [tokens, heads], poisoned, to be written fully.
    """

    problem: MergeShardsProblem
    outs: Tensor
    lses: Tensor
    out: Tensor
    lse: Tensor
    buffers: list[Buffer]


def build_states(problem: MergeStatesProblem, device: torch.device | str = "cpu") -> MergeStatesCase:
    """Lay ``problem`` out in poisoned memory on ``device``."""
    outs, lses = draw(problem)
    far = problem.layout == "far"
    if problem.layout == "halves":
        pair = _outputs("out_a and out_b", problem, (problem.tokens, problem.heads, 2 * problem.width))
        halves = pair.view.view(problem.tokens, problem.heads, 2, problem.width)
        halves.copy_(outs.movedim(0, 2))
        buffers = [pair]
    else:
        buffers = [_outputs("out_a", problem, outs.shape[1:]), _outputs("out_b", problem, outs.shape[1:])]
        for buffer, values in zip(buffers, outs, strict=True):
            buffer.view.copy_(values)
    buffers += [_log_sums(name, problem, lses.shape[1:]) for name in ("lse_a", "lse_b")]
    for buffer, values in zip(buffers[-2:], lses, strict=True):
        buffer.view.copy_(values)
    if problem.in_place:
        buffers[0].writable = buffers[-2].writable = True
    else:
        buffers += [_outputs("out", problem, outs.shape[1:]), _log_sums("lse", problem, lses.shape[1:])]
        buffers[-2].writable = buffers[-1].writable = True

    buffers = [buffer.to(torch.device(device)) for buffer in buffers]
    views = {buffer.name: buffer.view for buffer in buffers}
    if problem.layout == "halves":
        whole = views.pop("out_a and out_b")
        views |= {"out_a": whole[..., : problem.width], "out_b": whole[..., problem.width :]}
    # Far outputs are address space, too large to compare byte by byte.
    guarded = [buffer for buffer in buffers if not (far and buffer.name.startswith("out"))]
    for buffer in guarded:
        buffer.guard()
    views.setdefault("out", views["out_a"])
    views.setdefault("lse", views["lse_a"])
    return MergeStatesCase(problem=problem, outs=outs.to(device), lses=lses.to(device), buffers=guarded, **views)


def build_shards(problem: MergeShardsProblem, device: torch.device | str = "cpu") -> MergeShardsCase:
    """Lay ``problem`` out in poisoned memory on ``device``."""
    return lay_out_shards(problem, *draw(problem), device)


def lay_out_shards(
    problem: MergeShardsProblem, outs: Tensor, lses: Tensor, device: torch.device | str = "cpu"
) -> MergeShardsCase:
    """Lay these states out as ``problem`` says."""
    buffers = [
        _outputs("outs", problem, outs.shape),
        _log_sums("lses", problem, lses.shape),
        _outputs("out", problem.replace(layout="dense") if problem.layout == "far" else problem, outs.shape[1:]),
        _log_sums("lse", problem, lses.shape[1:]),
    ]
    buffers[0].view.copy_(outs)
    buffers[1].view.copy_(lses)
    buffers[2].writable = buffers[3].writable = True
    buffers = [buffer.to(torch.device(device)) for buffer in buffers]
    views = {buffer.name: buffer.view for buffer in buffers}
    # Far outputs are address space, too large to compare byte by byte.
    guarded = [buffer for buffer in buffers if not (problem.layout == "far" and buffer.name == "outs")]
    for buffer in guarded:
        buffer.guard()
    return MergeShardsCase(problem=problem, buffers=guarded, **views)


def reordered(case: MergeShardsCase, order: list[int]) -> MergeShardsCase:
    """The same states with the shards in another order."""
    return lay_out_shards(case.problem, case.outs[order].cpu(), case.lses[order].cpu(), case.outs.device)


def draw(problem: MergeStatesProblem | MergeShardsProblem) -> tuple[Tensor, Tensor]:
    """Draw outputs [states, tokens, heads, width] in their dtype, and float32 log-sum-exps [states, tokens, heads]."""
    generator = torch.Generator().manual_seed(problem.seed)
    shape = (problem.states, problem.tokens, problem.heads)
    outs = torch.randn(*shape, problem.width, dtype=torch.float64, generator=generator)
    lses = 2 + 2 * torch.randn(shape, dtype=torch.float64, generator=generator)
    if problem.values == "constant":
        keys = torch.randint(1, 4097, shape, generator=generator)
        lses = lses[:1] + keys.double().log()
        outs = outs[:1].expand(outs.shape)
    elif problem.values == "extreme":
        picks = torch.randint(0, len(EXTREME), shape, generator=generator)
        lses = torch.tensor(EXTREME, dtype=torch.float64)[picks]
    elif problem.values == "large":
        largest = torch.finfo(getattr(torch, problem.dtype)).max
        outs = (outs[:1].sign() * LARGE * largest).expand(outs.shape)
        lses = lses[:1] + lses / 64
    outs = outs.to(getattr(torch, problem.dtype))
    lses = lses.float()
    empty = empty_states(problem)
    outs[empty] = 0.0 if problem.empty_out == "zero" else poison_value(outs.dtype, problem.poison)
    chance = {"-inf": 0.0, "inf": 1.0, "both": 0.5}[problem.empty_lse]
    plus = torch.rand(shape, generator=generator) < chance
    lses[empty] = torch.where(plus, math.inf, -math.inf)[empty]
    return outs, lses


def empty_states(problem: MergeStatesProblem | MergeShardsProblem) -> Tensor:
    """Which states of which rows are empty: bool [states, tokens, heads]."""
    states = torch.arange(problem.states)[:, None, None]
    rows = torch.arange(problem.tokens * problem.heads).view(1, problem.tokens, problem.heads)
    # Neighbouring tokens and neighbouring heads differ, whatever the number of heads.
    turn = rows // problem.heads + rows % problem.heads
    none = torch.zeros(problem.states, problem.tokens, problem.heads, dtype=torch.bool)
    if problem.empty == "mixed":
        # A row has none, one, another or all empty.
        return none | (turn % 4 == 3) | ((turn % 4 > 0) & (states == (turn % 4 - 1) % problem.states))
    return {
        "none": none,
        "first": none | (states == 0),
        "second": none | (states == 1),
        "one": none | (states == turn % problem.states),
        "all": ~none,
    }[problem.empty]


def _outputs(name: str, problem: MergeStatesProblem | MergeShardsProblem, shape: tuple[int, ...]) -> Buffer:
    """Memory for outputs, [..., tokens, heads, width]."""
    dtype, heads = getattr(torch, problem.dtype), problem.heads
    if problem.layout == "far":
        # The outermost dimension is the far one; of two states heads share its stride out.
        strides = {4: (FAR_STRIDE, heads * shape[-1], shape[-1], 1), 3: (FAR_STRIDE, FAR_STRIDE // heads, 1)}
        return Buffer.reserve(name, tuple(shape), strides[len(shape)], dtype, FAR_MARGIN)
    if problem.layout == "unequal":
        head = shape[-1] + {"out_a": 8, "out_b": 24}.get(name, 0)
        fill = poison_value(dtype, problem.poison)
        return Buffer.allocate(name, tuple(shape), (heads * head, head, 1), dtype, fill=fill)
    return Buffer.gapped(name, tuple(shape), GAP if problem.layout == "gapped" else 0, dtype, problem.poison)


def _log_sums(name: str, problem: MergeStatesProblem | MergeShardsProblem, shape: tuple[int, ...]) -> Buffer:
    """Memory for log-sum-exps, [..., tokens, heads]."""
    gap = GAP if problem.layout == "gapped" else 0
    if problem.lse_layout == "rows":
        return Buffer.gapped(name, tuple(shape), gap, torch.float32, problem.poison)
    swapped = Buffer.gapped(name, (*shape[:-2], shape[-1], shape[-2]), gap, torch.float32, problem.poison)
    return Buffer(name, swapped.storage, swapped.view.transpose(-1, -2))
